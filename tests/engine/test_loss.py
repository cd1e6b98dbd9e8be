"""Losses with and without a teacher: one step against the formula in float64; what is refused."""

import copy
from pathlib import Path

import pytest
import timm
import torch
from accelerate import Accelerator
from timm.models import save_for_hf
from torch import Tensor, nn
from torch.nn import functional as F

import train
from lipsformer._configfile import read_config
from lipsformer._errors import ConfigError
from lipsformer.config import Config
from lipsformer.engine.loss import MarginLoss, load_teacher, make_task
from lipsformer.engine.optim import make_optimizer
from lipsformer.engine.steps import backward
from lipsformer.engine.train_state import TrainState
from tests.launch import Event, launch
from tests.runs import DIGITS, outcome, write_config

CLASSES = 7
SIZES = [3, 5, 3]
SHAPE = "patch_size: 8, embed_dim: 24, depth: 2, num_heads: 2, dynamic_img_size: true"
SMALL = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "num_heads": 2, "depth": 1}


def config_of(folder: Path, *overrides: str) -> Config:
    return read_config(Config, write_config(folder, DIGITS, folder / "out"), overrides)


def targets_of(labels: Tensor) -> Tensor:
    """Each label mixed with the next one, as mixup does."""
    one_hot = F.one_hot(labels, CLASSES).float()
    return 0.7 * one_hot + 0.3 * one_hot.roll(1, 0)


def step(
    config: Config, model: nn.Module, teacher: nn.Module | None
) -> tuple[Tensor, list[Tensor]]:
    """Sum of the losses, and gradients, of one update of three uneven micro-batches."""
    accelerator = Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, make_optimizer(model, config.optim))
    task = make_task(config, prepared, accelerator, teacher=teacher, num_classes=CLASSES)
    state = TrainState(accelerator, prepared, model, task, optimizer, lambda _: 0.1, None, 0)
    images, labels = samples()
    batches = list(zip(images.split(SIZES), labels.split(SIZES), strict=True))

    def transform(images: Tensor, labels: Tensor, **_: int) -> tuple[Tensor, Tensor]:
        return images, targets_of(labels)

    loss_sum = backward(state, batches, sum(SIZES), 0, transform, rank=0)
    return loss_sum, [p.grad for p in model.parameters() if p.grad is not None]


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(sum(SIZES), 3, 16, 16, generator=generator)
    return images, torch.randint(CLASSES, (sum(SIZES),), generator=generator)


def make_model(seed: int, name: str = "vit_tiny_patch16_224", mean: float = 0.5) -> nn.Module:
    torch.manual_seed(seed)
    overlay = {"mean": (mean,) * 3, "std": (mean / 2,) * 3}
    model = timm.create_model(
        name, num_classes=CLASSES, pretrained_cfg_overlay=overlay, **SMALL
    ).train()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def log_probabilities(logits: Tensor) -> Tensor:
    return logits - logits.exp().sum(1, keepdim=True).log()


