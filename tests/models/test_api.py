"""timm's API where its own tests do not look: checkpointing, windows, channels, heads, features."""

import copy
import hashlib

import pytest
import timm
import torch
from timm.layers import resize_rel_pos_bias_table
from torch import nn
from torch.nn.utils import parametrizations

import lipsformer  # noqa: F401  (registers)
from lipsformer.layers import Linear, ScaledCosineAttention
from lipsformer.models.lipsformer import Mlp

NAMES = ["lipsformer_nano", "lipsformer_swin_nano"]


def create(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **kwargs)


# number of entries and the start of the SHA-256 of "name shape" lines: a change of either breaks
# every saved checkpoint
STATE_DICTS = {
    "lipsformer_base": (1052, "7b89dee6cbab09d5"),
    "lipsformer_contractive_nano": (83, "17b5b1a7c29fc1a9"),
    "lipsformer_nano": (223, "864606270382ea3d"),
    "lipsformer_small": (1052, "a341993f847bf4f4"),
    "lipsformer_swin_base": (593, "559aaef58ee36714"),
    "lipsformer_swin_nano": (209, "b096a0c14fb28ec3"),
    "lipsformer_swin_small": (593, "ab55e9e29e1617f8"),
    "lipsformer_swin_tiny": (305, "ee6daf0d1e5c9942"),
    "lipsformer_tiny": (665, "109b8a94ce2d9b3d"),
    "lipsformer_vit_base": (188, "5d011e27bb15e8f7"),
    "lipsformer_vit_small": (188, "bb804126f6d29d88"),
    "lipsformer_vit_tiny": (188, "204e1155eb575b0c"),
}


@pytest.mark.parametrize("name", timm.list_models("lipsformer*"))
def test_state_dict_keys_do_not_change(name):
    state = create(name, device="meta").state_dict()
    lines = "\n".join(sorted(f"{key} {tuple(tensor.shape)}" for key, tensor in state.items()))
    digest = hashlib.sha256(lines.encode()).hexdigest()[:16]
    assert (len(state), digest) == STATE_DICTS[name]


