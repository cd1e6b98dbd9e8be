"""Structures of whole models on every body, and of the modules inside them."""

from typing import Any

import torch
from hypothesis import strategies as st
from timm.models.deit import VisionTransformerDistilled
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from lipsformer import convert
from lipsformer.analysis.instruments import SpectralCap
from lipsformer.models.inference import optimize_for_inference
from lipsformer.models.lipsformer_contractive import LipsFormerContractive
from lipsformer.models.lipsformer_cswin import LipsFormerCSwin
from lipsformer.models.lipsformer_swin import LipsFormerSwin
from lipsformer.models.lipsformer_vit import LipsFormerViT
from tests.hunt.cases import Subject, kind

BODY = {
    "size": st.tuples(st.integers(1, 3), st.integers(1, 4)),
    "extra": st.sampled_from([(0, 0), (0, 0), (0, 0), (1, 0), (0, 1)]),
    "patch": st.sampled_from([1, 2]),
    "stem": st.sampled_from(["patch", "conv"]),
    "chans": st.sampled_from([1, 2, 3]),
    "classes": st.sampled_from([2, 3, 0]),
    "head_dim": st.sampled_from([2, 1, 3]),
    "form": st.sampled_from(["cosine", "official", "lipschitznorm"]),
    "mlp_ratio": st.sampled_from([1.0, 2.0]),
    "pool": st.sampled_from(["avg", "avg", ""]),
    "alpha": st.sampled_from([0.25, 1.0]),
    "learn": st.booleans(),
}
STAGES = st.sampled_from([(1,), (1, 1), (2,)])
FORM = st.sampled_from(["cosine", "cosine", "learned", "lipschitznorm"])
VIT = {
    "size": st.tuples(st.integers(1, 3), st.integers(1, 2)),
    "extra": st.sampled_from([(0, 0), (0, 0), (0, 0), (1, 0), (0, 2)]),
    "patch": st.sampled_from([1, 2]),
    "chans": st.sampled_from([1, 2, 3]),
    "classes": st.sampled_from([2, 3, 0]),
    "heads": st.sampled_from([1, 2, 3]),
    "head_dim": st.sampled_from([2, 3]),
    "depth": st.sampled_from([1, 2]),
    "nu": st.sampled_from([1.0, 0.1, 5.0]),
    "form": FORM,
    "options": st.fixed_dictionaries(
        {},
        optional={
            "class_token": st.just(False),
            "reg_tokens": st.integers(1, 2),
            "no_embed_class": st.booleans(),
            "global_pool": st.sampled_from(["avg", "token", "", "max", "avgmax"]),
            "pool_include_prefix": st.booleans(),
            "pos_embed": st.sampled_from(["", "learn"]),
            "dynamic_img_size": st.booleans(),
            "dynamic_img_pad": st.booleans(),
            "pre_norm": st.booleans(),
            "fc_norm": st.booleans(),
            "final_norm": st.booleans(),
            "qkv_bias": st.booleans(),
            "proj_bias": st.booleans(),
            "patch_drop_rate": st.just(0.5),
            "drop_path_rate": st.just(0.3),
        },
    ),
}
TIMM_SWIN = {
    **{name: VIT[name] for name in ("extra", "patch", "chans", "classes", "nu", "form")},
    "size": st.tuples(st.integers(1, 4), st.integers(1, 4)),
    "depths": STAGES,
    "head_dim": st.sampled_from([2, 3]),
    "window": st.sampled_from([1, 2, 3]),
    "options": st.fixed_dictionaries(
        {},
        optional={
            "always_partition": st.booleans(),
            "strict_img_size": st.booleans(),
            "global_pool": st.sampled_from(["avg", "max", ""]),
            "qkv_bias": st.booleans(),
            "drop_path_rate": st.just(0.3),
        },
    ),
}


def pixels(size: Any, patch: int) -> tuple[int, int]:
    """Return the size of the images of a map of patches."""
    return size[0] * patch, size[1] * patch


def model_subject(model: nn.Module, chans: int, size: tuple[int, int]) -> Subject:
    """Return a model on channels-first images."""
    return Subject(model, (chans, *size), size, token_dim=1)


def _body_arguments(
    size: Any,
    patch: int,
    chans: int,
    classes: int,
    head_dim: int,
    form: str,
    mlp_ratio: float,
    pool: str,
    alpha: float,
    learn: bool,
    stem: str = "patch",
) -> dict[str, Any]:
    return {
        "img_size": pixels(size, patch),
        "patch_size": patch,
        "stem": stem,
        "in_chans": chans,
        "num_classes": classes,
        "embed_dim": 2 * head_dim,
        "mlp_ratio": mlp_ratio,
        "attn": "lipschitznorm" if form == "lipschitznorm" else "cosine",
        "official_compat": form == "official",
        "learn_logit_scale": learn and form != "lipschitznorm",
        "global_pool": pool,
        "residual_scale": alpha,
        "weight_init": "skip",
    }


