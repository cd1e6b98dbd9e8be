"""One step equals its definition in float64, however the samples are dealt; evaluation counts."""

import dataclasses
import json
import math
from collections.abc import Sequence

import pytest
import torch
from accelerate import Accelerator
from timm.task import ClassificationTask
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from torch.nn import functional as F

from lipsformer.analysis.instruments import InstrumentBase
from lipsformer.config import OptimConfig
from lipsformer.engine.distributed import make_accelerator
from lipsformer.engine.evaluation import EvalSums, evaluate
from lipsformer.engine.metrics import NonFiniteError, StepMetrics, summarize
from lipsformer.engine.optim import make_optimizer
from lipsformer.engine.schedule import CosineSchedule
from lipsformer.engine.steps import backward, train_epoch, train_step
from lipsformer.engine.stopwatch import Stopwatch
from lipsformer.engine.train_state import TrainState

CLASSES = 7
OPTIM = OptimConfig(lr=0.05, weight_decay=0.1, clip_grad=0.3)


def make_model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 2 * 5, 11), nn.GELU(), nn.Linear(11, CLASSES))


def make_state(
    model: nn.Module,
    ema_decay: float | None = None,
    compiled: bool = False,
    accelerator: Accelerator | None = None,
    optim: OptimConfig = OPTIM,
) -> TrainState:
    accelerator = accelerator or Accelerator()
    ema = None if ema_decay is None else ModelEmaV3(model, ema_decay)
    if compiled:
        model.compile(backend="eager")
    prepared, optimizer = accelerator.prepare(model, make_optimizer(model, optim))
    return TrainState(
        accelerator=accelerator,
        model=prepared,
        module=accelerator.unwrap_model(prepared),
        task=ClassificationTask(prepared, nn.CrossEntropyLoss(), verbose=False),
        optimizer=optimizer,
        schedule=CosineSchedule(peak=OPTIM.lr, final=0.0, total_steps=10),
        clip_grad=OPTIM.clip_grad,
        seed=0,
        ema=ema,
    )


def transform(images: Tensor, labels: Tensor, **_: int) -> tuple[Tensor, Tensor]:
    return images, F.one_hot(labels, CLASSES).float()


def make_samples(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(count, 3, 2, 5, generator=generator)
    return images, torch.randint(CLASSES, (count,), generator=generator)


def split(samples: tuple[Tensor, Tensor], sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(part.split(list(sizes)) for part in samples), strict=True))


def reference_gradient(samples: tuple[Tensor, Tensor]) -> tuple[list[Tensor], Tensor]:
    """Mean gradient over all samples in float64, unclipped, and its norm."""
    model = make_model().double()
    F.cross_entropy(model(samples[0].double()), samples[1]).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return gradients, torch.cat([g.flatten() for g in gradients]).norm()


@pytest.mark.parametrize("sizes", [[8], [4, 4], [2, 2, 2, 2], [3, 3, 2], [7, 1], [3]])
def test_gradient_is_the_mean_over_the_update_however_it_is_dealt(sizes: list[int]) -> None:
    samples = make_samples(sum(sizes))
    expected, norm = reference_gradient(samples)
    state = make_state(make_model())
    seen = []
    state.optimizer.step = lambda: seen.extend(p.grad.clone() for p in state.model.parameters())
    loss_sum, grad_norm = train_step(state, split(samples, sizes), sum(sizes), 0, transform)
    torch.testing.assert_close(grad_norm.double(), norm, rtol=1e-6, atol=1e-6)
    assert norm > OPTIM.clip_grad, "clipping must act in this test"
    for gradient, reference in zip(seen, expected, strict=True):
        clipped = reference * OPTIM.clip_grad / norm
        torch.testing.assert_close(gradient.double(), clipped, rtol=1e-5, atol=1e-6)
    model = make_model().double()
    loss = F.cross_entropy(model(samples[0].double()), samples[1], reduction="sum")
    torch.testing.assert_close(loss_sum.double(), loss, rtol=1e-6, atol=1e-6)