def train_step(model, images):
    torch.manual_seed(5)  # the drop path masks
    output = model(images)
    output.square().mean().backward()
    return output, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_changes_neither_outputs_nor_gradients(name):
    images = torch.randn(5, 3, 32, 48)
    plain = create(name, num_classes=7, drop_path_rate=0.5).train()
    saving = create(name, num_classes=7, drop_path_rate=0.5).train()
    saving.set_grad_checkpointing()
    torch.testing.assert_close(
        train_step(saving, images), train_step(plain, images), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize(("training", "passes"), [(True, 2), (False, 1)])
@pytest.mark.parametrize("name", NAMES)
def test_checkpointing_recomputes_in_training_only(name, training, passes):
    model = create(name, num_classes=7).train(training)
    model.set_grad_checkpointing()
    calls = []
    model.stages[1].blocks[0].register_forward_pre_hook(lambda *_: calls.append(1))
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert len(calls) == passes


def test_set_input_size_refuses_a_window_without_tokens_before_it_changes_anything():
    model = create("lipsformer_swin_nano", depths=(1,), num_heads=(2,))
    before = dict(model.pretrained_cfg)
    with pytest.raises(ValueError, match="window_size=0 must be at least 1 in each direction"):
        model.set_input_size(img_size=64, window_size=0)
    assert model.pretrained_cfg == before


def test_set_input_size_resizes_the_tables_as_timm_does():
    model = create("lipsformer_swin_nano")
    before = {n: p.clone() for n, p in model.named_parameters() if n.endswith("bias_table")}
    model.set_input_size(img_size=(48, 80), window_size=(6, 5))
    for name, table in before.items():
        expected = resize_rel_pos_bias_table(table, (6, 5), (11 * 9, table.shape[1]))
        torch.testing.assert_close(model.get_parameter(name), expected, rtol=0, atol=0)
    fresh = create("lipsformer_swin_nano", img_size=(48, 80), window_size=(6, 5))
    fresh.load_state_dict(model.state_dict())
    images = torch.randn(2, 3, 48, 80)
    torch.testing.assert_close(model.eval()(images), fresh.eval()(images), rtol=0, atol=0)


def test_a_checkpoint_of_another_window_is_resized_on_loading(tmp_path):
    source = create("lipsformer_swin_nano", window_size=4)
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    overlay = {"file": str(tmp_path / "weights.pth")}
    loaded = create(
        "lipsformer_swin_nano", window_size=6, pretrained=True, pretrained_cfg_overlay=overlay
    )
    source.set_input_size(window_size=6)
    for name, tensor in source.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_pretrained_weights_load_with_other_channels_and_classes(name, tmp_path):
    source = create(name)
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    overlay = {"file": str(tmp_path / "weights.pth")}
    loaded = create(
        name, in_chans=1, num_classes=5, pretrained=True, pretrained_cfg_overlay=overlay
    )
    stem = source.patch_embed.proj.weight.sum(1, keepdim=True)
    torch.testing.assert_close(loaded.patch_embed.proj.weight, stem)
    images = torch.randn(2, 1, 32, 32)
    torch.testing.assert_close(
        loaded.eval().forward_features(images),
        source.eval().forward_features(images.expand(-1, 3, -1, -1)),
        rtol=1e-4,
        atol=1e-5,
    )
    assert loaded(images).shape == (2, 5)


@pytest.mark.parametrize("name", NAMES)
def test_heads_are_views_of_the_same_features(name):
    model = create(name).eval()
    images = torch.randn(2, 3, 48, 32)
    with torch.no_grad():
        features = model.forward_features(images)
        logits = model(images)
        pooled = features.mean((1, 2))
        torch.testing.assert_close(model.get_classifier()(pooled), logits)
        model.reset_classifier(0)
        torch.testing.assert_close(model(images), pooled)
        model.reset_classifier(0, "")
        torch.testing.assert_close(model(images), features)
        model.reset_classifier(3, "max")
        expected = model.get_classifier()(features.amax((1, 2)))
        torch.testing.assert_close(model(images), expected)
        sigma = torch.linalg.svdvals(model.get_classifier().weight)[0]
        torch.testing.assert_close(sigma, torch.tensor(1.0))
    assert isinstance(create(name, num_classes=0).get_classifier(), nn.Identity)


@pytest.mark.parametrize("name", NAMES)
def test_features_only_returns_the_stages_outputs(name):
    images = torch.randn(2, 3, 48, 32)
    model = create(name).eval()
    backbone = create(name, features_only=True, out_indices=(1, 3)).eval()
    state = model.state_dict()
    backbone.load_state_dict(
        {n: state[n.replace("stages_", "stages.")] for n in backbone.state_dict()}
    )
    maps = []
    for stage in model.stages:
        stage.register_forward_hook(lambda _module, _args, output: maps.append(output))
    with torch.no_grad():
        model(images)
        # channels last, as timm's Swin
        torch.testing.assert_close(backbone(images), [maps[1], maps[3]])
        first, last = model.forward_intermediates(
            images, indices=[1, 3], norm=False, intermediates_only=True
        )
    torch.testing.assert_close(first, maps[1].permute(0, 3, 1, 2))
    torch.testing.assert_close(last, maps[3].permute(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"img_size": 30}, "img_size=30 is not a positive multiple of patch_size=4"),
        ({"img_size": 0}, "img_size=0 is not a positive multiple of patch_size=4"),
        ({"img_size": (224, -4)}, r"img_size=\(224, -4\) is not a positive multiple"),
        ({"patch_size": (4, 4)}, r"patch_size=\(4, 4\) must be one integer"),
        ({"patch_size": 0}, "patch_size=0 must be at least 1"),
        ({"in_chans": 0}, "in_chans=0 must be at least 1"),
        ({"mlp_ratio": 0.001}, "hidden_dim=0 must be at least 1"),
        ({"depths": (0,)}, r"sum\(depths\)=0 must be at least 1"),
        ({"depths": (-1, 2)}, r"depths=\(-1, 2\) must be at least 0 in every stage"),
        ({"weight_init": "jax"}, "weight_init must be '', 'unit_norm' or 'skip', got 'jax'"),
        ({"value_scale": 2.0, "official_compat": True}, "value_scale=2.0 has no effect"),
        ({"logit_scale": 0.0}, r"logit_scale=0.0 must be in \(0, 100\]"),
        ({"drop_path_rate": 1.3}, r"drop_path_rate=1.3 must be in \[0, 1\)"),
        ({"drop_path_rate": -0.1, "depths": (1,)}, r"drop_path_rate=-0.1 must be in \[0, 1\)"),
        ({"attn_drop_rate": 2.0}, r"attn_drop=2.0 must be in \[0, 1\]"),
        ({"attn_drop_rate": -0.1, "attn": "lipschitznorm"}, r"attn_drop=-0.1 must be in"),
    ],
)
@pytest.mark.parametrize("name", ["lipsformer_tiny", "lipsformer_swin_tiny"])
def test_impossible_arguments_are_named(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        create(name, device="meta", **kwargs)


@pytest.mark.parametrize("setting", ["depth", "in_chans"])
def test_a_vit_without_blocks_or_channels_is_refused(setting):
    with pytest.raises(ValueError, match=f"{setting}=0 must be at least 1"):
        create("lipsformer_vit_tiny", **{setting: 0})


@pytest.mark.parametrize("name", [*NAMES, "lipsformer_vit_tiny", "lipsformer_contractive_nano"])
def test_initialization_refuses_computed_weights_before_it_changes_anything(name):
    model = create(name)
    linear = next(m for m in model.modules() if isinstance(m, nn.Linear))
    parametrizations.weight_norm(linear)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    with pytest.raises(TypeError, match="is computed by a parametrization"):
        model.init_weights()
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        (
            "lipsformer_nano",
            {"num_heads": (3, 4, 8, 16)},
            "=3 .* multiple of 2 that divides dim=32",
        ),
        (
            "lipsformer_nano",
            {"num_heads": (0, 4, 8, 16)},
            "=0 .* multiple of 2 that divides dim=32",
        ),
        (
            "lipsformer_nano",
            {"num_heads": (1, 4, 8, 16)},
            "=1 .* multiple of 2 that divides dim=32",
        ),
        (
            "lipsformer_nano",
            {"num_heads": (2, 4, 8, 5)},
            "=5 .* multiple of 1 that divides dim=256",
        ),
        ("lipsformer_nano", {"num_heads": (2, 4, 8)}, "num_heads=.*, split_sizes=.* of one length"),
        ("lipsformer_nano", {"split_sizes": (1, 2)}, r"split_sizes=\(1, 2\) .* of one length"),
        ("lipsformer_nano", {"depths": (1,), "split_sizes": (1, 2)}, "must be of one length"),
        ("lipsformer_swin_nano", {"num_heads": (5, 4, 8, 16)}, "=5 .* positive divisor of dim=32"),
        ("lipsformer_swin_nano", {"num_heads": (0, 4, 8, 16)}, "num_heads=0 must be at least 1"),
        ("lipsformer_swin_nano", {"num_heads": (2, 4, 8)}, "num_heads=.* must be of one length"),
        ("lipsformer_swin_nano", {"depths": (1,), "num_heads": (2, 4)}, "must be of one length"),
    ],
)
def test_numbers_of_heads_that_do_not_fit_are_named(name, kwargs, message):
    with pytest.raises(ValueError, match=message):
        create(name, device="meta", **kwargs)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        (
            {"img_size": 30},
            r"img_size=30 is not a positive multiple of 8, which is patch_size \* 2 \*\*",
        ),
        ({"img_size": 0}, "img_size=0 is not a positive multiple of 8"),
        ({"patch_size": 0}, "patch_size=0 must be at least 1"),
        ({"dims": (0, 8, 8)}, r"dims=\(0, 8, 8\) must be positive multiples of 8"),
        ({"depths": (0, 0, 0)}, r"sum\(depths\)=0 must be at least 1"),
        ({"depths": (-1, 1, 1)}, r"depths=\(-1, 1, 1\) must be at least 0 in every stage"),
        ({"weight_init": "unit_norm"}, "weight_init must be '' or 'skip', got 'unit_norm'"),
        ({"eps": 0.0}, "eps=0.0 must be > 0 and finite"),
        ({"eps": -1.0, "attn_share": 0.0}, "eps=-1.0 must be > 0 and finite"),
        ({"eps": float("nan")}, "eps=nan must be > 0 and finite"),
        ({"head_dim": 0}, "head_dim=0 must be at least 1"),
        ({"head_dim": -3}, "head_dim=-3 must be at least 1"),
        ({"head_dim": 5}, "head_dim=5 makes 9 heads of the 48 channels .* a block of 192 attends"),
    ],
)
def test_arguments_that_a_contractive_model_does_not_take_are_named(kwargs, message):
    with pytest.raises(ValueError, match=message):
        create("lipsformer_contractive_nano", device="meta", **kwargs)


