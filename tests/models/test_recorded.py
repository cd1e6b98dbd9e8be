"""Recorded calls return bit for bit what the modules return, and notice what changes."""

import copy
import pickle
import threading

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle

import lipsformer
from lipsformer.models import recorded
from lipsformer.models.recorded import MAX_BYTES_PER_THREAD, MAX_RECORDINGS, RecordedForward
from tests.models.test_inference import FORMS, SWIN, VIT, make, randomize


def fold(form: str) -> nn.Module:
    return lipsformer.optimize_for_inference(randomize(make(form)))


def recordings(model: nn.Module) -> dict:
    return model.forward.__self__.recordings.calls


def modules_alone(folded: nn.Module, images: Tensor) -> Tensor:
    """What the modules compute without a recording."""
    return type(folded).forward(folded, images)


def call_recorded(folded: nn.Module, images: Tensor) -> Tensor:
    """Call until the calls of this input are recorded, and once more."""
    folded(images), folded(images)
    assert None not in recordings(folded).values()
    recorded = len(recordings(folded))
    result = folded(images)
    assert len(recordings(folded)) == recorded > 0
    return result


def size_of(form: str) -> int:
    return {"vit": 32, "timm_vit": 32, "timm_swin": 56}.get(form, 44)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_new_images_have_the_same_bits(form, precision):
    folded = fold(form)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        for batch in (1, 3) if precision == "fp32" else (3,):  # bf16 is slow on many processors
            call_recorded(folded, torch.zeros(batch, 3, size_of(form), size_of(form)))
            for seed in (5, 7):
                torch.manual_seed(seed)
                images = 3.0 * torch.randn(batch, 3, size_of(form), size_of(form))
                expected = modules_alone(folded, images)
                first = folded(images)
                assert torch.equal(first, expected)
                folded(torch.zeros_like(images))
                assert torch.equal(first, expected)  # no call writes to the result of another


class MinusMean(nn.Module):
    """A module of a user's own: its result for an image depends on the other images."""

    def forward(self, x):
        return x - x.mean(0)


@pytest.mark.parametrize("mixing", [MinusMean(), nn.BatchNorm2d(3, track_running_stats=False)])
def test_a_model_that_mixes_images_is_not_computed_in_parts(mixing):
    model = make("swin_nano")
    model.patch_embed = nn.Sequential(mixing, model.patch_embed)
    folded = lipsformer.optimize_for_inference(model.eval())
    count = 2 + MAX_BYTES_PER_THREAD * torch.get_num_threads() // (4 * 32 * 32)
    images = torch.randn(count, 3, 32, 32) + torch.linspace(0, 3, count).view(-1, 1, 1, 1)
    with torch.no_grad():
        expected = modules_alone(folded, images)
        torch.testing.assert_close(folded(images), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["lipsformer_nano", "lipsformer_swin_nano", "lipsformer_vit_tiny"])
def test_every_map_of_features_only_has_the_same_bits(name):
    options = {**VIT, "out_indices": (0, 1)} if "vit" in name else {}
    model = randomize(timm.create_model(name, features_only=True, **options))
    folded = lipsformer.optimize_for_inference(model)
    images = torch.randn(2, 3, 32, 32)
    with torch.inference_mode():
        call_recorded(folded, torch.zeros_like(images))
        maps, expected = folded(images), modules_alone(folded, images)
        assert all(torch.equal(a, b) for a, b in zip(maps, expected, strict=True))
        assert [a.stride() for a in maps] == [b.stride() for b in expected]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("features_only", [False, True])