def divergence(logits: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """T^2 KL(teacher || student) of each sample."""
    wanted = log_probabilities(teacher / temperature)
    given = log_probabilities(logits / temperature)
    return temperature**2 * (wanted.exp() * (wanted - given)).sum(1)


def binary(logits: Tensor, targets: Tensor) -> Tensor:
    """BCE of each sample, summed over the classes."""
    p = 1 / (1 + (-logits).exp())
    return -(targets * p.log() + (1 - targets) * (1 - p).log()).sum(1)


def ce(logits: Tensor, targets: Tensor) -> Tensor:
    return -(targets * log_probabilities(logits)).sum(1)


CASES = {
    "ce": ((), lambda z, y, *_: ce(z, y)),
    "bce": (("loss.type=bce",), lambda z, y, *_: binary(z, y) / CLASSES),
    "bce_sum": (
        ("loss.type=bce", "loss.bce_sum=true", "loss.bce_target_thresh=0.4"),
        lambda z, y, *_: binary(z, (y > 0.4).double()),
    ),
    "logit": (
        ("loss.teacher=x", "loss.task_loss_weight=0.3", "loss.temperature=2.5"),
        lambda z, y, _, t: 0.3 * ce(z, y) + 0.7 * divergence(z, t, 2.5),
    ),
    "logit_of_bce": (
        ("loss.teacher=x", "loss.type=bce", "loss.distill_loss_weight=2"),
        lambda z, y, _, t: binary(z, y) / CLASSES + 2 * divergence(z, t, 4.0),
    ),
    "soft_token": (
        ("loss.teacher=x", "loss.distill_type=token"),
        lambda z, y, d, t: ce(z, y) + divergence(d, t, 4.0),
    ),
    "hard_token": (
        ("loss.teacher=x", "loss.distill_type=token", "loss.token_distill_type=hard"),
        lambda z, y, d, t: ce(z, y) + ce(d, F.one_hot(t.argmax(1), CLASSES).double()),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_gradient_of_a_loss(tmp_path: Path, case: str) -> None:
    overrides, formula = CASES[case]
    config = config_of(tmp_path, *overrides)
    token = case.endswith("token")
    student = make_model(1, "deit_tiny_distilled_patch16_224" if token else "vit_tiny_patch16_224")
    # the teacher sees the same images normalized by its own mean and deviation
    teacher = make_model(2, mean=0.4) if config.loss.teacher else None
    reference = copy.deepcopy(student).double()
    loss_sum, gradients = step(config, student, teacher and copy.deepcopy(teacher))

    images, labels = (tensor.double() for tensor in samples())
    distilled = None
    if token:
        reference.set_distilled_training(True)  # pyright: ignore[reportCallIssue]
        logits, distilled = reference(images)
    else:
        logits = reference(images)
    taught = None
    if teacher is not None:
        taught = teacher.double().eval()((images * 0.25 + 0.5 - 0.4) / 0.2).detach()
    losses = formula(logits, targets_groupwise(labels), distilled, taught)
    losses.mean().backward()
    torch.testing.assert_close(loss_sum.double(), losses.sum(), rtol=1e-5, atol=1e-5)
    expected = [p.grad for p in reference.parameters() if p.grad is not None]
    for gradient, grad in zip(gradients, expected, strict=True):
        assert grad is not None
        torch.testing.assert_close(gradient.double(), grad, rtol=1e-3, atol=1e-5)


def targets_groupwise(labels: Tensor) -> Tensor:
    return torch.cat([targets_of(part.long()).double() for part in labels.split(SIZES)])


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["loss.bce_target_thresh=0.1"], ["loss.bce_target_thresh=0.1", "loss.type=bce"]),
        (["loss.bce_sum=true"], ["loss.bce_sum=True has no effect", "loss.type=bce"]),
        (["loss.type=bce", "loss.bce_target_thresh=1"], ["bce_target_thresh=1.0", "[0, 1)"]),
        (["loss.distill_type=token"], ["has no effect without loss.teacher"]),
        (["loss.teacher=x", "loss.token_distill_type=hard"], ["loss.distill_type=token"]),
        (
            ["loss={teacher: x, distill_type: token, token_distill_type: hard, temperature: 2}"],
            ["loss.temperature=2.0 has no effect", "token_distill_type=soft"],
        ),
        (["loss.teacher=x", "loss.task_loss_weight=1.5"], ["loss.task_loss_weight=1.5", "<= 1"]),
        (["augment.img_sizes=[8,0]"], ["augment.img_sizes=(8, 0)", ">= 1 pixel"]),
        (["augment.repeats=0"], ["augment.repeats=0", "[1, 100]"]),
        (["model.convert_kwargs={value_scale: 2.0}"], ["no effect without", "model.convert=true"]),
        (["model.kwargs.drop_path_rate=null"], ["model.kwargs.drop_path_rate is null"]),
    ],
)
def test_values_that_would_be_ignored_are_refused(
    tmp_path: Path, overrides: list[str], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        config_of(tmp_path, *overrides)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        # label smoothing leaves 0.1 / 10 at every class, which is above the threshold
        (
            ["loss.type=bce", "loss.bce_target_thresh=0.0"],
            ["0.01 and 0.91 for 10 classes"],
        ),
        (
            ["loss.type=bce", "loss.bce_target_thresh=0.95"],
            ["0.01 and 0.91 for 10 classes"],
        ),
        (["loss.teacher=vit_tiny_patch16_18x2_224"], ["loss.teacher='vit_tiny_patch16_18x2_224'"]),
        (
            ["loss.teacher=lipsformer_swin_nano.cifar10"],
            ["was trained on other classes", "10 from 'airplane' on, not 10 from '0' on"],
        ),
        (["loss.teacher=lipsformer_nano"], ["there are no pretrained weights of lipsformer_nano"]),
        (["loss.teacher=/no/where"], ["loss.teacher='/no/where'", "no such file"]),
        (["augment.img_sizes=[12]"], ["augment.img_sizes=12 in batches of 2"]),
    ],
)
def test_a_recipe_that_cannot_be_trained_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture, overrides: list[str], parts: list[str]
) -> None:
    config = write_config(tmp_path, DIGITS, tmp_path / "out")
    assert train.main(["--config", str(config), *overrides]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    for part in parts:
        assert part in error
    assert not (tmp_path / "out").exists()


def test_a_teacher_takes_all_training_sizes_and_gives_a_logit_for_every_class(
    tmp_path: Path,
) -> None:
    save_for_hf(make_model(2), tmp_path / "teacher", safe_serialization=True)
    config = config_of(tmp_path, f"loss.teacher={tmp_path / 'teacher'}")
    classes = [str(label) for label in range(CLASSES)]
    assert load_teacher(config, classes, [16]) is not None
    with pytest.raises(ConfigError, match=r"teacher' cannot be used: .*\(24\)"):
        load_teacher(config, classes, [16, 24])
    with pytest.raises(ConfigError, match=r"outputs of shape \(7,\) .* the data have 6 classes"):
        load_teacher(config, classes[:-1], [16])


@pytest.mark.slow
def test_a_whole_recipe_with_a_teacher_resumes_exactly(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A run teaches the distillation head of a converted DeiT; one is killed in its second size."""
    for name in ("teacher", "whole", "killed"):
        (tmp_path / name).mkdir()
        write_config(tmp_path / name, DIGITS, tmp_path / name / "out")
    teacher, shape = tmp_path / "teacher" / "out", f"model.kwargs={{{SHAPE}}}"
    large = ["train.global_batch_size=288", "train.batch_size_per_device=144", shape]
    config = str(tmp_path / "teacher" / "run.yaml")
    assert train.main(["--config", config, *large, "train.epochs=1"]) == 0
    arguments = [
        *large,
        "model.name=deit_tiny_distilled_patch16_224",
        "model.convert=true",
        "optim.name=lamb",
        "augment.label_smoothing=0",
        "augment.auto_augment=3a",
        "augment.color_jitter=0.3",
        "augment.repeats=3",
        "augment.img_sizes=[8,16]",
        "loss={type: bce, bce_target_thresh: 0.0, distill_type: token}",
    ]
    event = Event("lipsformer.engine.steps", "train_step", 6)  # 4 updates an epoch
    for name, events in (("whole", [None]), ("killed", [event, None])):
        config = str(tmp_path / name / "run.yaml")
        for moment in events:
            command = ["--config", config, *arguments, f"loss.teacher={teacher}"]
            codes = launch(command, tmp_path / "log", event=moment)
            assert codes == [0 if moment is None else -9], (tmp_path / "log").read_text()
    found = outcome(tmp_path / "whole" / "out")
    assert outcome(tmp_path / "killed" / "out") == found
    assert found["update"] == 8
    # the same teacher may lie elsewhere, and no other one may take its place
    moved = teacher.rename(tmp_path / "moved")
    assert train.main([*command[:-1], f"loss.teacher={moved}"]) == 0
    capsys.readouterr()
    assert train.main([*command[:-1], f"loss.teacher={tmp_path / 'whole' / 'out'}"]) == 2
    error = capsys.readouterr().err
    assert "was made with another teacher" in error and "restore the earlier teacher" in error


def test_the_margin_loss_is_that_of_a_loop_and_does_not_see_the_scale_of_the_classifier():
    torch.manual_seed(0)
    classifier, margin, temperature = nn.Linear(11, CLASSES).double(), 0.7, 0.3
    features, labels = torch.randn(5, 11).double(), torch.randint(CLASSES, (5,))
    targets = targets_of(labels).double()
    logits, rows = classifier(features), classifier.weight
    expected = torch.zeros(()).double()
    for sample in range(5):
        for right in range(CLASSES):
            total = torch.ones(()).double()
            for other in set(range(CLASSES)) - {right}:
                difference = logits[sample, right] - logits[sample, other]
                distance = difference / (rows[right] - rows[other]).norm()
                total = total + ((margin - distance) / temperature).exp()
            expected = expected + targets[sample, right] * temperature * total.log() / 5
    found = MarginLoss(classifier, margin, temperature)(logits, targets)
    torch.testing.assert_close(found, expected.detach(), check_dtype=False, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        rows.mul_(3.0)
    scaled = MarginLoss(classifier, margin, temperature)(3.0 * logits.detach(), targets)
    torch.testing.assert_close(scaled, found, rtol=1e-5, atol=1e-6)


def test_the_margin_loss_needs_one_linear_classifier(tmp_path):
    config = config_of(tmp_path, "loss.type=margin")
    with pytest.raises(ConfigError, match="one linear classifier"):
        make_task(config, nn.Linear(3, 2), Accelerator(cpu=True), teacher=None, num_classes=2)


def test_the_margin_loss_of_two_equal_classes_has_finite_gradients():
    classifier = nn.Linear(11, CLASSES)
    with torch.no_grad():
        classifier.weight[1] = classifier.weight[0]
    features = torch.randn(3, 11)
    targets = torch.eye(CLASSES)[:3]
    MarginLoss(classifier, 0.7, 0.3)(classifier(features), targets).backward()
    assert classifier.weight.grad.isfinite().all()
