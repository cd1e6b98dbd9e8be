"""Exports give the model's logits; compiled models too."""

import pytest
import timm
import torch
from safetensors.torch import save_file

from scripts import export_model as script
from scripts.export_model import ExportError, export_model, main

pytestmark = pytest.mark.filterwarnings("ignore")  # the exporters' own

NANO = ["lipsformer_nano", "lipsformer_swin_nano"]
EXPORTED = [
    ("lipsformer_nano", "hf"),
    pytest.param("lipsformer_nano", "torch", marks=pytest.mark.slow),
    pytest.param("lipsformer_nano", "onnx", marks=pytest.mark.slow),
    ("lipsformer_swin_nano", "hf"),
    pytest.param("lipsformer_swin_nano", "torch", marks=pytest.mark.slow),
    pytest.param("lipsformer_swin_nano", "onnx", marks=pytest.mark.slow),
    *(
        pytest.param(name, key, marks=pytest.mark.slow)
        for name in ("lipsformer_tiny", "lipsformer_swin_tiny")
        for key in ("hf", "torch", "onnx")
    ),
]


@pytest.mark.parametrize(("name", "key"), EXPORTED)
def test_exports_give_the_models_logits(tmp_path, name, key):
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    weights, out = tmp_path / "weights.safetensors", tmp_path / "out"
    tolerance = 0.0 if key == "hf" else 1e-4
    differences = export_model(name, out, [key], checkpoint=weights, img_size=64)
    assert differences[key] <= tolerance
    images = torch.randn(5, 3, 64, 64)  # another batch
    if key == "hf":
        logits = timm.create_model(f"local-dir:{out}", pretrained=True).eval()(images)
    elif key == "torch":
        logits = torch.export.load(out / "model.pt2").module()(images)
    else:
        onnxruntime = pytest.importorskip("onnxruntime")
        session = onnxruntime.InferenceSession(out / "model.onnx")
        logits = torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
    torch.testing.assert_close(logits, model(images), rtol=0, atol=tolerance)


def test_an_export_that_differs_leaves_nothing_behind(tmp_path, monkeypatch):
    def wrong(_model, images, folder):
        (folder / "model.bin").touch()
        return script._difference(images, images + 0.5, script.TOLERANCE)

    monkeypatch.setitem(script.EXPORTS, "torch", wrong)
    with pytest.raises(ExportError, match=r"logits differ by 0.5, more than 0.0001"):
        export_model(NANO[0], tmp_path / "out", ["torch"], checkpoint=None, img_size=None)
    assert list(tmp_path.iterdir()) == []


def test_command_line_names_mistakes_before_it_writes(tmp_path, capsys):
    out = str(tmp_path / "out")
    for argv, message in [
        (["lipsformer_nan", out], "'lipsformer_nan' is no folder and no timm model"),
        (["lipsformer_nano", out, "--checkpoint", "none.pth"], "none.pth: no such file"),
        (["lipsformer_nano", out, "--formats", "coreml"], "invalid choice: 'coreml'"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            main(argv)
        assert message in capsys.readouterr().err
    assert main(["lipsformer_nano", str(tmp_path)]) == 2
    assert "exists: choose another folder" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", NANO)
def test_compiled_training_step_is_the_eager_one(name):
    """One graph without breaks, compiled, gives the eager outputs and gradients."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7).train()
    images = torch.randn(3, 3, 32, 32)

    def step(forward):
        model.zero_grad()
        output = forward(images)
        output.square().mean().backward()
        return output.detach(), [p.grad.clone() for p in model.parameters()]

    expected = step(model)
    actual = step(torch.compile(model, fullgraph=True))
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    "name", ["lipsformer_nano", pytest.param("lipsformer_swin_nano", marks=pytest.mark.slow)]
)
def test_the_graph_has_no_breaks(name):
    model = timm.create_model(name, num_classes=7).eval()
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)
