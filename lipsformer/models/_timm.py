"""What timm asks of a hierarchical model: its interface, its configuration and its creation."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import get_device_dtype, to_2tuple
from timm.models import build_model_with_cfg
from timm.models._features import feature_take_indices
from timm.models._input import update_model_input_size
from torch import Tensor, nn

from lipsformer.layers import spectral_init_modules_
from lipsformer.models.official_weights import rename_earlier_version

Model = TypeVar("Model", bound=nn.Module)


class TimmInterface(nn.Module):
    """timm's methods for a model with `patch_embed`, `stages`, `norm` and `head`."""

    patch_embed: Any
    stages: Any
    norm: Any
    head: Any
    num_features: int
    feature_info: list[dict[str, Any]]

    def _load_from_state_dict(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        """Accept the parameter names of earlier versions, however the weights are loaded."""
        rename_earlier_version(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward_features(self, x: Tensor) -> Tensor:
        """Return the last feature map after the final norm, [B, H', W', C]."""
        return self.norm(self.stages(self.patch_embed(x)))

    def forward(self, x: Tensor) -> Tensor:
        """Classify images [B, in_chans, H, W]; returns logits [B, num_classes]."""
        return self.forward_head(self.forward_features(x))

    def _reset_modules(self) -> None:
        """Reset the parameters and buffers of every module that has `reset_parameters`."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if reset is not None:
                reset()

    def no_weight_decay(self) -> set[str]:
        """Return the names of the scales, gains, biases and position tables."""
        names = ("residual_scale", "relative_position_bias_table", "log_logit_scale")
        return {
            name
            for name, parameter in self.named_parameters()
            if parameter.ndim == 1 or name.endswith(names)
        }

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return patterns that sort the parameters into stem and blocks, for layer-wise decay."""
        blocks = [
            (r"^stages\.(\d+)\.downsample", (0,)),
            (r"^stages\.(\d+)\.blocks\.(\d+)", None),
            (r"^norm", (99999,)),
        ]
        return {"stem": r"^patch_embed", "blocks": r"^stages\.(\d+)" if coarse else blocks}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of each block in the backward pass of training."""
        for stage in self.stages:
            stage.grad_checkpointing = enable

    def set_input_size(self, img_size: int | tuple[int, int] | None = None) -> None:
        """Change the nominal image size; no weight depends on it.

        Args:
            img_size: Side, or (height, width), in pixels; None keeps it.

        Raises:
            ValueError: If a side is not a positive multiple of the patch size.
        """
        if img_size is not None:
            check_img_size(img_size, self.patch_embed.patch_size)
            update_model_input_size(self, img_size)

    def get_classifier(self) -> nn.Module:
        """Return the classifier."""
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier by a new, spectrally initialized one.

        Args:
            num_classes: Number of classes; 0 leaves out the classifier.
            global_pool: New pooling, None to keep it.
        """
        self.num_classes = num_classes
        dd: dict[str, Any] = get_device_dtype(self)
        self.head.reset(num_classes, global_pool, in_features=self.num_features, **dd)
        self.head_hidden_size = self.head.num_features
        spectral_init_modules_(self.head.fc)
        if global_pool is not None:
            self.global_pool = global_pool

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Return the stages' outputs, and the final features unless `intermediates_only`.

        Args:
            x: Images [B, in_chans, H, W].
            indices: Stages to return: the last n if an int, all if None.
            norm: Apply the final norm to the last stage's output.
            stop_early: Stop after the last stage wanted.
            output_fmt: "NCHW" or "NHWC", the layout of the intermediates.
            intermediates_only: Return only the list.

        Raises:
            ValueError: If `output_fmt` is neither.
        """
        if output_fmt not in ("NCHW", "NHWC"):
            raise ValueError(f"output_fmt must be 'NCHW' or 'NHWC', got {output_fmt!r}")
        take_indices, max_index = feature_take_indices(len(self.stages), indices)
        last = len(self.stages) - 1
        x = self.patch_embed(x)
        intermediates = []
        index = -1
        for index, stage in enumerate(self.stages[: max_index + 1] if stop_early else self.stages):
            x = stage(x)
            if index in take_indices:
                y = self.norm(x) if norm and index == last else x
                intermediates.append(y.permute(0, 3, 1, 2) if output_fmt == "NCHW" else y)
        if intermediates_only:
            return intermediates
        return (self.norm(x) if index == last else x), intermediates

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what is not needed for the given stages' outputs.

        Args:
            indices: Stages to keep reachable: the last n if an int.
            prune_norm: Drop the final norm.
            prune_head: Drop the classifier and the pooling.

        Returns:
            The indices of the stages that are returned.

        Raises:
            ValueError: If the classifier would stay and could not take the last stage's output.
        """
        take_indices, max_index = feature_take_indices(len(self.stages), indices)
        shortened = max_index < len(self.stages) - 1
        channels = self.feature_info[max_index]["num_chs"]
        keeps_head = not (prune_head or shortened)
        if prune_norm and keeps_head and channels != self.num_features:
            raise ValueError(
                f"without {type(self.norm).__name__} the last stage has {channels} channels, but "
                f"the classifier takes {self.num_features}: use prune_head=True too, or "
                "prune_norm=False"
            )
        self.stages = self.stages[: max_index + 1]
        if prune_norm or shortened:
            self.norm = nn.Identity()
            self.num_features = self.head_hidden_size = channels
        if prune_head or shortened:
            self.reset_classifier(0, "")
        return take_indices

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool a feature map and classify it, or stop before the classifier.

        Args:
            x: [B, H, W, C] from `forward_features`.
            pre_logits: Return the pooled features.
        """
        return self.head(x, pre_logits=True) if pre_logits else self.head(x)


def check_img_size(img_size: int | tuple[int, int], patch_size: int) -> None:
    """Raise a `ValueError` unless both sides are positive multiples of the patch size."""
    sides = cast(tuple[int, int], to_2tuple(img_size))
    if any(side < 1 or side % patch_size != 0 for side in sides):
        raise ValueError(f"img_size={img_size} is not a positive multiple of {patch_size=}")


def create(
    cls: type[Model],
    variant: str,
    pretrained: bool,
    filter_fn: Callable[[dict[str, Any], nn.Module], dict[str, Any]],
    args: dict[str, Any],
    kwargs: dict[str, Any],
) -> Model:
    """Build a registered hierarchical model with timm.

    Args:
        cls: Class of the model.
        variant: Registered name.
        pretrained: Load the weights of the configuration.
        filter_fn: The `checkpoint_filter_fn` of the model's file.
        args: Arguments of the variant. Its tuples have one entry for each stage. If the caller
            chooses fewer stages, they are cut to that number.
        kwargs: Arguments of the caller for the model and timm's builder, which replace `args`.
    """
    stages = len(kwargs.get("depths", args["depths"]))
    args = {key: x[:stages] if isinstance(x, tuple) else x for key, x in args.items()}
    return build_model_with_cfg(
        cls,
        variant,
        pretrained,
        pretrained_filter_fn=filter_fn,
        feature_cfg={"out_indices": tuple(range(stages)), "flatten_sequential": True},
        **{**args, **kwargs},
    )


def model_cfg(**kwargs: Any) -> dict[str, Any]:
    """Return timm's default configuration of a LipsFormer.

    Args:
        **kwargs: Fields that differ.
    """
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": (7, 7),
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": False,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": "head.fc",
        "license": "apache-2.0",
        "paper_ids": "arXiv:2304.09856",
        "paper_name": "LipsFormer: Introducing Lipschitz Continuity to Vision Transformers",
        "origin_url": "https://github.com/IDEA-Research/LipsFormer",
        **kwargs,
    }