@pytest.mark.parametrize("name", ["lipsformer_tiny", "lipsformer_swin_tiny"])
def test_fewer_stages_than_a_variant_has_take_the_first_of_its_settings(name):
    model = create(name, device="meta", depths=(1, 1))
    assert len(model.stages) == len(model.num_heads) == 2
    heads = create(name, device="meta").num_heads
    assert model.num_heads == heads[:2]


def test_a_contractive_model_of_other_stages_returns_a_map_of_each():
    sizes = {"dims": (8, 16), "depths": (1, 1), "features_only": True}
    maps = create("lipsformer_contractive_nano", **sizes)(torch.randn(1, 3, 32, 32))
    assert [tuple(one.shape) for one in maps] == [(1, 16, 16, 8), (1, 8, 8, 16)]


def test_a_classifier_of_joined_tokens_is_not_pruned_away_from_their_joining():
    sizes = {"dims": (8, 16, 24), "depths": (1, 1, 1)}
    model = create("lipsformer_contractive_nano", **sizes)
    images = torch.randn(2, 3, 32, 32)
    before = model(images)
    message = "without JoinTokens the last stage has 24 channels, but the classifier takes 384"
    with pytest.raises(ValueError, match=message):
        model.prune_intermediate_layers(prune_norm=True, prune_head=False)
    assert torch.equal(model(images), before)
    model.prune_intermediate_layers(prune_norm=True)
    assert model(images).shape == (2, 4, 4, model.num_features)
    model.reset_classifier(5, "avg")
    assert model(images).shape == (2, 5)


