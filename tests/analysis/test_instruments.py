import math
from types import SimpleNamespace

import pytest
import timm
import torch
from accelerate.state import AcceleratorState
from timm.layers import ScaledStdConv2d, ScaledStdConv2dSame, StdConv2d
from timm.layers.std_conv import StdConv2dSame
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import lipsformer
from lipsformer.analysis.bounds import (
    Domain,
    UnknownModuleError,
    gathered_bound,
    lipschitz_bound,
)
from lipsformer.analysis.conv_norms import conv_sigma_bound
from lipsformer.analysis.instruments import (
    BoundCheck,
    BoundExceededError,
    Monitor,
    Orthogonal,
    SpectralCap,
    UpdateLimit,
    bound_check,
)
from lipsformer.analysis.sigma import SigmaTracker, krylov_sigma_estimate, operators
from lipsformer.engine.distributed import make_accelerator
from lipsformer.layers import DepthwiseConv2d
from lipsformer.layers.spectral import clip_singular_values
from tests.one_rank import sharded


def small_model(**kwargs) -> nn.Module:
    return timm.create_model(
        "lipsformer_swin_nano",
        img_size=8,
        embed_dim=6,
        depths=(1, 2),
        num_heads=(2, 3),
        window_size=3,
        num_classes=5,
        **kwargs,
    )


def svd_sigma(weight: Tensor) -> float:
    return torch.linalg.svdvals(weight.detach().double().flatten(1))[0].item()


def matrices_of(model: nn.Module) -> dict[str, Tensor]:
    return {op.name: op.weight for op in operators(model) if op.is_matrix}


def backward(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(7, 3, 8, 8, generator=generator)
    labels = torch.randint(5, (7,), generator=generator)
    model.zero_grad()
    nn.functional.cross_entropy(model(images), labels).backward()


@pytest.mark.parametrize("shape", [(3, 257), (257, 3), (131, 389), (389, 131), (127, 127)])
def test_krylov_sigma_estimate_agrees_with_svdvals_from_below(shape):
    matrices = torch.randn(2, *shape)
    sigma, vectors = krylov_sigma_estimate(matrices, torch.randn(2, shape[1]), 64)
    exact = torch.linalg.svdvals(matrices.double())[:, 0]
    assert (sigma <= exact * (1 + 1e-5)).all()
    torch.testing.assert_close(sigma.double(), exact, rtol=1e-3, atol=0)
    reached = (matrices @ vectors.unsqueeze(2)).norm(dim=(1, 2))
    torch.testing.assert_close(reached, sigma, rtol=1e-4, atol=0)


def test_tracker_follows_moving_weights():
    torch.manual_seed(0)
    model = small_model()
    tracker = SigmaTracker(operators(model))
    names = {name for name, p in model.named_parameters() if p.ndim == 4 or name.endswith("weight")}
    names = {name for name in names if model.get_parameter(name).ndim > 1}
    for _ in range(5):
        sigmas = tracker.measure({op.name: op.weight.detach() for op in operators(model)})
        assert sigmas.keys() == names
        for name, weight in matrices_of(model).items():
            assert sigmas[name].item() == pytest.approx(svd_sigma(weight), rel=1e-3)
        for name, module in model.named_modules():
            if isinstance(module, DepthwiseConv2d):
                expected = conv_sigma_bound(module.weight, groups=module.dim).max()
                assert sigmas[f"{name}.weight"] == expected
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * parameter.abs().mean() * torch.randn_like(parameter))


@pytest.mark.parametrize("shape", [(131, 127), (257, 251)])
def test_tracker_finds_a_direction_orthogonal_to_the_one_it_knows(shape):
    torch.manual_seed(0)
    layer = nn.Linear(shape[1], shape[0])
    u, s, vh = torch.linalg.svd(torch.randn(shape), full_matrices=False)
    s = s / s[0]
    tracker = SigmaTracker(operators(nn.Sequential(layer)))
    tracker.measure({"0.weight": (u * s) @ vh})
    s[-1] = 1.03  # the direction that W shrank most is now the largest
    weight = (u * s) @ vh
    sigma = tracker.measure({"0.weight": weight})["0.weight"].item()
    assert sigma == pytest.approx(svd_sigma(weight), rel=1e-3)


