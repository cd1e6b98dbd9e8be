"""Compilation by regions: which they are, what they share, and a step that never waits."""

import pytest
import timm
import torch

import lipsformer  # noqa: F401  (registers the models)
from benchmarks.gpu_predictions.host import HostReads, compiled_regions
from lipsformer._configfile import read_config
from lipsformer.config import Config
from lipsformer.engine.compilation import compiles, regions, try_kernels
from lipsformer.engine.distributed import make_accelerator, start
from lipsformer.engine.steps import train_step
from lipsformer.kernels import dispatch
from scripts._assemble import assemble


def test_regions_hold_every_parameter_once():
    names = ("lipsformer_swin_nano", "swin_tiny_patch4_window7_224", "vit_tiny_patch16_224")
    for name in (*names, "resnet10t"):
        with torch.device("meta"):
            model = timm.create_model(name)
        owned = [id(p) for region in regions(model) for p in region.parameters()]
        own = {id(p) for p in model.parameters(recurse=False)}  # used between regions
        assert len(owned) == len(set(owned))
        assert set(owned) | own == {id(p) for p in model.parameters()}


def test_compiled_on_a_gpu_unless_it_is_switched_off():
    assert [compiles(setting, torch.device("cuda")) for setting in (None, True, False)] == [
        *(True, True, False)
    ]
    assert [compiles(setting, torch.device("cpu")) for setting in (None, True, False)] == [
        *(False, True, False)
    ]


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at all inputs
def test_equal_blocks_share_a_graph_whatever_their_drop_path_rate():
    with torch.device("meta"):
        model = timm.create_model(
            "lipsformer_swin_nano",
            depths=(4,),
            num_heads=(2,),
            embed_dim=16,
            window_size=8,
            drop_path_rate=0.3,
        )
    found = compiled_regions(model, torch.empty(2, 3, 32, 32, device="meta"))
    # Stem, first block (never dropped), the others, norm and head; 8 tokens fill one window.
    assert found == {"graphs": 5, "breaks": {}}


def test_the_step_of_a_run_never_waits_for_the_host(tmp_path):
    settings = [
        *("train.global_batch_size=14", "train.batch_size_per_device=7", "train.epochs=1"),
        *("train.precision=bf16", "train.ema_decay=0.9", "optim.clip_grad=1.0", "data.img_size=32"),
        *("augment.mixup=0.8", "augment.cutmix=1.0", "augment.reprob=0.5", "data.num_workers=0"),
        *("lipschitz.monitor_every=null", f"run.output_dir={tmp_path}", "run.trackers=[]"),
        "model.name=lipsformer_swin_nano",
        "model.kwargs={depths: [2], num_heads: [2], embed_dim: 16, drop_path_rate: 0.2}",
    ]
    config = read_config(Config, "configs/demo.yaml", settings)
    parts = assemble(config, start(config), None)
    state = parts.state
    state.model.train()
    batches = iter(parts.train_batches.epoch(0))
    (first, count), (second, _) = next(batches), next(batches)
    train_step(state, first, count, 0, parts.transform)  # the first step creates the moments
    with HostReads() as reads:
        train_step(state, second, count, 1, parts.transform)
    assert dict(reads) == {}


def test_trying_kernels_runs_eagerly_and_changes_nothing(monkeypatch):
    torch.manual_seed(0)
    compiling = []
    model = torch.nn.Sequential(torch.nn.BatchNorm2d(3), torch.nn.Dropout(0.5)).train()
    model.register_forward_hook(lambda *_: compiling.append(torch.compiler.is_compiling()))
    model.compile(backend="eager")
    before = [buffer.clone() for buffer in model.buffers()]
    random = torch.get_rng_state()
    try_kernels(model, make_accelerator("bf16"), (7, 11), 2)
    assert compiling == []  # nothing to try
    model.arrangement = None  # the sign of attention that has a kernel
    with monkeypatch.context() as patch:
        patch.setattr(dispatch, "GPU_BLOCKS", False)
        try_kernels(model, make_accelerator("bf16"), (7, 11), 2)
    assert compiling == []
    try_kernels(model, make_accelerator("bf16"), (7, 11), 2)
    assert compiling == [False, False]
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(b, old) for b, old in zip(model.buffers(), before, strict=True))
