"""Exports give the model's logits; compiled models too."""

import sys

import pytest
import timm
import torch
from safetensors.torch import save_file

from scripts import export_model as script
from scripts._runtimes import FORMATS, PACKAGES, ExportError, fold, load, trace, write
from scripts.export_model import export_model, main
from tests.full_disk import full_disk

pytestmark = pytest.mark.filterwarnings("ignore")  # the exporters' own

NANO = ["lipsformer_nano", "lipsformer_swin_nano"]
EXPORTED = [
    *((name, "hf") for name in NANO),
    *(
        pytest.param(name, key, marks=pytest.mark.slow)
        for name in (*NANO, "lipsformer_tiny", "lipsformer_swin_tiny")
        for key in ("hf", *FORMATS)
        if (name, key) not in [(nano, "hf") for nano in NANO]
    ),
]


def need_runtime(key: str) -> None:
    """Skip where the packages of a format are not installed."""
    packages, _ = PACKAGES.get(key, ((), ""))
    for package in packages:
        pytest.importorskip(package)


def assert_close(logits, expected, tolerance):
    """Compare logits relative to the largest one."""
    assert logits.shape == expected.shape
    assert (logits - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize(("name", "key"), EXPORTED)
def test_exports_give_the_models_logits(tmp_path, name, key):
    """The plain model's logits, within 1e-4 of the largest; with 8-bit weights within 0.1."""
    need_runtime(key)
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    weights, out = tmp_path / "weights.safetensors", tmp_path / "out"
    tolerance = 0.0 if key == "hf" else FORMATS[key].tolerance
    differences = export_model(name, out, [key], checkpoint=weights, img_size=64)
    assert differences[key] <= tolerance
    images = torch.randn(5, 3, 64, 64)  # another batch
    if key == "hf":
        logits = timm.create_model(f"local-dir:{out}", pretrained=True).eval()(images)
    else:
        logits = load(out / FORMATS[key].file)(images)
    assert_close(logits, model(images), tolerance)


def test_a_model_that_should_be_folded_and_cannot_be_is_not_exported_unfolded():
    model = timm.create_model("lipsformer_nano").eval()
    model.stages[1].downsample.norm.register_forward_hook(lambda *_: None)
    with pytest.raises(TypeError, match="cannot be folded"):
        fold(model)
    other = timm.create_model("resnet10t").eval()
    assert fold(other) is other


SWIN = {"embed_dim": 14, "num_heads": (2, 4)}
CONTRACTIVE = {"dims": (8, 16), "window_size": (4, 4), "img_size": 44}


@pytest.mark.parametrize(
    "key",
    ["torch-export", *(pytest.param(key, marks=pytest.mark.slow) for key in ("onnx", "openvino"))],
)
@pytest.mark.parametrize(
    ("form", "sizes"),
    [("swin", SWIN), pytest.param("contractive", CONTRACTIVE, marks=pytest.mark.slow)],
)
def test_a_trace_takes_every_batch(tmp_path, key, form, sizes):
    """Also one image, and as many as there are channels, which a comparison of shapes excluded."""
    need_runtime(key)
    torch.manual_seed(0)
    model = timm.create_model(f"lipsformer_{form}_nano", depths=(1, 1), num_classes=5, **sizes)
    model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        program = trace(model, torch.randn(3, 3, 44, 44))
        logits = load(write(key, lambda: program, tmp_path))
        for batch in (1, 2, 11, 14, 28):
            images = torch.randn(batch, 3, 44, 44)
            assert_close(logits(images), model(images), 1e-4)


def test_an_export_that_differs_leaves_nothing_behind(tmp_path, monkeypatch):
    def wrong(_model, images, folder):
        (folder / "model.bin").touch()
        return script._difference(0.5 * images, images, 0.0)

    monkeypatch.setattr(script, "export_hf", wrong)
    with pytest.raises(ExportError, match=r"logits differ by 0.5 of the largest, more than 0"):
        export_model(NANO[0], tmp_path / "out", ["hf"], checkpoint=None, img_size=None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("key", "package", "says"),
    [
        (
            "onnx",
            "onnxscript",
            "the format onnx needs packages that are not installed (onnxscript): pip ",
        ),
        ("openvino-int8", "openvino", "pip install 'lipsformer[deploy]'"),
    ],
)
def test_a_package_that_is_not_installed_is_named(
    tmp_path, capsys, monkeypatch, key, package, says
):
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    assert main([NANO[0], str(tmp_path / "out"), "--formats", "hf", key]) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("place", ["/dev/null/out", "/proc/below/out", "x" * 300])
def test_a_folder_that_cannot_be_written_is_named(capsys, place):
    assert main([NANO[0], place, "--formats", "hf"]) == 2
    error = capsys.readouterr().err
    assert f"error: {place} cannot be written: " in error and error.count("\n") == 1


def test_a_full_disk_costs_one_sentence_and_leaves_nothing_behind(tmp_path, capsys):
    with full_disk(100_000):
        code = main([NANO[0], str(tmp_path / "out"), "--formats", "hf"])
    error = capsys.readouterr().err
    assert code == 2 and error.count("\n") == 1
    assert f"{tmp_path / 'out'} cannot be written: " in error and "File too large" in error
    assert list(tmp_path.iterdir()) == []


def test_command_line_names_mistakes_before_it_writes(tmp_path, capsys):
    out = str(tmp_path / "out")
    for argv, message in [
        (["lipsformer_nan", out], "'lipsformer_nan' is no folder and no timm model"),
        (["lipsformer_nano", out, "--checkpoint", "none.pth"], "none.pth: no such file"),
        (["lipsformer_nano", out, "--formats", "coreml"], "invalid choice: 'coreml'"),
        (["lipsformer_nano", out, "--weights", "last"], "--weights chooses between weights of a"),
    ]:
        with pytest.raises(SystemExit, match="2"):
            main(argv)
        assert message in capsys.readouterr().err
    for argv, message in [
        (["lipsformer_nano", str(tmp_path)], "exists: choose another folder"),
        (
            ["lipsformer_nano", out, "--img-size", "3"],
            "--img-size 3 is not possible for lipsformer_nano",
        ),
        (["lipsformer_swin_nano.no", out], "'lipsformer_swin_nano.no' cannot be built: there are"),
        ([f"local-dir:{tmp_path}", out], "cannot be built: Config file not found: "),
        (["lipsformer_nano", out, "--img-size", "0"], "must be at least 1"),
        (["resnet18", out, "--img-size", "-1"], "must be at least 1"),
        (["lipsformer_nano", out, "--note", "x"], "--note has no effect without a model card"),
    ]:
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lipsformer_nano", "lipsformer_swin_nano"])
def test_the_graph_has_no_breaks(name):
    model = timm.create_model(name, num_classes=7, depths=(1, 2, 4, 1)).eval()
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(images), model(images), rtol=1e-4, atol=1e-5)