def test_record_agrees_with_what_it_measures():
    torch.manual_seed(0)
    model = small_model(official_compat=True).train()
    records = []
    probe = torch.randn(2, 3, 8, 8)
    domain = Domain(size=(8, 8), radius=3.0)
    monitor = Monitor(
        model,
        lambda update, values: records.append((update, values)),
        every=3,
        probe=probe,
        domain=domain,
        bound_every=2,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    attention = model.stages[1].blocks[0].attn.branch
    for update in range(7):
        backward(model, update)
        before = {name: w.detach().clone() for name, w in matrices_of(model).items()}
        monitor.before_step(update)
        optimizer.step()
        monitor.after_step(update)
        if update % 3 != 0:
            continue
        made, record = records[-1]
        assert made == update + 1
        assert model.training
        for name, weight in matrices_of(model).items():
            assert record[f"sigma/{name}"] == pytest.approx(svd_sigma(weight), rel=1e-3)
            ratio = svd_sigma(weight.detach() - before[name]) / svd_sigma(before[name])
            assert record[f"update_ratio/{name}"] == pytest.approx(ratio, rel=1e-2)
        head = model.head.fc
        norm = math.hypot(head.weight.grad.norm().item(), head.bias.grad.norm().item())
        assert record["grad_norm/head.fc"] == pytest.approx(norm, rel=1e-5)
        scale = model.stages[1].blocks[1].mlp.residual_scale.detach()
        name = "residual_scale/stages.1.blocks.1.mlp"
        assert record[name] == pytest.approx(scale.abs().max().item())
        assert record["gain/norm"] == pytest.approx(model.norm.weight.detach().abs().max().item())
        entropy, largest = naive_statistics(model, attention, probe)
        name = "stages.1.blocks.0.attn.branch.attention"
        assert record[f"attn_entropy/{name}"] == pytest.approx(entropy, rel=1e-4)
        assert record[f"max_score/{name}"] == pytest.approx(largest, rel=1e-4)
        assert ("bound_log10" in record) == (update in (0, 6))
        assert record["seconds"] > 0.0
    assert [made for made, _ in records] == [1, 4, 7]
    assert records[-1][1]["bound_log10"] == lipschitz_bound(model, domain).log10


def naive_statistics(model, attention, probe) -> tuple[float, float]:
    """Entropy and largest score of a window attention, row by row."""
    caught = {}
    handle = attention.attention.register_forward_pre_hook(
        lambda _, args: caught.update(q=args[0], k=args[1], bias=args[3])
    )
    model.eval()
    with torch.no_grad():
        model(probe)
    model.train()
    handle.remove()
    q, k, bias = (caught[name].detach().double() for name in ("q", "k", "bias"))
    eps = attention.attention.eps
    entropies, scores = [], []
    for window in range(q.shape[0]):
        for head in range(q.shape[1]):
            for i in range(q.shape[2]):
                row = []
                for j in range(k.shape[2]):
                    a, b = q[window, head, i], k[window, head, j]
                    lengths = ((a @ a + eps) * (b @ b + eps)).sqrt()
                    row.append(10.0 * a @ b / lengths + bias[0, head, i, j])
                p = torch.stack(row).softmax(0)
                entropies.append(-(p * p.log()).sum())
                scores.extend(row)
    return torch.stack(entropies).mean().item(), max(scores).item()


def test_update_limit_survives_updates_that_change_nothing():
    torch.manual_seed(0)
    layer = nn.Linear(11, 7)
    limit = UpdateLimit(layer, 0.1)
    for update, step in enumerate((1.0, 0.0, 0.0, 1.0)):
        before = layer.weight.detach().clone()
        limit.before_step(update)
        with torch.no_grad():
            layer.weight.add_(step * torch.randn(7, 11))
        limit.after_step(update)
        ratio = svd_sigma(layer.weight.detach() - before) / svd_sigma(before)
        assert ratio == pytest.approx(0.1 if step else 0.0, rel=1e-2, abs=1e-7)


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"])
def test_converted_models_are_watched_and_capped(name):
    small = {"embed_dim": 6, "num_heads": 3, "depth": 2, "patch_size": 4, "img_size": 8}
    if "swin" in name:
        small = {"embed_dim": 6, "num_heads": (3,), "depths": (2,), "img_size": 16}
    model = lipsformer.convert(timm.create_model(name, **small), residual_scale=0.7)
    records = []
    probe = torch.randn(2, 3, small["img_size"], small["img_size"])
    monitor = Monitor(model, lambda _, values: records.append(values), probe=probe)
    monitor.before_step(0)
    SpectralCap(model, residual_scale=0.25).before_eval()
    monitor.after_step(0)
    scales = {k: v for k, v in records[0].items() if k.startswith("residual_scale/")}
    assert len(scales) == 4 and set(scales.values()) == {0.25}
    assert sum(key.startswith("attn_entropy/") for key in records[0]) == 2


@pytest.mark.parametrize("shape", [(5, 11), (11, 5), (7, 3, 2, 2)])
def test_clipping_is_the_nearest_weight_below_the_cap(shape):
    weight = torch.randn(shape, dtype=torch.float64)
    u, s, vh = torch.linalg.svd(weight.flatten(1), full_matrices=False)
    cap = s[1].item() * 0.9
    expected = (u * s.clamp(max=cap)) @ vh
    torch.testing.assert_close(clip_singular_values(weight, cap), expected.reshape(shape))
    inside = 2.0 * s[0].item()
    assert torch.equal(clip_singular_values(weight, inside), weight)


@pytest.mark.parametrize("steps", [1, 12])
def test_projection_holds_the_cap_during_training(steps):
    torch.manual_seed(0)
    model = small_model().train()
    cap = SpectralCap(model, 0.8, residual_scale=0.05, gain=0.9)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-2)
    for update in range(steps):
        backward(model, update)
        cap.before_step(update)
        optimizer.step()
        cap.after_step(update)
        for name, weight in matrices_of(model).items():
            assert svd_sigma(weight) <= 0.8 + 1e-3, name
    for module in model.modules():
        if isinstance(module, DepthwiseConv2d):
            assert conv_sigma_bound(module.weight, groups=module.dim).max() <= 0.8 + 1e-5
    assert model.stages[0].blocks[0].attn.residual_scale.abs().max() <= 0.05
    assert model.norm.weight.abs().max() <= 0.9