def _plus(size: tuple[int, int], extra: Any) -> tuple[int, int]:
    return size[0] + extra[0], size[1] + extra[1]


def swin(depths: Any, window: int, extra: Any, **body: Any) -> Subject:
    arguments = _body_arguments(**body)
    heads = [2 * 2**stage for stage in range(len(depths))]
    if body["head_dim"] > 1:
        heads = [1 + stage for stage in range(len(depths))]
    model = LipsFormerSwin(
        **arguments, depths=tuple(depths), num_heads=tuple(heads), window_size=window
    )
    return model_subject(model, body["chans"], _plus(arguments["img_size"], extra))


def cswin(depths: Any, split: int | None, extra: Any, **body: Any) -> Subject:
    arguments = _body_arguments(**body)
    splits = [split, None][: len(depths)]
    model = LipsFormerCSwin(
        **arguments,
        depths=tuple(depths),
        num_heads=(2,) * len(depths),
        split_sizes=tuple(splits),
    )
    return model_subject(model, body["chans"], _plus(arguments["img_size"], extra))


def _vit_arguments(
    size: Any,
    patch: int,
    chans: int,
    classes: int,
    heads: int,
    head_dim: int,
    depth: int,
    options: dict[str, Any],
) -> dict[str, Any]:
    if options.get("class_token") is False:
        options = {"global_pool": "avg", **options}
    return {
        "img_size": pixels(size, patch),
        "patch_size": patch,
        "in_chans": chans,
        "num_classes": classes,
        "embed_dim": heads * head_dim,
        "num_heads": heads,
        "depth": depth,
        "mlp_ratio": 1.0,
        "weight_init": "skip",
        **options,
    }


def attention_of(nu: float, form: str) -> dict[str, Any]:
    """Return the arguments of the attention, of which LipschitzNorm has none."""
    if form == "lipschitznorm":
        return {"attn": form}
    learned = {"logit_scale": 3.0, "learn_logit_scale": True} if form == "learned" else {}
    return {"value_scale": nu, **learned}


@kind("vit", **VIT)
def vit(extra: Any, nu: float, form: str = "cosine", **arguments: Any) -> Subject:
    made = _vit_arguments(**arguments)
    model = LipsFormerViT(**attention_of(nu, form), **made)
    return model_subject(model, arguments["chans"], _plus(made["img_size"], extra))


@kind("converted vit", **VIT)
def converted_vit(extra: Any, nu: float, form: str = "cosine", **arguments: Any) -> Subject:
    made = _vit_arguments(**arguments)
    model = convert(VisionTransformer(**made), spectral_init=False, **attention_of(nu, form))
    return model_subject(model, arguments["chans"], _plus(made["img_size"], extra))


@kind("converted distilled deit", **VIT)
def converted_deit(extra: Any, nu: float, form: str = "cosine", **arguments: Any) -> Subject:
    made = _vit_arguments(**arguments)
    for name in ("global_pool", "class_token", "reg_tokens", "pos_embed"):
        made.pop(name, None)
    model = convert(
        VisionTransformerDistilled(**made), spectral_init=False, **attention_of(nu, form)
    )
    return model_subject(model, arguments["chans"], _plus(made["img_size"], extra))


@kind("converted swin", **TIMM_SWIN)
def converted_swin(
    size: Any,
    extra: Any,
    patch: int,
    chans: int,
    classes: int,
    nu: float,
    depths: Any,
    head_dim: int,
    window: int,
    options: dict[str, Any],
    form: str = "cosine",
) -> Subject:
    img_size = pixels(size, patch)
    model = SwinTransformer(
        img_size=img_size,
        patch_size=patch,
        in_chans=chans,
        num_classes=classes,
        embed_dim=head_dim,
        depths=tuple(depths),
        num_heads=(1, 2)[: len(depths)],
        window_size=window,
        mlp_ratio=1.0,
        weight_init="skip",
        **options,
    )
    convert(model, spectral_init=False, **attention_of(nu, form))
    return model_subject(model, chans, _plus(img_size, extra))


@kind(
    "contractive",
    size=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    dims=st.sampled_from([(8,), (8, 16)]),
    depth=st.sampled_from([1, 2]),
    share=st.sampled_from([0.25, 0.5, 1.0, 0.0]),
    chans=st.sampled_from([1, 3]),
    classes=st.sampled_from([2, 3]),
    tau=st.sampled_from([0.25, 3.0]),
    eps=st.sampled_from([1.0, 16.0]),
)
def contractive(
    size: Any, dims: Any, depth: int, share: float, chans: int, classes: int, tau: float, eps: float
) -> Subject:
    img_size = pixels(size, 2 * 2 ** (len(dims) - 1))
    model = LipsFormerContractive(
        img_size=img_size,
        dims=tuple(dims),
        depths=(depth,) * len(dims),
        window_size=(2,) * len(dims),
        attn_share=share,
        head_dim=2,
        in_chans=chans,
        num_classes=classes,
        logit_scale=tau,
        eps=eps,
    )
    return model_subject(model, chans, img_size)


