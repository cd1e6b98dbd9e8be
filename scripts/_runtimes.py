"""Write a traced model for a runtime, and run what was written."""

import tempfile
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

import lipsformer
from lipsformer.models.inference import NothingToFoldError

Logits = Callable[[Tensor], Tensor]
NAMES = {"input_names": ["images"], "output_names": ["logits"]}
_ONNX = ("onnx", "onnxscript", "onnxruntime")
PACKAGES = {  # that a format needs, and the extra of lipsformer that installs them
    "onnx": (_ONNX, "export"),
    "onnx-int8": (_ONNX, "export"),
    "openvino": (("openvino",), "deploy"),
    "openvino-int8": (("openvino", "nncf"), "deploy"),
}


class ExportError(RuntimeError):
    """An export that failed or differs from the model; the message is for the user."""


def require_packages(formats: Iterable[str]) -> None:
    """Raise an `ExportError` that names a format whose packages are not installed."""
    for key in formats:
        packages, extra = PACKAGES.get(key, ((), ""))
        if missing := [package for package in packages if find_spec(package) is None]:
            raise ExportError(
                f"the format {key} needs packages that are not installed ({', '.join(missing)}): "
                f"pip install 'lipsformer[{extra}]'"
            )


def fold(model: nn.Module) -> nn.Module:
    """Return a copy folded for inference, or the model itself if there is nothing to fold."""
    try:
        return lipsformer.optimize_for_inference(model)
    except NothingToFoldError:
        return model


def autocast(model: Logits, precision: str) -> Logits:
    """Return the model as a function that runs in "fp32", or under autocast to "bf16"."""

    def logits(images: Tensor) -> Tensor:
        bf16 = precision == "bf16"
        with torch.no_grad(), torch.autocast(images.device.type, torch.bfloat16, enabled=bf16):
            return model(images).float()

    return logits


def trace(model: nn.Module, images: Tensor) -> ExportedProgram:
    """Trace a model in evaluation mode, folded where it can be folded, for any batch size.

    Args:
        model: The model.
        images: At least two images of the size that the program will take, [B, C, H, W].
    """
    batch = {0: torch.export.Dim("batch")}
    with torch.no_grad():
        return torch.export.export(fold(model), (images[:2],), dynamic_shapes=(batch,))


def write_onnx(program: ExportedProgram, path: Path) -> None:
    """Write ONNX with the input `images` and the output `logits`."""
    torch.onnx.export(program, (), path, dynamo=True, external_data=False, verbose=False, **NAMES)


def quantize_onnx(source: Path, path: Path) -> None:
    """Write ONNX whose matrix products take 8-bit weights and round their input to 8 bits."""
    from onnxruntime.quantization import quantize_dynamic

    quantize_dynamic(source, path, op_types_to_quantize=["MatMul"], per_channel=True)


def write_openvino(program: ExportedProgram, path: Path) -> None:
    """Write OpenVINO's XML file and the file of weights beside it, in float32."""
    import openvino

    converted = openvino.convert_model(program)
    converted.inputs[0].set_names({*NAMES["input_names"]})
    converted.outputs[0].set_names({*NAMES["output_names"]})
    openvino.save_model(converted, path, compress_to_fp16=False)


def quantize_openvino(source: Path, path: Path) -> None:
    """Write OpenVINO's files with 8-bit weights."""
    import nncf
    import openvino

    compressed = nncf.compress_weights(openvino.Core().read_model(source))
    openvino.save_model(compressed, path, compress_to_fp16=False)


class Format(NamedTuple):
    """A format of export.

    Attributes:
        file: Name of the file in the folder of the export.
        write: Writes a program, or the file of another format, to a path.
        source: The other format; None for a program.
        tolerance: Largest difference from the model's logits, relative to the largest logit.
    """

    file: str
    write: Callable[[Any, Path], None]
    source: str | None = None
    tolerance: float = 1e-4


FORMATS = {
    "torch-export": Format("model.pt2", torch.export.save),
    "onnx": Format("model.onnx", write_onnx),
    "onnx-int8": Format("model-int8.onnx", quantize_onnx, "onnx", 0.1),
    "openvino": Format("model.xml", write_openvino),
    "openvino-int8": Format("model-int8.xml", quantize_openvino, "openvino", 0.1),
}


def write(key: str, traced: Callable[[], ExportedProgram], folder: Path) -> Path:
    """Write a format into a folder and return the path of its file.

    Args:
        key: A key of `FORMATS`.
        traced: Returns the program. It is not called if the folder holds the format's source.
        folder: The folder.
    """
    form = FORMATS[key]
    path = folder / form.file
    if form.source is None:
        form.write(traced(), path)
    elif (source := folder / FORMATS[form.source].file).exists():
        form.write(source, path)
    else:
        with tempfile.TemporaryDirectory() as scratch:
            form.write(write(form.source, traced, Path(scratch)), path)
    return path


def load(path: Path, precision: str = "fp32", threads: int = 0) -> Logits:
    """Return a function from images ([B, C, H, W]) to logits ([B, K]) that runs an export.

    Args:
        path: A file that one of `FORMATS` wrote.
        precision: "fp32", or for OpenVINO "bf16". Without this choice OpenVINO computes in bf16
            wherever the processor has instructions for it.
        threads: Number of threads of ONNX Runtime and OpenVINO; 0 leaves it to them.
    """
    if path.suffix == ".pt2":
        return torch.export.load(path).module()
    if path.suffix == ".onnx":
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        providers = ["CPUExecutionProvider"]
        session = onnxruntime.InferenceSession(path, options, providers=providers)
        name = NAMES["input_names"][0]
        return lambda images: torch.from_numpy(session.run(None, {name: images.cpu().numpy()})[0])
    import openvino

    settings = {
        "INFERENCE_PRECISION_HINT": "bf16" if precision == "bf16" else "f32",
        "INFERENCE_NUM_THREADS": threads,
        "PERFORMANCE_HINT": "LATENCY",
    }
    compiled = openvino.Core().compile_model(path, "CPU", settings)
    return lambda images: torch.from_numpy(compiled(images.cpu().numpy())[0])