def test_projection_leaves_weights_below_the_cap_alone():
    model = small_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    SpectralCap(model, 4.0, residual_scale=1.0, gain=1.0).after_step(0)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=0)


def test_soft_cap_removes_a_fraction_and_before_eval_the_rest():
    torch.manual_seed(0)
    model = small_model()
    with torch.no_grad():
        model.head.fc.weight.mul_(3.0)
    SpectralCap(model, 1.0, mode="soft", strength=0.25).after_step(0)
    assert svd_sigma(model.head.fc.weight) == pytest.approx(3.0 - 0.25 * 2.0, rel=1e-3)
    SpectralCap(model, 1.0, mode="soft", strength=0.25).before_eval()
    for name, weight in matrices_of(model).items():
        assert svd_sigma(weight) <= 1.0 + 1e-5, name


def test_a_soft_cap_holds_for_the_average_too_when_it_is_evaluated():
    torch.manual_seed(0)
    model = small_model()
    average = small_model()
    with torch.no_grad():
        average.head.fc.weight.mul_(3.0)
    SpectralCap(model, 1.0, mode="soft", average=average).before_eval()
    for name, weight in (matrices_of(model) | matrices_of(average)).items():
        assert svd_sigma(weight) <= 1.0 + 1e-5, name


@pytest.mark.parametrize("strength", [0.25, 1.0])
def test_a_shared_weight_is_shortened_once(strength):
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    second.weight = first.weight
    with torch.no_grad():
        first.weight.copy_(torch.diag(torch.tensor([4.0, 1.0, 1.0, 1.0])))
    cap = SpectralCap(nn.Sequential(first, second), 1.0, mode="soft", strength=strength)
    cap.after_step(0)
    assert svd_sigma(first.weight) == pytest.approx(4.0 - strength * 3.0, rel=1e-5)


def test_singular_values_come_in_the_order_of_the_modules():
    tracked = operators(small_model())
    found = SigmaTracker(tracked).measure({op.name: op.weight for op in tracked})
    assert list(found) == [op.name for op in tracked]


