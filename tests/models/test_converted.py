"""Converted models for users: timm's own class tests, timm's formats, and what conversion keeps."""

from types import ModuleType

import pytest
import timm
import torch
from timm.models._hub import save_for_hf
from torch import nn

import lipsformer
from lipsformer.engine.optim import parameter_groups
from lipsformer.engine.weights import load_model
from lipsformer.layers import CenterNorm
from lipsformer.models.timm_conversion import CONVERTED
from lipsformer.recipe import OptimConfig
from tests.models.test_timm_contract import CONTRACT, GENERAL, GENERAL_WITH_KWARGS, load

# timm's tests meet warnings of timm and PyTorch that are not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore")

VIT = {"embed_dim": 22, "depth": 3, "num_heads": 2}
SWIN = {"embed_dim": 12, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 3, 6)}
MODELS = {
    "vit_tiny_patch16_224": VIT,
    "deit_tiny_patch16_224": VIT,
    "deit_tiny_distilled_patch16_224": VIT,
    "swin_tiny_patch4_window7_224": SWIN,
}


# timm's own models of these classes fail them too
NOT_TIMMS = {
    "test_features_only_grad_checkpointing_backward": ("vit", "deit"),
    "test_forward_intermediates_stop_early_final_norm": ("vit", "deit"),
    "test_reset_classifier_keeps_pool": ("deit_tiny_distilled",),
    "test_head_hidden_size": ("deit_tiny_distilled",),
}


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def converted_tests(**more) -> ModuleType:
    """timm's tests, whose models are converted as soon as they are made."""
    module = load("test_models")
    create = timm.create_model

    def create_converted(name: str, *args, **kwargs):
        return create(CONVERTED, *args, original=name, **{**MODELS[name], **more, **kwargs})

    module.create_model = create_converted
    return module


@pytest.fixture(scope="module")
def models_tests() -> ModuleType:
    return converted_tests()


@pytest.fixture(scope="module")
def tests_of_any_size() -> ModuleType:
    """For the tests that draw images of other sizes, which a model of a fixed size refuses."""
    return converted_tests(dynamic_img_size=True)


@pytest.mark.parametrize("check", CONTRACT)
def test_contract(models_tests, check, name):
    getattr(models_tests, check)(name, 2 if "backward" in check else 1)


def test_default_cfgs(models_tests, name):
    suffix = "" if name.startswith("swin") else "_non_std"
    getattr(models_tests, f"test_model_default_cfgs{suffix}")(name, 1, "meta")


@pytest.mark.parametrize("check", [*GENERAL, *GENERAL_WITH_KWARGS])
def test_general(tests_of_any_size, check, name):
    if not name.startswith(NOT_TIMMS.get(check, "none")):
        getattr(tests_of_any_size, check)(name, *([{}] if check in GENERAL_WITH_KWARGS else []))


def randomized(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


ARGUMENTS = [
    {},
    {"attn": "lipschitznorm"},
    {"logit_scale": 3.0, "learn_logit_scale": True, "residual_scale": 0.3, "value_scale": 2.0},
]


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=["default", "lipschitznorm", "learned"])
def test_timms_format_rebuilds_the_converted_model(tmp_path, name, arguments):
    """Also after it was resized and got another classifier."""
    model = lipsformer.convert(timm.create_model(name, **MODELS[name]), **arguments)
    model.reset_classifier(7)
    model.set_input_size((64, 96))
    randomized(model)
    save_for_hf(model, tmp_path, safe_serialization=True)
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.randn(2, 3, 64, 96)
    assert type(loaded) is type(model)
    torch.testing.assert_close(loaded(images), model(images), rtol=0, atol=0)
    assert load_model(tmp_path).state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize("mode", [True, False])
def test_every_module_has_the_mode_of_the_original(name, mode):
    model = lipsformer.convert(timm.create_model(name, **MODELS[name]).train(mode))
    assert all(module.training is mode for module in model.modules())


def test_what_was_trained_is_kept(name):
    """Gains, biases and LayerScale keep their values, and what was frozen stays frozen."""
    deit3 = {} if name.startswith("swin") else {"init_values": 0.4}
    model = timm.create_model(name, **MODELS[name], **deit3)
    randomized(model)
    model.requires_grad_(False)
    trained = [parameter for key, parameter in model.named_parameters() if "head" in key]
    for parameter in trained:
        parameter.requires_grad_(True)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    lipsformer.convert(model, spectral_init=False, learn_logit_scale=True)
    for key, tensor in before.items():
        torch.testing.assert_close(model.state_dict()[key], tensor, rtol=0, atol=0)
    assert [p for p in model.parameters() if p.requires_grad] == trained
    new = set(model.state_dict()) - set(before)
    assert bool([key for key in new if key.endswith("gamma")]) == name.startswith("swin")