def test_images_that_do_not_fit_the_patches_are_named():
    model = create("lipsformer_nano")
    with pytest.raises(ValueError, match="image size 32x33 is not a multiple of the patch size 2"):
        model(torch.randn(1, 3, 32, 33))


@pytest.mark.parametrize("name", [*NAMES, "lipsformer_contractive_nano"])
def test_an_image_without_the_axis_of_the_batch_is_named(name):
    message = r"images of shape \(3, 32, 32\) have 3 axes instead of 4: .* image.unsqueeze\(0\)"
    with pytest.raises(ValueError, match=message):
        create(name)(torch.randn(3, 32, 32))


def test_images_of_another_size_than_the_classifiers_are_named():
    """Also those with as many tokens, whose places would be other ones."""
    model = create("lipsformer_contractive_nano", dims=(8, 16, 24), depths=(1, 1, 1))
    with pytest.raises(ValueError, match=r"image size \(16, 64\) must be \(32, 32\): resize or"):
        model(torch.randn(2, 3, 16, 64))


def test_a_contractive_model_is_built_with_the_pooling_that_a_reset_gives():
    sizes = {"dims": (8, 16, 24), "depths": (1, 1, 1), "num_classes": 5}
    images = torch.randn(2, 3, 32, 32)
    for pool in ("max", "catavgmax", ""):
        built = create("lipsformer_contractive_nano", global_pool=pool, **sizes)
        reset = create("lipsformer_contractive_nano", **sizes)
        reset.reset_classifier(5, pool)
        reset.load_state_dict(built.state_dict())
        assert torch.equal(built(images), reset(images))
        assert built.head_hidden_size == reset.head_hidden_size
    with pytest.raises(AssertionError, match="Invalid pool type: token"):
        create("lipsformer_contractive_nano", global_pool="token", **sizes)