def test_update_limit_shortens_large_updates_only():
    torch.manual_seed(0)
    model = small_model()
    with torch.no_grad():
        model.head.fc.weight.zero_()
    before = {op.name: op.weight.detach().clone() for op in operators(model)}
    steps = {
        op.name: (1e-4 if "mlp" in op.name else 0.3) * torch.randn_like(op.weight)
        for op in operators(model)
    }
    limit = UpdateLimit(model, 0.05)
    limit.before_step(0)
    with torch.no_grad():
        for op in operators(model):
            op.weight.add_(steps[op.name])
    limit.after_step(0)
    for op in operators(model):
        moved = op.weight.detach() - before[op.name]
        if "mlp" in op.name or op.name == "head.fc.weight":
            torch.testing.assert_close(moved, steps[op.name], rtol=1e-3, atol=1e-6)
        elif op.is_matrix:
            ratio = svd_sigma(moved) / svd_sigma(before[op.name])
            assert ratio == pytest.approx(0.05, rel=5e-3), op.name
        else:
            allowed = 0.05 * conv_sigma_bound(before[op.name], groups=op.groups).max()
            reached = conv_sigma_bound(moved, groups=op.groups).max()
            torch.testing.assert_close(reached, allowed, rtol=1e-4, atol=0)


CIRCULAR = nn.Conv2d(4, 6, 2, 2, padding=1, padding_mode="circular")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda model: SpectralCap(model, 0.0), "sigma"),
        (lambda model: SpectralCap(model, 1.0, mode="hard"), "mode"),
        (lambda _: SpectralCap(nn.PReLU(3, 5), 1.0), "sigma=1.0 has no effect"),
        (lambda model: SpectralCap(weight_norm(model), 1.0), "^weight is parametrized"),
        (lambda model: UpdateLimit(nn.Sequential(weight_norm(model)), 1.0), r"^0\.weight is param"),
        (lambda _: SpectralCap(CIRCULAR, 1.0), "padding_mode='circular'"),
        (lambda model: SpectralCap(model, 1.0, strength=0.0), "strength"),
        (lambda model: SpectralCap(model, gain=math.nan), "gain=nan must be > 0"),
        (lambda model: UpdateLimit(model, -1.0), "share=-1.0 must be > 0"),
        (lambda model: UpdateLimit(model, math.nan), "share=nan must be > 0"),
        (lambda model: BoundCheck({}, Domain(size=()), math.nan), "limit=nan must be > 0"),
        (lambda model: Monitor(model, lambda *_: None, every=0), "every"),
    ],
)
def test_arguments_out_of_range_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make(nn.Linear(3, 5))


def test_a_bound_that_is_no_number_exceeds_every_limit(monkeypatch):
    unknown = SimpleNamespace(log10=math.nan)
    monkeypatch.setattr(bound_check, "gathered_bound", lambda *_: unknown)
    with pytest.raises(BoundExceededError, match="above the limit 1e\\+30"):
        BoundCheck({"raw": nn.Identity()}, Domain(size=()), limit=1e30).before_eval()


@pytest.mark.dist
def test_sharded_weights_are_measured_and_capped_whole():
    torch.manual_seed(0)
    plain, divided = small_model(), small_model()
    divided.load_state_dict(plain.state_dict())
    with sharded(divided, *divided.stages):
        results = []
        for model in (plain, divided):
            backward(model, 0)
            records = []
            monitor = Monitor(model, lambda _, values, to=records: to.append(values))
            limit = UpdateLimit(model, 0.03)
            cap = SpectralCap(model, 0.9, residual_scale=0.2)
            optimizer = torch.optim.SGD(model.parameters(), lr=10.0)
            for instrument in (limit, cap, monitor):
                instrument.before_step(0)
            optimizer.step()
            for instrument in (limit, cap, monitor):
                instrument.after_step(0)
            cap.before_eval()
            domain = Domain(size=(8, 8), radius=3.0)
            records[0]["bound"] = gathered_bound(model, domain).log10
            assert isinstance(model.head.fc.weight, nn.Parameter)
            results.append(records[0])
            records[0].pop("seconds")
        assert results[0].keys() == results[1].keys()
        for name, value in results[0].items():
            assert results[1][name] == pytest.approx(value, rel=1e-4, abs=1e-7), name
        for op in operators(divided):
            if op.is_matrix:
                assert svd_sigma(op.weight.full_tensor()) <= 0.9 + 1e-5