def test_lipschitz_norm_in_a_converted_model_equals_the_layer(name):
    torch.manual_seed(0)
    model = lipsformer.convert(timm.create_model(name, **MODELS[name]), attn="lipschitznorm")
    attn = next(m for m in randomized(model).modules() if type(m).__name__ in CLASSES)
    x = torch.randn(2, 49, attn.qkv.in_features)
    q, k, v = attn.qkv(x).view(2, 49, 3, attn.num_heads, -1).permute(2, 0, 3, 1, 4)
    squares = [t.double().square().sum(-1) for t in (q, k, v)]
    u, w, z = squares[0].sum(-1).sqrt(), *(s.amax(-1).sqrt() for s in squares[1:])
    scores = (
        q.double() @ k.double().mT / torch.stack([u * w, u * z, w * z]).amax(0)[..., None, None]
    )
    if hasattr(attn, "relative_position_bias_table"):
        scores = scores + attn._get_rel_pos_bias().double()
    expected = (scores.softmax(-1) @ v.double()).transpose(1, 2).reshape(2, 49, -1)
    expected = expected @ attn.proj.weight.double().T + attn.proj.bias.double()
    torch.testing.assert_close(attn(x).double(), expected, rtol=1e-4, atol=1e-5)


CLASSES = ("CosineAttention", "CosineWindowAttention")


def test_a_converted_model_is_not_converted_again():
    for name, options in (("vit_tiny_patch16_224", VIT), ("swin_tiny_patch4_window7_224", {})):
        model = lipsformer.convert(timm.create_model(name, **options))
        with pytest.raises(TypeError, match="has been converted before"):
            lipsformer.convert(model)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"attn": "dot"}, "attn must be 'cosine' or 'lipschitznorm', got 'dot'"),
        ({"attn": "lipschitznorm", "logit_scale": 3.0}, "logit_scale=3.0 has no effect"),
        ({"attn": "lipschitznorm", "value_scale": 2.0}, "value_scale=2.0 has no effect"),
        ({"attn": "lipschitznorm", "learn_logit_scale": True}, "learn_logit_scale=True has no"),
        ({"logit_scale": 0.0}, r"logit_scale=0.0 must be in \(0, 100\]"),
        ({"value_scale": -1.0}, "value_scale=-1.0 must be > 0"),
        ({"residual_scale": float("nan")}, "residual_scale=nan must be finite"),
    ],
)
def test_impossible_arguments_leave_the_model_as_it_was(arguments, message):
    model = timm.create_model("vit_tiny_patch16_224", **VIT)
    with pytest.raises(ValueError, match=message):
        lipsformer.convert(model, **arguments)
    assert not any(isinstance(module, CenterNorm) for module in model.modules())
    with pytest.raises(ValueError, match=message):
        timm.create_model("lipsformer_vit_tiny", **VIT, **arguments)


def test_learned_logit_scales_are_not_decayed():
    converted = lipsformer.convert(
        timm.create_model("vit_tiny_patch16_224", **VIT), learn_logit_scale=True
    )
    body = timm.create_model("lipsformer_vit_tiny", **VIT, learn_logit_scale=True)
    for model in (converted, body):
        names = {parameter: name for name, parameter in model.named_parameters()}
        decayed = [
            names[parameter]
            for group in parameter_groups(model, OptimConfig(lr=1.0, weight_decay=0.1))
            for parameter in group["params"]
            if group["weight_decay"] > 0
        ]
        assert decayed
        assert not [name for name in decayed if name.endswith("log_logit_scale")]
    assert {"blocks.2.attn.attention.log_logit_scale", "pos_embed"} <= body.no_weight_decay()


@pytest.mark.parametrize("size", [33, 0, (32, 31)])
@pytest.mark.parametrize("name", ["lipsformer_nano", "lipsformer_swin_nano", "lipsformer_vit_tiny"])
def test_set_input_size_refuses_what_forward_refuses(name, size):
    more = {**VIT, "dynamic_img_size": True} if "vit" in name else {}
    model = timm.create_model(name, **more)
    before = {key: tensor.shape for key, tensor in model.state_dict().items()}
    with pytest.raises(ValueError, match=r"is not a (positive )?multiple of"):
        model.set_input_size(size)
    assert {key: tensor.shape for key, tensor in model.state_dict().items()} == before


def test_a_logit_scale_of_none_is_that_of_the_conversion():
    for scale, expected in ((None, 10.0), (3.0, 3.0)):
        model = timm.create_model("lipsformer_vit_tiny", **VIT, logit_scale=scale)
        assert {block.attn.attention.tau() for block in model.blocks} == {expected}
