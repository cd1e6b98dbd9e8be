"""Fold what is affine into the neighboring layers: the same function with fewer passes.

A model's own file registers how its modules are folded, with ``register_fold``.
"""

import copy
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from lipsformer import kernels
from lipsformer.layers import (
    CenterNorm,
    DepthwiseConv2d,
    Linear,
    ScaledCosineAttention,
    WeightedResidual,
)
from lipsformer.layers._hooks import has_hooks
from lipsformer.models.recorded import RecordedForward

Fold = TypeVar("Fold", bound=Callable[[Any], None])
_FOLDS: dict[type[nn.Module], Callable[[Any], None]] = {}


def register_fold(*kinds: type[nn.Module]) -> Callable[[Fold], Fold]:
    """Register a function that folds modules of the given classes, in place.

    Args:
        *kinds: Classes. A subclass may compute something else and is folded only if it is named.
    """

    def register(fold: Fold) -> Fold:
        _FOLDS.update(dict.fromkeys(kinds, fold))
        return fold

    return register


class FrozenLinear(nn.Linear):
    r"""Linear layer with fixed weights, and GELU after it if asked.

    .. math:: y = x W^T + b \quad\text{or}\quad y = \mathrm{GELU}(x W^T + b)

    Without gradients on the CPU in float32 or bfloat16, it is computed from a copy of the weight
    in the layout of the fastest product, with GELU in the same pass. The copy is made at the first
    call and again when a parameter was written or replaced or the type has changed.
    Elsewhere, and for parameters that were made in inference mode, whose changes PyTorch does not
    count, it is ``nn.Linear`` and GELU.

    Shape:
        x: [..., C_in]; the output is [..., C_out].

    Example:
        >>> import torch
        >>> from lipsformer.models.inference import FrozenLinear
        >>> FrozenLinear(torch.nn.Linear(3, 5), act_after=True)(torch.zeros(2, 3)).shape
        torch.Size([2, 5])
    """

    def __init__(self, linear: nn.Linear, act_after: bool = False) -> None:
        """Take over the parameters of a layer.

        Args:
            linear: The layer.
            act_after: Apply GELU to the output.

        Raises:
            TypeError: If the layer computes more than its weight and bias say.
        """
        require_plain(linear)
        super().__init__(linear.in_features, linear.out_features, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.act_after = act_after
        self.packed: _Packed | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the packed copy, which can be neither copied nor saved."""
        return {**super().__getstate__(), "packed": None}

    def forward(
        self, input: Tensor, act_before: bool = False, output_scale: Tensor | None = None
    ) -> Tensor:
        """Apply the layer.

        Args:
            input: [..., C_in].
            act_before: Apply GELU to the input first.
            output_scale: [C_out], multiplies the output.
        """
        y = self._linear(F.gelu(input) if act_before else input)
        return y if output_scale is None else y * output_scale

    def _linear(self, input: Tensor) -> Tensor:
        if input.numel() > 0 and kernels.usable(
            "packed_linear", input, self.weight, unless=lambda: self._obstacle(input)
        ):
            dtype = kernels.product_dtype(input)
            packed = self.packed  # read once: another thread may replace it
            if packed is None or packed.is_stale(dtype, self._tensors()):
                packed = self.packed = _Packed(dtype, self._tensors())
            return kernels.packed_linear(
                input.to(dtype), packed.weight, packed.bias, self.act_after
            )
        y = F.linear(input, self.weight, self.bias)
        return F.gelu(y) if self.act_after else y

    def _tensors(self) -> list[Tensor]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]

    def _obstacle(self, input: Tensor) -> str | None:
        """Return why the packed copy of the weight may not be used, or None."""
        if type(input) is not Tensor:
            return "the input is of a subclass"
        if torch.jit.is_tracing():
            return "torch.jit can keep no packed weight"
        if any(tensor.is_inference() for tensor in self._tensors()):
            return "a parameter was made in inference mode"
        return None

    def extra_repr(self) -> str:
        """Show the sizes and whether GELU follows."""
        return f"{super().extra_repr()}, act_after={self.act_after}"


register_notrace_module(FrozenLinear)  # FX cannot trace the choice of a kernel


class _Packed:
    """The copy of a layer's weight in another layout, and of what it was made."""

    def __init__(self, dtype: torch.dtype, tensors: list[Tensor]) -> None:
        weight, *bias = (tensor.to(dtype) for tensor in tensors)
        self.weight = kernels.pack_weight(weight)
        self.bias = bias[0].expand(len(weight)).contiguous() if bias else None
        self.sources = [tensor.detach() for tensor in tensors]  # so that no address is used again
        self.state = self._state(dtype, tensors)

    def is_stale(self, dtype: torch.dtype, tensors: list[Tensor]) -> bool:
        """Return whether a parameter was written or replaced, or another type is wanted."""
        return self._state(dtype, tensors) != self.state

    @staticmethod
    def _state(dtype: torch.dtype, tensors: list[Tensor]) -> Any:
        return dtype, [(tensor.data_ptr(), tensor.stride(), tensor._version) for tensor in tensors]


class FoldedResidual(nn.Module):
    r"""Weighted residual and the CenterNorm after it, folded into the branch's last layer.

    .. math:: CN(x + \alpha \odot f(x)) = \gamma \tfrac{d}{d-1} (x - \mathrm{mean}(x)) + f'(x)

    :math:`f'` is the branch with a changed last layer: :math:`f'(x) = CN(\alpha \odot f(x))`.

    Shape:
        x: [B, ..., C]; the output has the same shape.

    Example:
        >>> import torch
        >>> from lipsformer.layers import CenterNorm, WeightedResidual
        >>> from lipsformer.models.inference import FoldedResidual
        >>> linear, norm, x = torch.nn.Linear(3, 3), CenterNorm(3), torch.randn(5, 3)
        >>> residual = WeightedResidual(linear, dim=3, init_value=0.1)
        >>> expected = norm(residual(x))
        >>> folded = FoldedResidual(residual, linear, norm)
        >>> torch.allclose(folded(x), expected, atol=1e-6)
        True
    """

    gain: Tensor | None

    def __init__(self, residual: WeightedResidual, last: nn.Linear, norm: nn.Module) -> None:
        """Take over the branch and change its last layer.

        Args:
            residual: The residual.
            last: The linear layer that ends its branch.
            norm: CenterNorm of the sum, or an identity.
        """
        super().__init__()
        require_plain(residual)
        self.branch = residual.branch
        scale_output(last, residual.residual_scale)
        gain = None
        if isinstance(norm, CenterNorm):
            fold_norm_behind(last, norm)
            gain = _full_gain(norm).to(norm.weight.dtype)
        self.register_buffer("gain", gain)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the residual to ``x`` ([B, ..., C])."""
        if self.gain is None:
            return x + self.branch(x)
        return kernels.center(x, self.gain, self.branch(x))


class FoldedConv(nn.Module):
    r"""Depthwise convolution and the GELU after it, with the residual around both if asked.

    .. math:: y = \mathrm{GELU}(w * x + b) \quad\text{or}\quad
        y = x + \alpha \odot \mathrm{GELU}(w * x + b)

    Without gradients on the CPU in float32 or bfloat16 this is one pass over the map.

    Shape:
        x: [B, H, W, C]; the output has the same shape.

    Example:
        >>> import torch
        >>> from lipsformer.layers import DepthwiseConv2d
        >>> from lipsformer.models.inference import FoldedConv
        >>> FoldedConv(DepthwiseConv2d(8, kernel_size=7))(torch.zeros(2, 5, 11, 8)).shape
        torch.Size([2, 5, 11, 8])
    """

    def __init__(
        self, depthwise: DepthwiseConv2d, residual_scale: nn.Parameter | None = None
    ) -> None:
        """Take over the convolution.

        Args:
            depthwise: The convolution.
            residual_scale: [C], alpha of the residual around it, or None for no residual.
        """
        super().__init__()
        require_plain(depthwise)
        self.depthwise = depthwise
        self.residual_scale = residual_scale

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to ``x`` ([B, H, W, C])."""
        conv = self.depthwise
        obstacle = lambda: self._obstacle(x)  # noqa: E731
        if kernels.usable("depthwise_gelu", x, conv.weight, unless=obstacle):
            return kernels.depthwise_gelu(x, conv.weight, conv.bias, self.residual_scale)
        y = F.gelu(conv(x))
        if self.residual_scale is None:
            return y
        return torch.addcmul(x, y, self.residual_scale).to(x.dtype)

    def _obstacle(self, x: Tensor) -> str | None:
        if has_hooks(self.depthwise):
            return "the convolution has hooks"
        if self.residual_scale is not None and kernels.product_dtype(x) != x.dtype:
            return "the sum keeps the type of the input, which autocast changes"
        return self.depthwise.obstacle(x)


register_notrace_module(FoldedConv)


class NothingToFoldError(TypeError):
    """A model has none of the layers that can be folded."""


@torch.inference_mode(False)  # writes to a tensor of that mode would go unnoticed
@torch.no_grad()
def optimize_for_inference(model: nn.Module) -> nn.Module:
    r"""Return a copy of a model in which every affine map that allows it is folded.

    .. math:: W\,CN(x) + b = W'x + b', \quad
        W' = W \mathrm{diag}(\gamma) \tfrac{d}{d-1} (I - 11^T/d), \quad b' = b + W\beta

    :math:`CN(Wx + b)` is folded in the same way. Residual scales enter the last linear layer of
    their branch. Everything is computed in float64 and rounded once. On the CPU in float32, linear
    layers run from a copy of their weights in another layout, GELU included, which doubles the
    memory of the weights. The last CenterNorm is not folded, because ``forward_features`` returns
    its result, and neither are scales after a GELU.

    On the CPU without gradients, the second batch of images of the same shape records the calls of
    all operators, and later calls repeat that list without the modules (``RecordedForward``), which
    gives the same bits. It saves most where images are few or small. More than 4 images of 224 px
    for each thread, or 8 in bf16, and as many pixels of other sizes, are computed in parts.

    The copy gives the same logits and features. Its parameters have other names and no gradients;
    keep the model itself for training, checkpoints and Lipschitz bounds. Weights, modules and hooks
    that are written or replaced later are noticed, except weights that are written in ways that
    PyTorch does not count as writes: through ``weight.data``, ``weight.numpy()`` or DLPack, by
    optimizers with ``fused=True``, and by collectives of ``torch.distributed``. Changes of other
    attributes, such as ``value_scale``, are not noticed: make them in the model and fold it again.

    Example:
        >>> import timm, torch
        >>> import lipsformer
        >>> model = timm.create_model("lipsformer_nano").eval()
        >>> lipsformer.optimize_for_inference(model)(torch.zeros(1, 3, 32, 32)).shape
        torch.Size([1, 1000])

    Args:
        model: A LipsFormer (CSwin, Swin, ViT, contractive), also with ``features_only``, or a
            model made by ``convert``, in evaluation mode.

    Raises:
        ValueError: If the model is in training mode.
        NothingToFoldError: If the model has no layer of LipsFormer.
        TypeError: If the model is folded already, or a module that would be folded is used twice,
            has hooks or belongs to an adapter such as LoRA, so that the folded model would compute
            something else.
    """
    if model.training:
        raise ValueError("the model is in training mode: call model.eval() first")
    if any(isinstance(module, FrozenLinear) for module in model.modules()):
        raise TypeError(
            f"this {type(model).__name__} is folded already: use it as it is, or pass the model "
            "from which it was made"
        )
    folded = copy.deepcopy(model)
    if not any(
        isinstance(module, (CenterNorm, ScaledCosineAttention)) for module in folded.modules()
    ):
        raise NothingToFoldError(
            f"{type(model).__name__} has nothing to fold: pass a LipsFormer or a model of convert()"
        )
    _require_single_use(folded)
    for name, module in list(folded.named_modules()):
        fold = _FOLDS.get(type(module))
        if fold is None:
            continue
        try:
            if "forward" in module.__dict__:
                raise TypeError(f"{type(module).__name__} has a forward function of its own")
            fold(module)
        except TypeError as error:
            raise TypeError(f"{name} cannot be folded: {error}") from None
    has_head = hasattr(folded, "get_classifier")  # a model of features_only has none
    classifier = cast(Any, folded).get_classifier() if has_head else None
    for parent in list(folded.modules()):
        for name, child in parent.named_children():
            linear = type(child) in (Linear, nn.Linear) and _obstacle(child) is None
            if linear and child is not classifier:
                setattr(parent, name, FrozenLinear(cast(nn.Linear, child)))
    folded.forward = RecordedForward(folded).forward
    return folded.requires_grad_(False).eval()


def require_plain(*modules: nn.Module) -> None:
    """Raise unless modules compute what their classes say, from parameters of their own.

    Args:
        *modules: What a fold changes or removes.

    Raises:
        TypeError: If a module is not of a class of PyTorch, timm or this library, is parametrized,
            or has hooks or a forward function of its own.
    """
    for module in modules:
        obstacle = _obstacle(module)
        if obstacle is not None:
            raise TypeError(f"{type(module).__name__} {obstacle}")


def _obstacle(module: nn.Module) -> str | None:
    """Return why a module may compute something else than its class says, or None."""
    package = type(module).__module__.partition(".")[0]
    if package not in ("torch", "timm", "lipsformer"):
        return "is unknown to the fold: put a plain layer in its place, for example by merging LoRA"
    if is_parametrized(module):
        return "is parametrized: call torch.nn.utils.parametrize.remove_parametrizations first"
    if "forward" in module.__dict__:
        return "has a forward function of its own"
    if has_hooks(module):
        return "has hooks, which would be lost: remove them, or register them on the folded model"
    return None


def _require_single_use(model: nn.Module) -> None:
    """Raise if a module with parameters has two names, since its uses would be folded into one."""
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        first = names.setdefault(module, name)
        if first != name and any(True for _ in module.parameters()):
            raise TypeError(
                f"{first} and {name} are one module, which cannot be folded for both places: "
                "replace one of them by a copy"
            )


def _full_gain(norm: CenterNorm) -> Tensor:
    """Return gamma d / (d - 1), which multiplies the centered channels."""
    return norm.weight.double() * (norm.dim / (norm.dim - 1))


def fold_norm_before(norm: CenterNorm, linear: nn.Linear) -> None:
    """Change ``linear`` so that it also computes the ``norm`` that stood before it."""
    require_plain(norm, linear)
    weight = linear.weight.double()
    shift = weight @ norm.bias.double()
    centered = weight * _full_gain(norm)
    centered -= centered.mean(1, keepdim=True)
    bias = shift if linear.bias is None else linear.bias.double() + shift
    _assign(linear, centered, bias)


def fold_norm_behind(layer: nn.Linear | nn.Conv2d, norm: CenterNorm) -> None:
    """Change ``layer`` so that it also computes the ``norm`` that followed it."""
    require_plain(norm, layer)
    weight, gain = layer.weight.double(), _full_gain(norm)
    bias = weight.new_zeros(norm.dim) if layer.bias is None else layer.bias.double()
    weight = (weight - weight.mean(0, keepdim=True)).movedim(0, -1) * gain
    _assign(layer, weight.movedim(-1, 0), (bias - bias.mean()) * gain + norm.bias.double())


def scale_output(linear: nn.Linear, scale: Tensor) -> None:
    """Change ``linear`` so that it also multiplies its output by ``scale`` ([C_out])."""
    require_plain(linear)
    scale = scale.double()
    bias = None if linear.bias is None else linear.bias.double() * scale
    _assign(linear, linear.weight.double() * scale[:, None], bias)


def _assign(layer: nn.Linear | nn.Conv2d, weight: Tensor, bias: Tensor | None) -> None:
    dtype = layer.weight.dtype
    layer.weight = nn.Parameter(weight.to(dtype))  # a new one: the old one may be tied
    if bias is not None:
        layer.bias = nn.Parameter(bias.to(dtype))
