"""Everything that a training step reads and changes, and its way into a checkpoint and back.

Names in a checkpoint are those of the plain model, and sharded tensors are gathered. A checkpoint
therefore does not depend on the number of devices or on the way the model was distributed.
"""

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from timm.task import TrainingTask
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lipsformer._errors import ConfigError
from lipsformer._sharding import distribute_like, full_tensor
from lipsformer.analysis.instruments import InstrumentBase
from lipsformer.engine.optim import load_state, state_numbers, state_tensors
from lipsformer.engine.run_files import EMA, INSTRUMENTS, MODEL, OPTIMIZER, read_state
from lipsformer.engine.weights import check_fit


@dataclass
class TrainState:
    """The objects that a training step touches.

    The EMA is timm's. It averages the tensors of `module` in place, in their order, so that neither
    compilation nor DDP can hide a parameter from it. Its decay is a function of the number of
    steps, so that only its weights need saving.

    Attributes:
        accelerator: Accelerate's, for device, precision and ranks.
        model: The prepared model.
        module: The model inside the wrappers of DDP and of the compiler.
        task: timm's task, which runs `model` and returns the mean loss of a micro-batch.
        optimizer: The prepared optimizer.
        schedule: Step -> learning rate.
        clip_grad: Largest 2-norm of the whole gradient; None for no limit.
        seed: Seed of drop path and dropout.
        ema: The moving average of the weights, if there is one.
        teacher: Fingerprint of the weights from which the model learns, if there are any.
        instruments: They act in their order after each step, before the EMA reads the weights.
        before_change: Called in each step just before anything that a checkpoint holds changes.

    Example:
        >>> from lipsformer.config import OptimConfig
        >>> from lipsformer.engine.optim import make_optimizer
        >>> from timm.task import ClassificationTask
        >>> accelerator, model = Accelerator(cpu=True), nn.Linear(3, 2)
        >>> prepared, optimizer = accelerator.prepare(
        ...     model, make_optimizer(model, OptimConfig(lr=0.1))
        ... )
        >>> task = ClassificationTask(prepared, nn.CrossEntropyLoss(), verbose=False)
        >>> schedule = lambda step: 0.1
        >>> state = TrainState(accelerator, prepared, model, task, optimizer, schedule, None, 0)
        >>> list(state.state_dict()["model.safetensors"])
        ['weight', 'bias']
    """

    accelerator: Accelerator
    model: nn.Module
    module: nn.Module
    task: TrainingTask
    optimizer: torch.optim.Optimizer
    schedule: Callable[[int], float]
    clip_grad: float | None
    seed: int
    ema: ModelEmaV3 | None = None
    teacher: str | None = None
    instruments: Sequence[InstrumentBase] = ()
    before_change: Callable[[], None] = lambda: None

    def weights(self) -> dict[str, nn.Module]:
        """Return the modules to evaluate by kind of weights: "raw", and "ema" if there is one."""
        kinds: dict[str, nn.Module] = {"raw": self.module}
        if self.ema is not None:
            kinds["ema"] = self.ema.module
        return kinds

    def agree_on_buffers(self) -> None:
        """Give every rank the buffers of rank 0, such as the running statistics of BatchNorm.

        These are what a checkpoint holds. Every rank must call it.
        """
        if self.accelerator.num_processes > 1:
            for module in self.weights().values():
                plain = [b for b in module.buffers() if not isinstance(b, DTensor)]
                for buffer in plain:
                    torch.distributed.broadcast(buffer, src=0)

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        """Return file name -> tensors, on the main process; nothing on the others.

        Weights, moments and averages that are not sharded are the tensors themselves, which the
        next optimizer step changes. All others are copies. Every rank must call it, because
        gathering shards is a collective operation.
        """
        moments = state_tensors(self.module, self.optimizer)
        files = {
            MODEL: self._gather(self.module.state_dict(), _parameters(self.module)),
            OPTIMIZER: self._gather(moments, moments),
        }
        if self.ema is not None:
            files[EMA] = self._gather(self.ema.module.state_dict(), _parameters(self.ema.module))
        remembered = {
            f"{type(instrument).__name__}.{name}": tensor
            for instrument in self.instruments
            for name, tensor in instrument.state_dict().items()
        }
        if remembered:
            files[INSTRUMENTS] = self._gather(remembered, ())
        return files

    def _gather(self, tensors: dict[str, Tensor], uncopied: Container[str]) -> dict[str, Tensor]:
        """Return full tensors by name on the main process, and nothing on the others.

        Args:
            tensors: By name. Sharded ones are gathered one by one into the memory of the CPU.
            uncopied: Names of tensors that only an optimizer step changes, so that the writer may
                copy them later. All others are copied here.
        """
        gathered: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            full = full_tensor(tensor)
            if not self.accelerator.is_main_process:
                continue
            if isinstance(tensor, DTensor):
                full = full.to("cpu", copy=True)
            elif name not in uncopied:
                full = full.clone()
            gathered[name] = full
        return gathered

    def load_checkpoint(self, folder: Path) -> None:
        """Fill model, optimizer, EMA, gradient scaler and instruments from a checkpoint.

        An instrument that the checkpoint does not know starts anew, so that one that only watches
        can be added to a run.

        Raises:
            CheckpointError: If names or shapes are not those of this run.
            ConfigError: If it was made with another teacher.
        """
        state = read_state(folder)
        if state.get("teacher") != self.teacher:
            raise ConfigError(
                f"{folder} was made with another teacher than loss.teacher now names (the "
                "weights differ): restore the earlier teacher, or name another run.output_dir"
            )
        _fill(self.module.state_dict(), folder / MODEL)
        moments = load_file(folder / OPTIMIZER)
        load_state(self.module, self.optimizer, moments, state["optimizer"])
        if self.ema is not None:
            _fill(self.ema.module.state_dict(), folder / EMA)
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.load_state_dict(state["scaler"])
        if (folder / INSTRUMENTS).exists():
            remembered = load_file(folder / INSTRUMENTS)
            for instrument in self.instruments:
                prefix = f"{type(instrument).__name__}."
                instrument.load_state_dict(
                    {
                        k.removeprefix(prefix): t
                        for k, t in remembered.items()
                        if k.startswith(prefix)
                    }
                )

    def numbers(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this state besides tensors, fit for JSON.

        It is the state of the gradient scaler (None unless the precision is fp16), the numbers of
        the optimizer, and the fingerprint of the teacher.
        """
        scaler = self.accelerator.scaler
        return {
            "scaler": None if scaler is None else scaler.state_dict(),
            "optimizer": state_numbers(self.module, self.optimizer),
            "teacher": self.teacher,
        }


def _parameters(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_parameters(remove_duplicate=False)}


@torch.no_grad()
def _fill(targets: dict[str, Tensor], file: Path) -> None:
    sources = load_file(file)
    check_fit(targets, sources, str(file))
    for name, target in targets.items():
        target.copy_(distribute_like(sources[name], target))