def test_a_probe_leaves_a_sharded_model_to_the_instruments_after_it():
    """What the probe had gathered, the evaluation would run, and not what the cap has written."""
    torch.manual_seed(0)
    plain, divided, x = small_model(), small_model(), torch.randn(2, 3, 8, 8)
    divided.load_state_dict(plain.state_dict())
    with sharded(divided, *divided.stages), torch.no_grad():
        outputs = []
        for model in (plain, divided):
            monitor = Monitor(model, lambda *_: None, probe=x)
            cap = SpectralCap(model, 0.1, mode="soft")
            monitor.before_step(0)
            monitor.after_step(0)
            cap.before_eval()
            outputs.append(model.eval()(x))
        torch.testing.assert_close(*outputs)


def test_the_bound_of_a_run_in_bf16_is_that_of_the_class():
    """Accelerate replaces `forward`; another replacement is refused as before."""
    model, domain = small_model().eval(), Domain(size=(8, 8), radius=3.0)
    expected = lipschitz_bound(model, domain).log10
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        make_accelerator("bf16").prepare(model)
    finally:  # the state is the process's, and other tests have another precision
        AcceleratorState._reset_state(reset_partial_state=True)
    prepared = vars(model)["forward"]
    assert gathered_bound(model, domain).log10 == expected
    assert vars(model)["forward"] is prepared
    model.forward = lambda x: 2.0 * prepared(x)
    with pytest.raises(UnknownModuleError, match="'forward' was replaced"):
        gathered_bound(model, domain)


def test_a_dilated_convolution_is_capped_although_its_stride_is_its_kernel_size():
    """With dilation 2 and stride 2 several kernels of 2 x 2 read the same pixel."""
    torch.manual_seed(0)
    conv = nn.Conv2d(2, 3, 2, 2, dilation=2, bias=False)
    nn.init.normal_(conv.weight, std=3.0)
    SpectralCap(nn.Sequential(conv), 1.0).before_eval()
    columns = torch.eye(2 * 7 * 7, dtype=torch.float64).view(-1, 2, 7, 7)
    operator = conv.double()(columns).detach().flatten(1)
    assert 0.5 < torch.linalg.svdvals(operator)[0].item() < 1.0 + 1e-6


def test_a_cap_leaves_the_groups_of_a_patch_convolution_at_the_norm_of_the_largest():
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 6, 2, 2, groups=2, bias=False)
    nn.init.normal_(conv.weight, std=3.0)
    SpectralCap(nn.Sequential(conv), 1.0).before_eval()
    groups = conv.weight.detach().double().flatten(1).view(2, 3, 8)
    largest = torch.linalg.svdvals(groups).amax().item()
    assert 0.99 < largest < 1.0 + 1e-6 < torch.linalg.svdvals(groups.flatten(0, 1))[0].item()


LOW_RANK = {
    "one": torch.outer(torch.linspace(-1, 2, 31), torch.linspace(3, -1, 17)),
    "a row of tiny numbers": torch.eye(31, 17)[:1].expand(31, 17) + 1e-12 * torch.randn(31, 17),
    "two": torch.zeros(31, 17).diagonal_scatter(torch.tensor([1.0, 0.5] + [0.0] * 15)),
    "far apart": torch.zeros(31, 17).diagonal_scatter(torch.tensor([1.0, 1e-8] + [0.0] * 15)),
    "zero": torch.zeros(31, 17),
}


@pytest.mark.parametrize("name", LOW_RANK)
def test_no_estimate_exceeds_the_norm_of_a_weight_of_low_rank(name):
    weight = LOW_RANK[name]
    layer = nn.Linear(17, 31, bias=False)
    tracker, exact = SigmaTracker(operators(layer)), svd_sigma(weight)
    for _ in range(3):
        sigma = tracker.measure({"weight": weight})["weight"].item()
        assert exact * (1 - 1e-3) <= sigma <= exact * (1 + 1e-5)