def test_accumulation_that_a_launcher_sets_does_not_scale_the_gradient(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    samples = make_samples(8)
    state = make_state(make_model(), accelerator=make_accelerator("fp32"))
    _, grad_norm = train_step(state, [samples], 8, 0, transform)
    torch.testing.assert_close(grad_norm.double(), reference_gradient(samples)[1])
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS is ignored" in caplog.text


def test_accumulated_training_equals_whole_batches_with_a_short_last_group() -> None:
    samples = make_samples(8 + 8 + 3)
    groups = split(samples, [8, 8, 3])
    weights = []
    for parts in ([[8], [8], [3]], [[4, 4], [2, 3, 3], [2, 1]]):
        state = make_state(make_model())
        metrics = StepMetrics(max_nonfinite=0)
        updates = [(split(g, p), len(g[0])) for g, p in zip(groups, parts, strict=True)]
        stopwatch = Stopwatch(state.accelerator)
        made = train_epoch(
            state,
            updates,
            first_step=2,
            transform=transform,
            metrics=metrics,
            stopwatch=stopwatch,
            after_step=lambda _: False,
        )
        assert made == 5
        assert [s.num_samples for s in metrics.read()] == [8, 8, 3]
        assert (stopwatch.images, stopwatch.steps) == (19, 3)
        rates = [0.025 * (1 + math.cos(math.pi * step / 10)) for step in (2, 3, 4)]
        assert [s.lr for s in metrics.read()] == pytest.approx(rates)
        assert [g["lr"] for g in state.optimizer.param_groups] == pytest.approx([rates[-1]] * 2)
        weights.append([p.detach().clone() for p in state.module.parameters()])
    for whole, accumulated in zip(*weights, strict=True):
        torch.testing.assert_close(accumulated, whole, rtol=1e-6, atol=1e-6)


def test_dropout_is_a_function_of_seed_update_micro_step_and_rank() -> None:
    """It does not depend on the state of torch's generator, which an interrupted run has lost."""
    samples, places = make_samples(6), [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(30, CLASSES))
    state, losses = make_state(model), []
    state.task.register_forward_hook(lambda *call: losses.append(call[-1]["loss"].item()))
    for noise in (0, 17):
        torch.manual_seed(noise)
        for state.seed, update, rank in places:
            backward(state, [samples, samples], 12, update, transform, rank=rank)
    assert losses[:8] == losses[8:]
    assert len(set(losses)) == 8


def test_the_transform_is_given_update_micro_step_and_rank() -> None:
    given = []

    def record(images: Tensor, labels: Tensor, **place: int) -> tuple[Tensor, Tensor]:
        given.append(place)
        return transform(images, labels)

    backward(make_state(make_model()), split(make_samples(5), [2, 2, 1]), 5, 7, record, rank=3)
    assert given == [{"update": 7, "micro_step": n, "rank": 3} for n in range(3)]


@pytest.mark.parametrize("compiled", [False, True])
def test_ema_is_the_running_average_of_the_weights_after_each_update(compiled: bool) -> None:
    state = make_state(make_model(), ema_decay=0.8, compiled=compiled)
    samples = make_samples(5)
    average = None
    for update in range(4):
        train_step(state, [samples], 5, update, transform)
        weight = state.module[1].weight.detach().double()
        average = weight if average is None else 0.8 * average + 0.2 * weight
    assert state.ema is not None
    torch.testing.assert_close(state.ema.module[1].weight.double(), average, rtol=1e-6, atol=1e-7)


def test_the_ema_averages_the_weights_that_the_instruments_leave() -> None:
    state = make_state(make_model(), ema_decay=0.8)

    class Counted(InstrumentBase):
        def after_step(self, step: int) -> None:
            nn.init.constant_(state.module[1].weight, step + 1)

    state.instruments = [Counted()]
    for step in range(3):
        train_step(state, [make_samples(5)], 5, step, transform)
    assert state.ema is not None
    expected = torch.full((11, 30), 0.8 * (0.8 * 1 + 0.2 * 2) + 0.2 * 3)
    torch.testing.assert_close(state.ema.module[1].weight.detach(), expected)


@pytest.mark.parametrize("name", ["adamw", "nadamw"])  # the second cannot skip on the device
def test_nonfinite_update_changes_nothing_and_stops_the_run(name: str) -> None:
    state = make_state(make_model(), optim=dataclasses.replace(OPTIM, name=name))
    metrics = StepMetrics(max_nonfinite=1)
    images, labels = make_samples(5)
    broken = images.clone()
    broken[2, 1, 1, 3] = float("nan")
    for update, batch in enumerate([images, broken, images]):
        before = [p.detach().clone() for p in state.module.parameters()]
        loss, norm = train_step(state, [(batch, labels)], 5, update, transform)
        metrics.add(update, 0.05, 5, loss, norm)
        unchanged = [
            torch.equal(a, b) for a, b in zip(before, state.module.parameters(), strict=True)
        ]
        assert all(unchanged) if update == 1 else not any(unchanged)
    steps = {float(s["step"]) for s in state.optimizer.state.values()}
    assert steps == {2.0}, "a skipped step must not count"
    assert [s.finite for s in metrics.read()] == [True, False, True]

    for update in (3, 4):
        loss, norm = train_step(state, [(broken, labels)], 5, update, transform)
        metrics.add(update, 0.05, 5, loss, norm)
    with pytest.raises(NonFiniteError, match=r"updates 3 to 4 \(lr 0.05.*last finite update 2: lr"):
        metrics.read()


def test_an_infinite_loss_with_a_finite_gradient_counts_but_was_not_skipped() -> None:
    metrics = StepMetrics(max_nonfinite=3)
    for step, (loss, norm) in enumerate([(math.inf, 1.0), (8.0, math.nan), (12.0, 3.0)]):
        metrics.add(step, 0.1, 4, torch.tensor(loss), torch.tensor(norm))
    stats = metrics.read()
    assert [s.applied for s in stats] == [True, False, True]
    assert metrics.nonfinite_total == 2
    record = summarize(stats)
    assert (record["skipped"], record["loss"], record["grad_norm"]) == (1, 3.0, 3.0)


class Batches:
    def __init__(self, samples: tuple[Tensor, Tensor], size: int):
        self.items = list(zip(*(part.split(size) for part in samples), strict=True))

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self):
        return iter(self.items)