def test_large_batches_are_computed_in_parts_of_nearly_equal_size(
    features_only, precision, monkeypatch
):
    itemsize = {"fp32": 4, "bf16": 2}[precision]
    five = 32 * 32 * itemsize * 5
    monkeypatch.setattr(recorded, "MAX_BYTES_PER_THREAD", -(-five // torch.get_num_threads()))
    model = randomize(timm.create_model("lipsformer_swin_nano", features_only=features_only))
    folded = lipsformer.optimize_for_inference(model)
    images = torch.randn(13, 3, 32, 32)  # parts of 5, 4 and 4 images
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        for _ in range(3):
            result, whole = folded(images), modules_alone(folded, images)
            parts = [modules_alone(folded, part) for part in images.tensor_split(3)]
            maps = zip(*parts, strict=True) if features_only else [parts]
            whole, result = (whole, result) if features_only else ([whole], [result])
            for own, expected, alone in zip(result, maps, whole, strict=True):
                assert torch.equal(own, torch.cat(tuple(expected)))
                assert own.shape == alone.shape and own.stride() == alone.stride()
    assert {kind[0][0] for kind in recordings(folded)} == {4, 5}


class Whitened(nn.Module):
    """Results that depend on all images of the batch."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        logits = self.model(x)
        return (logits - logits.mean(0)) / logits.std(0)


def test_batches_of_an_unknown_model_are_not_divided(monkeypatch):
    monkeypatch.setattr(recorded, "MAX_BYTES_PER_THREAD", 1)
    model = Whitened(randomize(timm.create_model("lipsformer_swin_nano"))).eval()
    folded = lipsformer.optimize_for_inference(model)
    images = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(call_recorded(folded, images), modules_alone(folded, images))


def test_the_layout_and_the_place_of_the_images_in_memory_change_nothing():
    folded = fold("swin_nano")
    images = torch.randn(5, 3, 32, 32)
    with torch.no_grad():
        expected = modules_alone(folded, images)
        call_recorded(folded, images[:2])
        assert torch.equal(folded(images[2:4]), expected[2:4])  # begins elsewhere in the storage
        last = images.to(memory_format=torch.channels_last)
        call_recorded(folded, torch.zeros_like(last))
        assert torch.equal(folded(last), modules_alone(folded, last))
        flipped = images.transpose(2, 3)
        call_recorded(folded, torch.zeros_like(images).transpose(2, 3))
        assert torch.equal(folded(flipped), modules_alone(folded, flipped))


def _write(folded: nn.Module) -> None:
    folded.get_parameter("stages.1.blocks.0.mlp.branch.1.weight").mul_(1.7)


def _load(folded: nn.Module) -> None:
    folded.load_state_dict({k: 1.3 * v for k, v in folded.state_dict().items()})


def _replace_parameter(folded: nn.Module) -> None:
    folded.stages[1].blocks[0].mlp.gain = torch.full_like(folded.stages[1].blocks[0].mlp.gain, 2.0)


def _replace_module(folded: nn.Module) -> None:
    folded.stages[1].blocks[0] = nn.Identity()


def _hook(folded: nn.Module) -> None:
    folded.stages[1].register_forward_hook(lambda module, args, output: 2.0 * output)


def _own_hook(folded: nn.Module) -> None:
    folded.register_forward_hook(lambda module, args, output: 2.0 * output)


def _reset_classifier(folded: nn.Module) -> None:
    folded.reset_classifier(5)


CHANGES = [
    *(_write, _load, _replace_parameter, _replace_module, _hook, _own_hook, _reset_classifier),
]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_noticed(change):
    folded, images = fold("swin_nano"), torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        before = call_recorded(folded, images)
        twin = copy.deepcopy(folded)
        for model in (folded, twin):
            torch.manual_seed(0)
            change(model)
        del twin.forward  # the class's own
        expected = twin(images)
        assert expected.shape == before.shape
        assert not torch.allclose(expected, before, rtol=1e-2, atol=1e-3)
        for _ in range(4):  # modules, recording, recorded
            assert torch.equal(folded(images), expected)


@pytest.mark.parametrize("of_all_modules", [False, True])
def test_hooks_are_called_until_they_are_removed(of_all_modules):
    folded, images = fold("swin_nano"), torch.randn(3, 3, 32, 32)
    seen: list[type] = []

    def hook(module: nn.Module, args: object, output: object) -> None:
        seen.append(type(module))

    with torch.no_grad():
        before = call_recorded(folded, images)
        everywhere = nn.modules.module.register_module_forward_hook
        handle = (everywhere if of_all_modules else folded.stages[0].register_forward_hook)(hook)
        try:
            # kernels of several modules call no hooks, so others compute, with other rounding
            torch.testing.assert_close(folded(images), before)
        finally:
            handle.remove()
        assert type(folded.stages[0]) in seen
        del seen[:]
        assert torch.equal(call_recorded(folded, images), before)
        assert seen == []


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_recordings_of_its_own(duplicate):
    folded, images = fold("swin_nano"), torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        before = call_recorded(folded, images)
        twin = duplicate(folded)
        _write(twin)
        changed = call_recorded(twin, images)
        assert torch.equal(changed, modules_alone(twin, images))
        assert not torch.allclose(changed, before, rtol=1e-2, atol=1e-3)
        assert torch.equal(folded(images), before)


def test_gradients_of_the_images_are_those_of_the_modules():
    folded, images = fold("swin_nano"), torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        call_recorded(folded, images)
    images.requires_grad_()
    (gradient,) = torch.autograd.grad(folded(images).square().sum(), images)
    double = copy.deepcopy(folded).double()
    wide = images.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(double(wide).square().sum(), wide)
    error = (gradient.double() - expected).norm() / expected.norm()
    assert error.item() < 1e-5


def test_threads_and_another_number_of_threads_share_the_recorded_calls():
    folded = fold("nano")
    batches = [torch.randn(2, 3, 32, 32) for _ in range(7)]
    with torch.no_grad():
        call_recorded(folded, batches[0])
        expected = [modules_alone(folded, images) for images in batches]
    answers: dict[int, Tensor] = {}

    def work(i: int) -> None:
        with torch.inference_mode():
            for _ in range(5):
                answers[i] = folded(batches[i])

    workers = [threading.Thread(target=work, args=(i,)) for i in range(len(batches))]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(torch.equal(answers[i], expected[i]) for i in range(len(batches)))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with torch.no_grad():
            torch.testing.assert_close(folded(batches[0]), expected[0])
    finally:
        torch.set_num_threads(before)


class Interrupted(nn.Module):
    """Writes and calls itself from another thread in the middle of a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(3.0))
        self.interrupt = False

    def forward(self, x: Tensor) -> Tensor:
        doubled = 2.0 * self.weight  # a constant of the recording
        if self.interrupt:
            self.interrupt = False
            other = threading.Thread(target=self.write_and_call, args=(x,))
            other.start()
            other.join()
        return doubled * x

    def write_and_call(self, x: Tensor) -> None:
        with torch.no_grad():
            self.weight.fill_(5.0)
            self(x)


def test_a_recording_is_not_used_if_another_thread_wrote_while_it_was_made():
    module, x = Interrupted().eval(), torch.ones(7)
    module.forward = RecordedForward(module).forward
    with torch.no_grad():
        module(x)
        module.interrupt = True
        module(x)  # records
        for _ in range(3):
            assert torch.equal(module(x), torch.full((7,), 10.0))


class Hooked(nn.Module):
    """A hook doubles the result of a module within it, as if another thread had added it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.handle: RemovableHandle | None = None
        self.interrupt = False

    def forward(self, x: Tensor) -> Tensor:
        if self.interrupt:
            self.interrupt = False
            self.handle = self.inner.register_forward_hook(lambda module, args, out: 2.0 * out)
        return self.inner(x) + 1.0


def test_a_recording_is_not_used_if_a_hook_was_added_while_it_was_made():
    module, x = Hooked().eval(), torch.ones(7)
    module.forward = RecordedForward(module).forward
    with torch.no_grad():
        module(x)
        module.interrupt = True
        for _ in range(3):
            assert torch.equal(module(x), torch.full((7,), 3.0))
        assert module.handle is not None
        module.handle.remove()
        for _ in range(3):
            assert torch.equal(module(x), torch.full((7,), 2.0))


class Deep(nn.Module):
    """A chain of sums, which notes how many of its tensors were alive at once."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.depth, self.most = depth, 0

    def forward(self, x: Tensor) -> Tensor:
        results = []
        for _ in range(self.depth):
            x = x + 1.0
            results.append(StorageWeakRef(x.untyped_storage()))
            self.most = max(self.most, sum(not result.expired() for result in results))
        return x


def test_the_call_that_records_keeps_no_tensor_longer_than_the_modules_do():
    most = []
    for depth in (11, 29):
        module = Deep(depth).eval()
        module.forward = RecordedForward(module).forward
        with torch.no_grad():
            module(torch.zeros(3))
            alone = module.most
            assert torch.equal(module(torch.zeros(3)), torch.full((3,), float(depth)))
        assert list(recordings(module).values()) != [None]
        most.append((alone, module.most))
    assert most[0] == most[1] and most[0][1] <= most[0][0] + 1


class Squares(nn.Module):
    """Computes in float32 under autocast, whatever the type of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(x, torch.zeros_like(x), reduction="none")


def test_autocast_has_recordings_of_its_own():
    module, x = Squares().eval(), torch.randn(3, 5).bfloat16()
    module.forward = RecordedForward(module).forward
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(call_recorded(module, x), x.float().square())
        result = call_recorded(module, x)
    assert result.dtype == torch.bfloat16 and torch.equal(result, x.square())


class Odd(nn.Module):
    """Does what the tests below name."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.total = torch.zeros(5)  # no buffer, whose change would be noticed

    def forward(self, x: Tensor) -> Tensor:
        if self.what == "number":
            return x * float(x.sum())
        if self.what == "write":
            return x + self.total.add_(x.mean(0))
        if self.what == "random":
            return x + torch.rand(5)
        if self.what == "some rows":
            chosen = x[x[:, 0] > 0]
            return chosen.sum(0) / max(len(chosen), 1)
        if self.what == "sparse":
            return x.relu().to_sparse().to_dense() + 1.0
        if self.what == "out":
            return torch.mul(x, 2.0, out=torch.empty(0)) + 1.0
        if self.what == "several":
            low, high = torch.aminmax(x, dim=1, keepdim=True)
            top, index = x.topk(3, dim=1)
            return torch.cat([(x - low) / (high - low), top.flip(1), index.to(x.dtype)], dim=1)
        y = torch.zeros_like(x)
        y[:, 1::2] = x[:, ::2][:, :2]
        return y.t() @ x.view(-1, 5)[1:].expand(2, 5)


def odd(what: str) -> nn.Module:
    module = Odd(what).eval()
    module.forward = RecordedForward(module).forward
    return module


@pytest.mark.parametrize(
    ("what", "recorded"),
    [
        *(("several", True), ("views", True), ("number", False), ("write", False)),
        *(("some rows", False), ("sparse", False), ("out", False)),
    ],
)
def test_what_a_list_of_calls_cannot_repeat_is_left_to_the_modules(what, recorded):
    module, reference = odd(what), Odd(what)
    with torch.no_grad():
        for seed in range(5):
            torch.manual_seed(seed)
            x = torch.randn(2, 5)
            assert torch.equal(module(x), reference(x))
    assert [calls is not None for calls in recordings(module).values()] == [recorded]


def test_random_numbers_are_drawn_again():
    module, x = odd("random"), torch.zeros(2, 5)
    with torch.no_grad():
        call_recorded(module, x)
        torch.manual_seed(0)
        drawn = [module(x), module(x)]
        torch.manual_seed(0)
        expected = [torch.rand(5).expand(2, 5), torch.rand(5).expand(2, 5)]
    assert torch.equal(torch.stack(drawn), torch.stack(expected))


def test_only_so_many_shapes_are_recorded():
    module = odd("several")
    with torch.no_grad():
        for batch in range(1, MAX_RECORDINGS + 4):
            for _ in range(3):
                x = torch.randn(batch, 5)
                assert torch.equal(module(x), modules_alone(module, x))
    assert len(recordings(module)) == MAX_RECORDINGS


def test_windows_that_are_padded_and_shifted_have_the_same_bits():
    model = timm.create_model("swin_tiny_patch4_window7_224", **SWIN, img_size=60, num_classes=5)
    folded = lipsformer.optimize_for_inference(randomize(lipsformer.convert(model)))
    images = torch.randn(2, 3, 60, 60)
    with torch.no_grad():
        call_recorded(folded, torch.zeros_like(images))
        assert torch.equal(folded(images), modules_alone(folded, images))