MODELS = {
    "swin": (swin, {**BODY, "depths": STAGES, "window": st.sampled_from([2, 1, 3])}),
    "cswin": (cswin, {**BODY, "depths": STAGES, "split": st.sampled_from([1, 2, None])}),
    "vit": (vit, VIT),
    "converted vit": (converted_vit, VIT),
    "converted distilled deit": (converted_deit, VIT),
    "converted swin": (converted_swin, TIMM_SWIN),
}
for _body in ("swin", "cswin"):
    for _core in ("cosine", "official", "lipschitznorm"):
        kind(f"{_body}, {_core}", **{**MODELS[_body][1], "form": st.just(_core)})(MODELS[_body][0])
for _body in ("converted vit", "converted swin"):
    _args = {**MODELS[_body][1], "form": st.just("lipschitznorm")}
    kind(f"{_body}, lipschitznorm", **_args)(MODELS[_body][0])
ANY_MODEL = st.sampled_from(sorted(MODELS)).flatmap(
    lambda name: st.tuples(st.just(name), st.fixed_dictionaries(MODELS[name][1]))
)


def _made(model: Any) -> Subject:
    name, arguments = model
    return MODELS[name][0](**arguments)


@kind("folded model", model=ANY_MODEL)
def _folded(model: Any) -> Subject:
    subject = _made(model)
    for parameter in subject.module.parameters():
        torch.nn.init.normal_(parameter)
    folded = optimize_for_inference(subject.module.eval())
    return model_subject(folded, subject.shape[0], subject.size)  # pyright: ignore


@kind("capped model", model=ANY_MODEL, cap=st.sampled_from([1.0, 0.3]))
def _capped(model: Any, cap: float) -> Subject:
    subject = _made(model)
    for parameter in subject.module.parameters():
        torch.nn.init.normal_(parameter)
    SpectralCap(subject.module, cap, residual_scale=cap, gain=cap).before_eval()
    return subject


def _inside(subject: Subject, path: str) -> Subject:
    """Return a module inside a model, on inputs shaped like those that the model gives it."""
    seen: list[Tensor] = []
    module = subject.module.get_submodule(path)
    handle = module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        for parameter in subject.module.parameters():
            parameter.zero_()
        subject.module.eval()(torch.zeros(1, *subject.shape))
    handle.remove()
    shape = tuple(seen[0].shape[1:])
    if path == "patch_embed":
        return model_subject(module, shape[0], (shape[1], shape[2]))
    return Subject(module, shape, shape[:-1])


def _register_inside(name: str, body: str, path: str, **fixed: Any) -> None:
    make, arguments = MODELS[body]
    drawn = {key: value for key, value in arguments.items() if key not in fixed and key != "extra"}

    def build_inside(**chosen: Any) -> Subject:
        return _inside(make(**chosen, **fixed, extra=(0, 0)), path)

    kind(name, **drawn)(build_inside)


_register_inside("PatchEmbed", "swin", "patch_embed", stem="patch")
_register_inside("ConvStem", "swin", "patch_embed", stem="conv")
_register_inside("ConvBranch, with pointwise", "swin", "stages.0.blocks.0.conv1.branch")
_register_inside("ConvBranch", "cswin", "stages.0.blocks.0.conv2.branch")
_register_inside("Mlp", "cswin", "stages.0.blocks.0.mlp.branch")
_register_inside("LipsFormerBlock, swin", "swin", "stages.0.blocks.0")
_register_inside("LipsFormerBlock, cswin", "cswin", "stages.0.blocks.0")
_register_inside("LipsFormerStage, swin", "swin", "stages.1", depths=(1, 1))
_register_inside("LipsFormerStage, cswin", "cswin", "stages.1", depths=(1, 1))
_register_inside("PatchMerging", "swin", "stages.1.downsample", depths=(1, 1))
_register_inside("ConvMerging", "cswin", "stages.1.downsample", depths=(1, 1))
_register_inside("timm PatchEmbed", "converted vit", "patch_embed")
_register_inside("timm PatchEmbed, swin", "converted swin", "patch_embed")
_register_inside("CosineAttention", "converted vit", "blocks.0.attn")
_register_inside("timm Block", "vit", "blocks.0")
_register_inside("CosineWindowAttention", "converted swin", "layers.0.blocks.0.attn")
_register_inside("SwinTransformerBlock", "converted swin", "layers.0.blocks.0")
_register_inside(
    "SwinTransformerBlock, shifted", "converted swin", "layers.0.blocks.1", depths=(2,)
)
_register_inside("timm PatchMerging", "converted swin", "layers.1.downsample", depths=(1, 1))
_register_inside("SwinTransformerStage", "converted swin", "layers.1", depths=(1, 1))