@pytest.mark.parametrize("batch_size", [1, 7, 23, 64])
def test_evaluation_is_exact_for_any_batch_size(batch_size: int) -> None:
    images, labels = make_samples(23)
    model = make_model()
    logits = model.double()(images.double()).detach()
    order = logits.argsort(dim=1, descending=True)
    expected = {
        "top1": 100 * sum(int(o[0] == y) for o, y in zip(order, labels, strict=True)) / 23,
        "top5": 100 * sum(int(y in o[:5]) for o, y in zip(order, labels, strict=True)) / 23,
        "loss": float(-logits.log_softmax(1)[torch.arange(23), labels].mean()),
        "images": 23,
    }
    result = evaluate(
        Accelerator(),
        nn.Sequential(model.float(), nn.Dropout(0.5)),  # in training mode
        Batches((images, labels), batch_size),
        normalize=lambda x: x,
        num_images=23,
    )
    assert result is not None
    assert 0 < expected["top1"] < expected["top5"] < 100
    assert result == {**expected, "loss": pytest.approx(expected["loss"], rel=1e-6)}


def test_evaluation_refuses_a_wrong_count_and_a_nonfinite_loss() -> None:
    samples = make_samples(5)
    model = make_model()
    with pytest.raises(RuntimeError, match="evaluated 5 images of a data set of 6"):
        evaluate(Accelerator(), model, Batches(samples, 2), normalize=lambda x: x, num_images=6)
    with pytest.raises(NonFiniteError, match="over 5 images"):
        evaluate(Accelerator(), model, Batches(samples, 2), normalize=lambda x: x / 0, num_images=5)


def test_a_resumed_run_names_the_last_finite_update() -> None:
    metrics = StepMetrics(max_nonfinite=0)
    metrics.add(0, 0.1, 4, torch.tensor(8.0), torch.tensor(1.0))
    resumed = StepMetrics(max_nonfinite=0)
    resumed.load_state_dict(json.loads(json.dumps(metrics.state_dict())))
    resumed.clear()
    resumed.add(1, 0.1, 4, torch.tensor(math.nan), torch.tensor(1.0))
    with pytest.raises(NonFiniteError, match=r"last finite update 0: lr 0.1, loss 2"):
        resumed.read()


def test_a_resumed_run_counts_on_in_a_row_of_nonfinite_updates() -> None:
    first, resumed = StepMetrics(max_nonfinite=2), StepMetrics(max_nonfinite=2)
    for step in (3, 4):
        first.add(step, 0.1, 4, torch.tensor(math.nan), torch.tensor(1.0))
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    resumed.add(5, 0.1, 4, torch.tensor(8.0), torch.tensor(math.inf))
    with pytest.raises(NonFiniteError, match="at updates 3 to 5") as caught:
        resumed.read()
    assert caught.value.first == 3, "which the replay repeats"
    assert resumed.nonfinite_total == 3


def test_a_mean_loss_counts_every_sample_once() -> None:
    metrics = StepMetrics(max_nonfinite=0)
    metrics.add(0, 0.1, 7, torch.tensor(7 * 2.0), torch.tensor(1.0))
    metrics.add(1, 0.1, 3, torch.tensor(3 * 5.0), torch.tensor(3.0))
    record = summarize(metrics.read())
    assert (record["loss"], record["grad_norm"]) == (pytest.approx(2.9), 2.0)
    assert record["grad_norm_max"] == 3.0


def test_the_loss_of_logits_in_bf16_is_computed_in_float32() -> None:
    logits = torch.randn(9, CLASSES, generator=torch.Generator().manual_seed(5)).bfloat16()
    labels, sums = torch.arange(9) % CLASSES, EvalSums()
    sums.add(logits, labels)
    expected = F.cross_entropy(logits.double(), labels).item()
    assert sums.result(Accelerator(cpu=True))["loss"] == pytest.approx(expected, rel=1e-6)


def test_the_loss_of_an_evaluation_is_summed_in_float64() -> None:
    sums = EvalSums()
    label = torch.tensor([0])
    sums.add(torch.tensor([[-(2.0**24), 0.0]]), label)  # the loss is 2^24, whose next float is + 2
    for _ in range(64):
        sums.add(torch.tensor([[0.0, 0.0]]), label)
    expected = (2.0**24 + 64 * math.log(2)) / 65
    assert sums.result(Accelerator(cpu=True))["loss"] == pytest.approx(expected, rel=1e-9)
