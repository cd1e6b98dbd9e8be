"""Accuracy of a run's weights with and without their attention branches.

    python -m benchmarks.attention_worth outputs/certified/cifar10 --data holdout=0

The output of every window attention is replaced by zeros, and all other weights stay. The
difference says how much the network uses its attention. Prints one JSON object.
"""

import json
import sys

import torch
from torch import Tensor, nn

from lipsformer._commands import documented_parser
from lipsformer.engine.distributed import make_accelerator
from lipsformer.engine.run_folder import WHICH, WHICH_HELP, find_weights
from lipsformer.models.lipsformer_swin import WindowAttention
from scripts._evaluate import data_of, evaluate_set, model_of, sets_of


def switch_off(model: nn.Module) -> None:
    """Let every window attention return zeros."""

    def zeros(_: nn.Module, __: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return torch.zeros_like(output)

    for module in model.modules():
        if isinstance(module, WindowAttention):
            module.register_forward_hook(zeros)


def main(argv: list[str] | None = None) -> int:
    """Run the command line."""
    parser = documented_parser(__doc__, prog="python -m benchmarks.attention_worth")
    parser.add_argument("run", help="run folder or checkpoint of a model with window attention")
    parser.add_argument("--weights", choices=WHICH, default="best", help=WHICH_HELP)
    parser.add_argument("--data", nargs="*", default=[], metavar="key=value")
    args = parser.parse_args(argv)
    weights = find_weights(args.run, args.weights)
    config = weights.config([f"data.{override}" for override in args.data])
    data = data_of(weights, config, args.data, imagenet=False)
    (images,) = sets_of(weights, data, None, None)
    model = model_of(weights, config, images.dataset.classes)
    if not any(isinstance(module, WindowAttention) for module in model.modules()):
        parser.error(f"{args.run} has no window attention: give a model of the Swin form")
    accelerator = make_accelerator("fp32")
    model.to(accelerator.device)
    whole = evaluate_set(accelerator, model, images, data, 256, None)
    switch_off(model)
    without = evaluate_set(accelerator, model, images, data, 256, None)
    record = {
        "weights": str(weights.file),
        "images": whole["images"],
        "top1": whole["top1"],
        "top1_without_attention": without["top1"],
    }
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
