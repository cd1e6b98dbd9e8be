"""The models on a GPU, in every mode of a run, against double precision on the CPU."""

import copy

import pytest
import timm
import torch
from torch import nn

import lipsformer

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.filterwarnings("ignore:TensorFloat32"),  # the compiler's advice
]
# largest deviation from double precision, relative to the largest magnitude of the tensor
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.2}


def step(model: nn.Module, images: torch.Tensor, parameters: nn.Module) -> list[torch.Tensor]:
    """Logits and the gradient of every parameter."""
    logits = model(images)
    wanted = list(parameters.parameters())
    grads = torch.autograd.grad(logits.double().square().mean(), wanted)
    return [x.detach().double().cpu() for x in (logits, *grads)]


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
@pytest.mark.parametrize("name", ["lipsformer_nano", "lipsformer_swin_nano"])
def test_step_equals_double_precision(name, mode, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.compiler.reset()
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7).train()
    images = torch.randn(5, 3, 36, 44)  # maps that windows and stripes do not divide
    expected = step(reference := copy.deepcopy(model).double(), images.double(), reference)
    model = model.to(DEVICE, memory_format=torch.channels_last)
    images = images.to(DEVICE, memory_format=torch.channels_last)
    run = torch.compile(model, mode=mode) if mode else model
    with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
        actual = step(run, images, model)
    names = ["logits", *(name for name, _ in model.named_parameters())]
    for tensor, own, truth in zip(names, actual, expected, strict=True):
        bound = TOLERANCES[dtype] * truth.abs().max().item()
        torch.testing.assert_close(own, truth, rtol=0, atol=bound, msg=lambda m, t=tensor: t + m)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("mode", [None, "default", "reduce-overhead"])
@pytest.mark.parametrize("name", ["lipsformer_nano", "lipsformer_swin_nano"])
def test_folded_inference_equals_double_precision(name, mode, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.compiler.reset()
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7).eval()
    for parameter in model.parameters():
        nn.init.trunc_normal_(parameter, mean=parameter.mean().item(), std=0.1)
    images = torch.randn(5, 3, 36, 44)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(images.double())
        folded = lipsformer.optimize_for_inference(model.to(DEVICE))
        run = torch.compile(folded, mode=mode) if mode else folded
        with torch.autocast(DEVICE, dtype, enabled=dtype != torch.float32):
            actual = run(images.to(DEVICE)).double().cpu()
    bound = TOLERANCES[dtype] * expected.abs().max().item()
    torch.testing.assert_close(actual, expected, rtol=0, atol=bound)