def test_an_update_of_rank_one_is_limited_to_its_share():
    torch.manual_seed(0)
    layer = nn.Linear(17, 31, bias=False)
    before = layer.weight.detach().clone()
    limit = UpdateLimit(layer, 0.1)
    limit.before_step(0)
    with torch.no_grad():
        layer.weight += torch.outer(torch.randn(31), torch.randn(17))
    limit.after_step(0)
    assert svd_sigma(layer.weight - before) == pytest.approx(0.1 * svd_sigma(before), rel=1e-3)


@pytest.mark.parametrize(
    "layer", [nn.Linear(5, 3), nn.Conv2d(5, 3, 3), nn.Conv2d(5, 5, 3, groups=5)]
)
def test_weights_that_are_not_finite_are_recorded_and_left_alone(layer):
    nn.init.constant_(layer.weight, math.nan)
    records = []
    monitor = Monitor(layer, lambda step, record: records.append(record), every=1)
    monitor.before_step(0)
    monitor.after_step(0)
    assert math.isnan(records[0]["sigma/weight"])
    for mode in ("project", "soft"):
        cap = SpectralCap(layer, 1.0, mode=mode)
        cap.after_step(0)
        cap.before_eval()
    assert layer.weight.isnan().all()


def test_both_classifiers_of_a_distilled_model_are_left_as_they_are():
    small = {"img_size": 32, "embed_dim": 16, "depth": 1, "num_heads": 2, "num_classes": 5}
    model = timm.create_model("deit_tiny_distilled_patch16_224", **small)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    Orthogonal(model).before_eval()
    changed = {name for name, w in model.state_dict().items() if not w.equal(before[name])}
    assert changed.isdisjoint({"head.weight", "head_dist.weight"})
    assert "blocks.0.mlp.fc1.weight" in changed


def test_layers_that_a_cap_cannot_follow_are_refused():
    others = nn.Conv1d(3, 3, 1), nn.ConvTranspose2d(3, 3, 1), nn.MultiheadAttention(4, 2)
    for layer in (*others, nn.LSTM(3, 3), nn.GRUCell(3, 3), nn.Bilinear(3, 3, 3)):
        with pytest.raises(ValueError, match=r"1 is of .*, which cannot be capped"):
            SpectralCap(nn.Sequential(nn.Linear(3, 3), layer), 1.0)


@pytest.mark.parametrize("kind", [StdConv2d, StdConv2dSame, ScaledStdConv2d, ScaledStdConv2dSame])
def test_convolutions_that_standardize_their_weight_are_refused(kind):
    """A weight a thousand times as large gives the same outputs, so its norm says nothing."""
    torch.manual_seed(0)
    layer, x = kind(3, 5, 3, padding=1), torch.randn(2, 3, 7, 7)
    before = layer(x)
    with torch.no_grad():
        layer.weight *= 1e3
    torch.testing.assert_close(layer(x), before, rtol=0.01, atol=1e-3)
    for make in (lambda model: SpectralCap(model, 1.0), lambda model: Monitor(model, print)):
        with pytest.raises(ValueError, match=rf"^0 is of {kind.__name__}, which standardizes"):
            make(nn.Sequential(layer))


@pytest.mark.parametrize("weight_norm", ["none", "spectral"])
def test_a_graph_convolution_with_a_matrix_of_its_own_is_refused(weight_norm):
    """GCNII's W kept its norm of 1 or more under a cap of 0.5."""
    graph = pytest.importorskip("lipsformer.graph")
    model = graph.GCN2(4, 5, 3, num_layers=1, weight_norm=weight_norm)
    with pytest.raises(ValueError, match=r"layers\.0\.conv is of .*, which cannot be capped"):
        SpectralCap(model, 0.5)


def test_a_cap_holds_for_the_linear_layers_of_pyg():
    graph = pytest.importorskip("lipsformer.graph")
    torch.manual_seed(0)
    model = graph.DeepGAT(7, 4, 3, num_layers=2, heads=2, norm="lipschitznorm")
    for parameter in model.parameters():
        parameter.data *= 5
    SpectralCap(model, 1.0).before_eval()
    matrices = {n: p for n, p in model.named_parameters() if n.endswith("weight") and p.ndim == 2}
    assert "layers.0.conv.lin.weight" in matrices
    for weight in matrices.values():
        assert svd_sigma(weight) <= 1 + 1e-4
