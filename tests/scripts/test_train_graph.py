"""Trainings of graph networks, as a command."""

import json
import math
import os
import subprocess
from datetime import date
from importlib import metadata
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from data.errors import DataError
from lipsformer._configfile import read_config
from lipsformer._errors import ConfigError
from lipsformer.engine.lock import FolderLock
from lipsformer.graph import create_model
from lipsformer.graph import training as training_module
from lipsformer.graph.config import GraphConfig, GraphDataConfig, GraphSweepConfig
from lipsformer.graph.training import Training
from scripts import _graph_seed, graph_sweep, train_graph
from tests.graph.communities import communities

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs" / "graph").glob("*.yaml"))


@pytest.fixture(scope="module")
def graph():
    return communities()


def write_config(folder, graph, monkeypatch, **train):
    monkeypatch.setattr(_graph_seed, "load_graph", lambda *args, **kwargs: graph.clone())
    train = {"lr": 0.01, "epochs": 4, "patience": 4, **train}
    content = {
        "model": {"name": "deep_gat", "hidden_channels": 4, "kwargs": {"heads": 2}},
        "data": {"name": "cora"},
        "train": train,
        "run": {"output_dir": str(folder / "out")},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(content))
    return path


def test_train_graph_adds_seeds_to_finished_ones(graph, tmp_path, monkeypatch, capsys):
    path = write_config(tmp_path, graph, monkeypatch)
    assert train_graph.main(["--config", str(path), "train.seeds=[0]"]) == 0
    first = (tmp_path / "out" / "results.jsonl").read_text()
    assert train_graph.main(["--config", str(path), "train.seeds=[0,1]"]) == 0
    text = (tmp_path / "out" / "results.jsonl").read_text()
    assert text.startswith(first)
    results = [json.loads(line) for line in text.splitlines()]
    accuracies = torch.tensor([100 * r["test_acc"] for r in results], dtype=torch.double)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["test_acc"] == pytest.approx(accuracies.mean().item(), abs=0.005)
    assert summary["test_acc_std"] == pytest.approx(accuracies.std().item(), abs=0.005)
    capsys.readouterr()
    assert train_graph.main(["--config", str(path), "train.lr=0.02"]) == 2
    assert "another config (train.lr 0.01 -> 0.02): set these back" in capsys.readouterr().err
    moved = [f"data.root={tmp_path}", "data.download=true"]  # the same graph from another place
    assert train_graph.main(["--config", str(path), "train.seeds=[0,1]", *moved]) == 0
    assert (tmp_path / "out" / "results.jsonl").read_text() == text


def test_a_result_says_where_it_was_trained(graph, tmp_path, monkeypatch):
    assert train_graph.main(["--config", str(write_config(tmp_path, graph, monkeypatch))]) == 0
    (line,) = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    own = json.loads(line)["environment"]
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    commit = own["commit"].removesuffix("-dirty")
    assert head.stdout.startswith(commit) and bool(commit) == bool(head.stdout)
    assert date.fromisoformat(own["date"]) and own["cpu"]
    assert own["threads"] == torch.get_num_threads() and own["torch"] == torch.__version__
    assert own["torch_geometric"] == metadata.version("torch_geometric")


