"""timm's own per-model tests, run on every model registered here.

They come with timm's source distribution alone (see `timm_sdist.py`); `TIMM_TESTS` may name a
folder that holds them. Left out: the tests that need pretrained weights, which no model here has,
those about one particular model of timm or about models of one fixed image size, and by name
`test_model_forward_torchscript` and `test_model_forward_fx_torchscript`: PyTorch has deprecated
TorchScript.
"""

import importlib.util
import os
import subprocess
from pathlib import Path
from unittest import mock

import pytest
import timm

import lipsformer  # noqa: F401  (registers)
from tests.models.timm_sdist import sdist_folder

# timm's tests meet warnings of timm and PyTorch that are not ours to mend
pytestmark = pytest.mark.filterwarnings("ignore")

MODELS = timm.list_models("lipsformer*")
TAGS = timm.list_models("lipsformer*", include_tags=True)
# Models for one image size of their own. timm's general tests give them other sizes.
FIXED = ["lipsformer_contractive_nano"]
NANO = [name for name in MODELS if name.endswith("_nano") and name not in FIXED]

# selected in timm by marker or by list of modules
CONTRACT = [
    "test_model_forward",
    "test_model_backward",
    "test_model_forward_intermediates_features",
    "test_model_forward_intermediates",
    "test_model_forward_fx",
    "test_model_backward_fx",
]
# selected in timm by name of a model, for behavior that any model should have
GENERAL = [
    "test_prune_intermediate_layers_contract",
    "test_prune_intermediate_layers_params_used",
    "test_forward_after_prune_intermediate_layers",
    "test_reset_classifier_keeps_pool",
    "test_features_only_grad_checkpointing_backward",
]
GENERAL_WITH_KWARGS = [
    "test_head_hidden_size",
    "test_forward_intermediates_stop_early_final_norm",
    "test_model_init_weights_after_to_empty",
    "test_headless_checkpoint_reload",
    "test_relpos_non_square_checkpoint_reload",
    "test_relpos_non_square_set_input_size",
]


def load(file: str):
    if "TIMM_TESTS" in os.environ:
        folder = Path(os.environ["TIMM_TESTS"])
    else:
        try:
            folder = sdist_folder()
        except subprocess.SubprocessError as error:
            pytest.skip(f"timm {timm.__version__}'s source distribution cannot be had: {error}")
    spec = importlib.util.spec_from_file_location(f"timm_{file}", folder / f"{file}.py")
    module = importlib.util.module_from_spec(spec)
    with mock.patch.object(pytest.mark, "_config", None):  # timm's markers are unknown here
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def models_tests():
    return load("test_models")


@pytest.fixture(scope="module")
def input_tests():
    return load("test_model_input")


def is_plain(name):
    """Whether a model keeps tokens without a map, for which timm has tests of their own."""
    return name.startswith("lipsformer_vit") or name in FIXED


def slow_but_smallest(names):
    """The smallest model of every body is tested by default; the others have the same code."""
    smallest = (*NANO, *FIXED, "lipsformer_vit_tiny")
    return [
        name if name.partition(".")[0] in smallest else pytest.param(name, marks=pytest.mark.slow)
        for name in names
    ]


@pytest.mark.parametrize("name", slow_but_smallest(MODELS))
@pytest.mark.parametrize("check", CONTRACT)
def test_contract(models_tests, check, name):
    getattr(models_tests, check)(name, 2 if "backward" in check else 1)


# timm leaves out its plain transformers: they have no classic feature extraction
@pytest.mark.parametrize("name", slow_but_smallest(name for name in MODELS if not is_plain(name)))
def test_features(models_tests, name):
    models_tests.test_model_forward_features(name, 1)


@pytest.mark.parametrize(
    "tag", slow_but_smallest(tag for tag in TAGS if tag.partition(".")[0] not in FIXED)
)
def test_default_cfgs(models_tests, tag):
    suffix = "_non_std" if is_plain(tag) else ""
    getattr(models_tests, f"test_model_default_cfgs{suffix}")(tag, 1, "meta")


@pytest.mark.parametrize("name", slow_but_smallest(name for name in MODELS if name not in NANO))
def test_pruned_models_have_no_unused_parameters(models_tests, name):
    models_tests.test_prune_intermediate_layers_params_used(name)


@pytest.mark.parametrize("name", NANO)
@pytest.mark.parametrize("check", GENERAL)
def test_general(models_tests, check, name):
    getattr(models_tests, check)(name)


@pytest.mark.parametrize("name", NANO)
@pytest.mark.parametrize("check", GENERAL_WITH_KWARGS)
def test_general_with_kwargs(models_tests, check, name):
    getattr(models_tests, check)(name, {})


def test_swin_family_after_to_empty(models_tests):
    models_tests.test_swin_family_reinit_after_to_empty("lipsformer_swin_tiny", 224)


@pytest.mark.parametrize("pool", ["max", "", None])
@pytest.mark.parametrize("name", NANO)
def test_export_tracks_reset_classifier(input_tests, tmp_path, name, pool):
    input_tests.test_export_tracks_reset_classifier_structure(tmp_path, name, {}, pool, None)


@pytest.mark.parametrize("name", NANO)
def test_resized_model_survives_the_hub_format(input_tests, tmp_path, name):
    input_tests.test_default_resize_hub_roundtrip(tmp_path, name, {}, 32, 48)