class Adapter(nn.Module):
    """As PEFT's LoRA: it passes arguments on and adds a product of two small matrices."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x, *args, **kwargs):
        return self.base(x, *args, **kwargs) + self.up(self.down(x))

    def merged(self):
        self.base.weight.data += self.up.weight @ self.down.weight
        return self.base


@pytest.mark.parametrize("name", ["lipsformer_swin_nano", "lipsformer_nano", "lipsformer_vit_tiny"])
def test_adapters_in_place_of_linear_layers_compute_what_they_merge_to(name, path):
    torch.manual_seed(0)
    model = timm.create_model(name, img_size=32, num_classes=5).eval()
    places = [
        (parent, key)
        for parent in model.modules()
        for key, child in parent.named_children()
        if isinstance(child, nn.Linear)
    ]
    assert any(key == "pointwise" for _, key in places) or name == "lipsformer_vit_tiny"
    for parent, key in places:
        setattr(parent, key, Adapter(getattr(parent, key)))
    x = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        adapted = model(x)
        for parent, key in places:
            setattr(parent, key, getattr(parent, key).merged())
        torch.testing.assert_close(adapted, model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", [*NAMES, "lipsformer_vit_tiny"])
def test_a_value_scale_that_a_user_learns_gets_its_gradient(name, path):
    model = create(name, img_size=32, num_classes=5).train()
    cores = [m for m in model.modules() if isinstance(m, ScaledCosineAttention)]
    exact = copy.deepcopy(model).double().eval()
    for core in (*cores, *(m for m in exact.modules() if isinstance(m, ScaledCosineAttention))):
        core.value_scale = nn.Parameter(core.value_scale.clone())
    x = torch.randn(2, 3, 32, 32)
    model(x).square().sum().backward()
    exact(x.double()).square().sum().backward()
    expected = [m.value_scale.grad for m in exact.modules() if isinstance(m, ScaledCosineAttention)]
    for core, gradient in zip(cores, expected, strict=True):
        torch.testing.assert_close(core.value_scale.grad.double(), gradient, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", [*NAMES, "lipsformer_vit_tiny"])
def test_an_ensemble_is_computed_at_once_by_vmap(name):
    models = [create(name, img_size=32, num_classes=5).eval() for _ in range(2)]
    nn.init.normal_(models[1].get_parameter("patch_embed.proj.weight"), std=0.1)
    parameters, buffers = torch.func.stack_module_state(models)
    x = torch.randn(2, 3, 32, 32)

    def one(parameters, buffers):
        return torch.func.functional_call(models[0], (parameters, buffers), (x,))

    with torch.no_grad():
        found = torch.vmap(one)(parameters, buffers)
        torch.testing.assert_close(found, torch.stack([m(x) for m in models]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_replicas_whose_parameters_are_plain_tensors_train(name):
    """As nn.DataParallel makes them."""
    model = create(name, img_size=32, num_classes=5).train()
    replicas = {module: module._replicate_for_data_parallel() for module in model.modules()}
    for module, replica in replicas.items():
        for key, child in module.named_children():
            setattr(replica, key, replicas[child])
        for key, parameter in module._parameters.items():
            if parameter is None:
                replica._parameters[key] = None
            else:
                setattr(replica, key, parameter.view_as(parameter))
    x = torch.randn(2, 3, 32, 32)
    replicas[model](x).square().sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model(x).square().sum().backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(found[key], parameter.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", [*NAMES, "lipsformer_vit_tiny"])
def test_a_batch_of_gradients_is_right_or_refused_in_one_sentence(name):
    model = create(name, img_size=32, num_classes=5)
    x = torch.randn(1, 3, 32, 32)

    def jacobian(vectorize):
        return torch.autograd.functional.jacobian(model, x, vectorize=vectorize)

    model.train()
    try:
        found = jacobian(vectorize=True)
    except RuntimeError as error:
        assert "call model.eval() before" in str(error)  # noqa: PT017
        found = None
    expected = jacobian(vectorize=False)
    model.eval()
    for value in (found, jacobian(vectorize=True)):
        if value is not None:
            torch.testing.assert_close(value, expected, rtol=1e-3, atol=1e-5)


class Plain(Linear):
    """A subclass that knows neither GELU nor scale."""

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


def test_a_subclass_of_the_linear_layer_with_its_own_forward_is_called_plainly():
    torch.manual_seed(0)
    mlp = Mlp(8, 16)
    plain = copy.deepcopy(mlp)
    plain.fc2 = Plain(16, 8)
    plain.fc2.load_state_dict(mlp.fc2.state_dict())
    x, scale = torch.randn(2, 3, 3, 8), torch.randn(8)
    torch.testing.assert_close(plain(x, scale), mlp(x, scale))