def test_profiles_hold_the_gradients_of_the_epoch_and_are_plotted(graph, tmp_path, monkeypatch):
    path = write_config(tmp_path, graph, monkeypatch, profile_every=2, weight_decay=0.0)
    assert train_graph.main(["--config", str(path)]) == 0
    lines = (tmp_path / "out" / "seed0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert ["profile" in record for record in records] == [True, False, True, False]
    layers = records[2]["profile"]["training_gradient_norm"]
    # the encoder and the head have the rest of the gradient
    assert 0 < math.hypot(*layers) < records[2]["gradient_norm"]
    assert (tmp_path / "out" / "gradients-seed0.png").stat().st_size > 0


def test_a_run_that_diverges_in_its_first_epoch_has_a_summary_but_no_profile(
    graph, tmp_path, monkeypatch
):
    graph = graph.clone()
    graph.x = graph.x * 1e38
    path = write_config(tmp_path, graph, monkeypatch, profile_every=1)
    assert train_graph.main(["--config", str(path)]) == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["diverged"] == summary["seeds"] == 1
    assert not list((tmp_path / "out").glob("*.png"))


def test_tensorboard_shows_every_epoch_of_a_continued_run_once(graph, tmp_path, monkeypatch):
    path = write_config(tmp_path, graph, monkeypatch)
    command = ["--config", str(path), "run.tensorboard=true", "run.checkpoint_every=2"]
    curves = str(tmp_path / "out" / "tensorboard-seed0")

    def steps():
        return [event.step for event in EventAccumulator(curves).Reload().Scalars("loss")]

    def run_epoch(self, *batches, original=Training.run_epoch):
        if self.epoch == 3:
            raise KeyboardInterrupt
        original(self, *batches)

    def close(self, original=SummaryWriter.close):
        closed.append(self.log_dir)
        original(self)

    closed = []
    with monkeypatch.context() as patch:
        patch.setattr(Training, "run_epoch", run_epoch)
        patch.setattr(SummaryWriter, "close", close)
        with pytest.raises(KeyboardInterrupt):
            train_graph.main(command)
    assert closed == [curves] and steps() == [0, 1, 2]
    assert train_graph.main(command) == 0
    assert steps() == [0, 1, 2, 3]


def test_train_graph_does_not_write_into_the_folder_of_another_run(
    graph, tmp_path, monkeypatch, capsys
):
    command = ["--config", str(write_config(tmp_path, graph, monkeypatch))]
    lock = FolderLock(tmp_path / "out")
    lock.acquire()
    before = [path.name for path in (tmp_path / "out").iterdir()]
    assert train_graph.main(command) == 2
    assert f"{tmp_path / 'out'} is in use by process {os.getpid()} " in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == before
    lock.release()
    assert train_graph.main(command) == 0
    assert not (tmp_path / "out" / "lock.json").exists()


def test_a_log_without_its_package_is_refused_before_anything_is_written(
    graph, tmp_path, monkeypatch, capsys
):
    path = write_config(tmp_path, graph, monkeypatch)
    monkeypatch.setattr(_graph_seed, "find_spec", lambda name: None)
    assert train_graph.main(["--config", str(path), "run.tensorboard=true"]) == 2
    expected = "run.tensorboard=True is not possible: it needs pip install tensorboard\n"
    assert capsys.readouterr().err == f"error: {expected}"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("device", "count", "known"),
    [
        ("cuda", 0, "cpu"),
        ("gpu", 0, "cpu"),
        ("meta", 0, "cpu"),
        ("cuda:2", 2, "cpu, cuda, cuda:0, cuda:1"),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_anything_is_written(
    graph, tmp_path, monkeypatch, capsys, device, count, known
):
    path = write_config(tmp_path, graph, monkeypatch)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert train_graph.main(["--config", str(path), f"run.device={device}"]) == 2
    expected = f"error: run.device={device!r} is not possible: this machine has {known}\n"
    assert capsys.readouterr().err == expected
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", ["model", "data"])
def test_a_corrected_command_may_use_the_folder_that_the_wrong_one_named(
    graph, tmp_path, monkeypatch, capsys, wrong
):
    path = write_config(tmp_path, graph, monkeypatch)
    with monkeypatch.context() as patch:
        if wrong == "data":

            def missing(*args, **kwargs):
                raise DataError("cora is not there")

            patch.setattr(_graph_seed, "load_graph", missing)
        assert train_graph.main(["--config", str(path), f"{wrong}.name=nope"]) == 2
    assert not (tmp_path / "out").exists()
    assert train_graph.main(["--config", str(path)]) == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.name=gatt", "model 'gatt' is not known; choose one of gcn"),
        ("model.kwargs.head=2", "deep_gat has no argument 'head'; it takes heads"),
        ("train.patince=3", "did you mean train.patience?"),
        ("data.missing_rate=2", "data.missing_rate=2.0 is not possible: must be in [0, 1]"),
        ("train.seeds=[1,1]", "train.seeds=(1, 1) is not possible: each only once"),
        ("train.seeds=[-1]", "train.seeds=(-1,) is not possible: must be >= 0 and below 2^32"),
        ("train.seeds=[4294967296]", "is not possible: must be >= 0 and below 2^32"),
        ("data.missing_seed=9223372036854775808", "must be >= 0 and below 2^63"),
        ("data.num_trees=9", "data.num_trees=9 is not possible: must be >= 10"),
        (
            "data={name: trees, tree_depth: 40}",
            "data.tree_depth=40 is not possible: must be in 1..",
        ),
        ("model.kwargs.norm=null", "cannot be built: norm=None is not known; choose none, "),
        ("data={name: trees, split: 1}", "data.split=1 has no effect without a data.name other"),
        ("data.split_seed=-1", "data.split_seed=-1 is not possible: must be >= 0 and below 2^63"),
    ],
)
def test_mistakes_end_in_one_line_and_code_two(
    graph, tmp_path, monkeypatch, capsys, override, message
):
    path = write_config(tmp_path, graph, monkeypatch)
    assert train_graph.main(["--config", str(path), override]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_an_empty_split_is_refused_before_anything_is_written(
    graph, tmp_path, monkeypatch, capsys, split
):
    without = graph.clone()
    without[f"{split}_mask"] = torch.zeros(40, dtype=torch.bool)
    path = write_config(tmp_path, without, monkeypatch)
    assert train_graph.main(["--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"the {split} split of cora is empty with data.split=0 and" in error
    assert error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_partition_training_covers_every_node_once(graph, tmp_path, monkeypatch):
    path = write_config(tmp_path, graph, monkeypatch)
    overrides = ["data.loader=partition", "data.num_parts=3"]
    config = read_config(GraphConfig, path, overrides)
    data = _graph_seed.load_batches(config)
    parts = list(data.train)
    assert len(parts) == 3
    rows = torch.cat([part.x for part in parts])
    torch.testing.assert_close(rows.sort(dim=0).values, graph.x.sort(dim=0).values)
    assert math.isfinite(_graph_seed.train_seed(config, data, 0)["last_loss"])


def test_trees_are_trained_on_their_training_share_only(tmp_path):
    config = read_config(GraphConfig, ROOT / "configs/graph/trees.yaml", ["data.num_trees=50"])
    train, evaluation, features, classes = _graph_seed.load_batches(config)
    masks = [batch.train_mask.sum().item() for batch in train]
    assert sum(masks) == 40 and features == 2 * (classes + 1)
    roots = [(batch.y >= 0).sum().item() for batch in evaluation]
    assert sum(roots) == 50


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", None])
def test_a_damaged_checkpoint_ends_in_one_sentence(graph, tmp_path, monkeypatch, capsys, content):
    path = write_config(tmp_path, graph, monkeypatch)
    checkpoint = tmp_path / "out" / "seed0.pt"
    checkpoint.parent.mkdir()
    if content is None:
        torch.save([1, 2], checkpoint)
    else:
        checkpoint.write_bytes(content)
    assert train_graph.main(["--config", str(path)]) == 2
    error = capsys.readouterr().err
    assert f"{checkpoint} is damaged" in error and error.count("\n") == 1
    checkpoint.unlink()
    (tmp_path / "out" / "results.jsonl").write_text("{}\n")
    assert train_graph.main(["--config", str(path)]) == 2
    assert "has the line {}, which is no result without" in capsys.readouterr().err


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_loads_and_its_models_can_be_built(path):
    if "model:" in path.read_text():
        jobs = [read_config(GraphConfig, path)]
    else:
        sweep = read_config(GraphSweepConfig, path)
        base = path.parent / sweep.config
        jobs = [
            read_config(GraphConfig, base, settings) for _, settings in graph_sweep.cells(sweep)
        ]
    for model in {repr(job.model): job.model for job in jobs}.values():
        num_layers = min(model.num_layers, 3)
        create_model(model.name, 5, model.hidden_channels, 3, num_layers, **model.kwargs)


def test_the_config_of_the_gradient_norms_builds_the_described_network():
    """docs/graph.md: a 25-layer GAT, whose first map has 8 channels, for 50 epochs."""
    config = read_config(GraphConfig, ROOT / "configs/graph/gradients_25.yaml")
    model = create_model(config.model.name, 5, 8, 3, config.model.num_layers, **config.model.kwargs)
    assert (model.encoder.out_features, len(model.layers), config.train.epochs) == (8, 25, 50)


def test_results_of_a_sweep_are_not_those_of_a_run(graph, tmp_path, monkeypatch, capsys):
    path = write_config(tmp_path, graph, monkeypatch)
    assert train_graph.main(["--config", str(path)]) == 0
    (tmp_path / "out" / "config.yaml").unlink()
    summary = (tmp_path / "out" / "summary.json").read_bytes()
    assert train_graph.main(["--config", str(path)]) == 2
    assert "holds results without a config.yaml" in capsys.readouterr().err
    assert (tmp_path / "out" / "summary.json").read_bytes() == summary


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({"batch_size": 7}, "data.loader=neighbor or data.name=trees"),
        ({"num_neighbors": (5,)}, "data.loader=neighbor"),
        ({"num_parts": 3, "loader": "neighbor"}, "data.loader=cluster or partition"),
        ({"parts_per_step": 2}, "data.loader=cluster or partition"),
        ({"halo_hops": 2}, "data.loader=cluster or partition"),
        ({"missing_seed": 2}, "data.missing_rate above 0"),
        ({"tree_depth": 4}, "data.name=trees"),
        ({"split": 1, "split_seed": 2}, "data.split_seed=null"),
        ({"name": "trees", "root": "there"}, "a data.name other than trees"),
        ({"name": "trees", "split_seed": 2}, "a data.name other than trees"),
        ({"name": "trees", "loader": "cluster"}, "a data.name other than trees"),
        ({"name": "trees", "missing_rate": 0.5}, "a data.name other than trees"),
        ({"name": "trees", "undirected": True}, "a data.name other than trees"),
    ],
)
def test_settings_without_effect_are_refused(settings, needs):
    with pytest.raises(ConfigError, match=f"has no effect without {needs}: remove it"):
        GraphDataConfig(**{"name": "cora", **settings})


def test_a_full_disk_at_the_start_loses_no_record(tmp_path, monkeypatch):
    log = tmp_path / "seed0.jsonl"
    log.write_text("".join(f'{{"epoch": {epoch}}}\n' for epoch in range(7)))
    before = log.read_text()

    def full(self, text, **options):
        self.open("w").close()
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(OSError, match="No space"):
            training_module._drop_records(log, 5)
    assert log.read_text() == before
    training_module._drop_records(log, 5)
    assert [json.loads(line)["epoch"] for line in log.read_text().splitlines()] == [0, 1, 2, 3, 4]
