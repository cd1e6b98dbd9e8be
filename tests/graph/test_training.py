import json
import math
import os
import subprocess
from dataclasses import replace
from datetime import date
from importlib import metadata
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter
from torch_geometric.data import Data

from data.errors import DataError
from lipsformer._configfile import read_config
from lipsformer._errors import ConfigError
from lipsformer.engine.lock import FolderLock
from lipsformer.graph import create_model
from lipsformer.graph import training as training_module
from lipsformer.graph.config import (
    GraphConfig,
    GraphDataConfig,
    GraphSweepConfig,
    GraphTrainConfig,
)
from lipsformer.graph.training import Training, evaluate, fit
from scripts import _graph_seed, graph_sweep, train_graph

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = sorted((ROOT / "configs" / "graph").glob("*.yaml"))
SETTINGS = GraphTrainConfig(lr=0.01, epochs=12, patience=12, seeds=(0, 1))


@pytest.fixture(scope="module")
def graph():
    """Two noisy communities."""
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(40) % 2
    x = torch.randn(40, 5, generator=generator) + y[:, None]
    edges = torch.randint(40, (2, 160), generator=generator)
    part = torch.arange(40) % 4
    return Data(
        x=x,
        edge_index=edges[:, y[edges[0]] == y[edges[1]]],
        y=y,
        train_mask=part < 2,
        val_mask=part == 2,
        test_mask=part == 3,
    )


def build():
    return create_model("deep_gat", 5, 4, 2, 2, norm="lipschitznorm", min_att_norm=0.2)


def without_time(result):
    return {key: value for key, value in result.items() if key != "seconds"}


def test_fit_learns_and_reports_the_best_validation_epoch(graph, tmp_path):
    settings = replace(SETTINGS, epochs=60, patience=60)
    result = fit(build, [graph], [graph], settings, 0, folder=tmp_path)
    records = [json.loads(line) for line in (tmp_path / "seed0.jsonl").read_text().splitlines()]
    best = max(records, key=lambda r: (r["val_acc"], -r["val_loss"]))
    assert result["best_epoch"] == best["epoch"]
    assert result["test_acc"] == best["test_acc"]
    assert result["last_test_acc"] == records[-1]["test_acc"]
    assert result["highest_train_acc"] == max(r["train_acc"] for r in records)
    assert records[-1]["loss"] < 0.7 * records[0]["loss"]


@pytest.mark.parametrize("stop_on", ["either", "accuracy", "loss"])
def test_training_stops_patience_epochs_after_the_last_gain(graph, tmp_path, stop_on):
    settings = replace(SETTINGS, lr=0.05, epochs=400, patience=7, stop_on=stop_on)
    epochs = fit(build, [graph], [graph], settings, 0, folder=tmp_path)["epochs"]
    records = [json.loads(line) for line in (tmp_path / "seed0.jsonl").read_text().splitlines()]
    quantities = {
        "accuracy": [record["val_acc"] for record in records],
        "loss": [-record["val_loss"] for record in records],
    }
    watched = quantities if stop_on == "either" else {stop_on: quantities[stop_on]}
    first_of_the_best = max(values.index(max(values)) for values in watched.values())
    assert epochs == len(records) == first_of_the_best + 7 + 1 < 400


def test_layers_and_ends_have_their_own_weight_decay(graph):
    settings = replace(SETTINGS, weight_decay=0.3, layer_weight_decay=0.7)
    model = create_model("gcn2", 5, 3, 2, 4, dropout=0.0).double()
    data = graph.clone()
    data.x = data.x.double()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    training = Training(model, settings, "cpu")
    training.run_epoch([data], [data])
    # Adam's first step is lr * g / (|g| + eps), where g contains the decay
    for name, parameter in model.named_parameters():
        decay = 0.7 if name.startswith("layers.") else 0.3
        gradient = parameter.grad + decay * start[name]
        expected = start[name] - settings.lr * gradient / (gradient.abs() + 1e-8)
        torch.testing.assert_close(parameter.detach(), expected)


def test_a_gradient_above_the_limit_is_clipped_and_its_own_norm_is_recorded(graph):
    norms = []
    for limit in (None, 1e-3, 1e3):
        torch.manual_seed(0)
        training = Training(build(), replace(SETTINGS, clip_grad=limit), "cpu")
        training.run_epoch([graph], [graph])
        gradients = torch.cat([p.grad.flatten() for p in training.model.parameters()])
        norms.append((gradients.norm().item(), training.record["gradient_norm"]))
    free = norms[0][1]
    expected = [(free, free), (1e-3, free), (free, free)]
    assert free > 1e-2 and norms == [pytest.approx(pair, rel=1e-3) for pair in expected]


def test_the_rate_is_halved_when_the_validation_loss_does_not_fall(graph, monkeypatch):
    record = {"train_acc": 0.5, "val_acc": 0.5, "test_acc": 0.5, "val_loss": 1.0}
    monkeypatch.setattr(training_module, "evaluate", lambda *_: dict(record))
    training = Training(build(), replace(SETTINGS, lr=0.04, plateau_patience=1), "cpu")
    rates = []
    for _ in range(6):
        training.run_epoch([graph], [graph])
        rates.append(training.record["lr"])
    assert rates == [0.04, 0.04, 0.04, 0.02, 0.02, 0.01]


@pytest.mark.parametrize("what", ["gradient", "validation loss"])
def test_a_gradient_or_a_validation_loss_that_is_not_finite_ends_the_run(graph, monkeypatch, what):
    training = Training(build(), SETTINGS, "cpu")
    if what == "gradient":
        training.model.head.weight.register_hook(lambda gradient: gradient * math.inf)
    else:
        record = {"train_acc": 0.5, "val_acc": 0.5, "test_acc": 0.5, "val_loss": math.nan}
        monkeypatch.setattr(training_module, "evaluate", lambda *_: dict(record))
    training.run_epoch([graph], [graph])
    assert training.diverged and training.finished
    assert training.best.epoch == -1 and training.record == {}


def test_batches_without_training_nodes_change_no_record(graph):
    """The loss is the mean over the training nodes, and the last gradients stay to be read."""

    def plain():
        return create_model("deep_gat", 5, 4, 2, 2, dropout=0.0, attn_dropout=0.0)

    nodes = torch.arange(40)
    halves = [graph.subgraph(nodes < 25), graph.subgraph(nodes >= 25)]
    empty = graph.clone()
    empty.train_mask = torch.zeros_like(graph.train_mask)
    records = []
    for batches in (halves, [*halves, empty]):
        torch.manual_seed(0)
        training = Training(plain(), replace(SETTINGS, lr=1e-12, profile_every=1), "cpu")
        training.run_epoch(batches, [graph])
        records.append(training.record)
    assert records[0] == records[1]
    assert min(records[1]["profile"]["training_gradient_norm"]) > 0.0
    torch.manual_seed(0)
    model = plain()
    parts = [model(half.x, half.edge_index) for half in halves]
    mask = torch.cat([half.train_mask for half in halves])
    expected = torch.nn.functional.cross_entropy(torch.cat(parts)[mask], graph.y[mask])
    assert records[0]["loss"] == pytest.approx(expected.item(), rel=1e-5)


def test_a_training_without_training_nodes_has_not_diverged_but_ends_in_a_sentence(graph):
    nothing = graph.clone()
    nothing.train_mask = torch.zeros_like(graph.train_mask)
    for batches in ([nothing], []):
        with pytest.raises(ValueError, match="no training batch has a node to train on"):
            fit(build, batches, [graph], SETTINGS, 0)


def test_evaluate_counts_over_batches_as_over_the_whole(graph):
    model = build().eval()
    nodes = torch.arange(40)
    halves = [graph.subgraph(nodes < 20), graph.subgraph(nodes >= 20)]
    joined = torch.cat([model(h.x, h.edge_index) for h in halves])
    record = evaluate(model.train(), halves, "cpu")  # without dropout all the same
    mask = graph.val_mask
    hits = (joined.argmax(1) == graph.y)[mask].float().mean().item()
    loss = torch.nn.functional.cross_entropy(joined[mask], graph.y[mask]).item()
    assert record["val_acc"] == pytest.approx(hits)
    assert record["val_loss"] == pytest.approx(loss)


@pytest.mark.parametrize("plateau_patience", [None, 1])
def test_resumed_run_equals_the_uninterrupted_one(graph, tmp_path, plateau_patience):
    settings = replace(SETTINGS, plateau_patience=plateau_patience)
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    whole = fit(build, [graph], [graph], settings, 3, folder=tmp_path / "whole")

    def interrupt(record):
        if record["epoch"] == 8:
            raise KeyboardInterrupt

    cut = {"folder": tmp_path / "cut", "checkpoint_every": 5}
    with pytest.raises(KeyboardInterrupt):
        fit(build, [graph], [graph], settings, 3, on_epoch=interrupt, **cut)
    resumed = fit(build, [graph], [graph], settings, 3, **cut)
    assert without_time(resumed) == without_time(whole)
    log = "seed3.jsonl"
    assert (tmp_path / "cut" / log).read_text() == (tmp_path / "whole" / log).read_text()
    assert [path.name for path in (tmp_path / "cut").iterdir()] == [log]


def test_the_seconds_of_a_continued_run_are_those_of_all_its_processes(
    graph, tmp_path, monkeypatch
):
    """Every epoch takes ten seconds of a clock that starts anew in the second process."""
    clock = [1e6]
    monkeypatch.setattr(training_module.time, "perf_counter", lambda: clock[0])

    def ten_seconds_later(record):
        clock[0] += 10
        if record["epoch"] == stop_at:
            raise KeyboardInterrupt

    def train():
        fit(
            build,
            [graph],
            [graph],
            SETTINGS,
            0,
            folder=tmp_path,
            checkpoint_every=5,
            on_epoch=ten_seconds_later,
        )

    stop_at = 8
    with pytest.raises(KeyboardInterrupt):
        train()
    checkpoint = torch.load(tmp_path / "seed0.pt")
    assert checkpoint["epoch"] == 5 and checkpoint["seconds"] == 50
    stop_at, clock[0] = 11, 3.0
    with pytest.raises(KeyboardInterrupt):
        train()
    checkpoint = torch.load(tmp_path / "seed0.pt")
    assert checkpoint["epoch"] == 10 and checkpoint["seconds"] == 100

    stop_at, clock[0] = None, 7.0
    settings = {"folder": tmp_path, "checkpoint_every": 5, "on_epoch": ten_seconds_later}
    assert fit(build, [graph], [graph], SETTINGS, 0, **settings)["seconds"] == 120

    del checkpoint["seconds"]  # as earlier versions wrote it
    torch.save(checkpoint, tmp_path / "seed0.pt")
    assert fit(build, [graph], [graph], SETTINGS, 0, **settings)["seconds"] == 20


def test_a_checkpoint_holds_the_state_of_the_cuda_generator(tmp_path, monkeypatch):
    generators = {"cuda:1": torch.arange(16, dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda device: generators[device].clone())
    monkeypatch.setattr(
        torch.cuda, "set_rng_state", lambda state, device: generators.update({device: state})
    )
    path = tmp_path / "seed0.pt"
    Training(build(), SETTINGS, "cuda:1").save(path)
    generators["cuda:1"] = torch.zeros(16, dtype=torch.uint8)
    Training(build(), SETTINGS, "cpu").load(path)
    assert not generators["cuda:1"].any()
    Training(build(), SETTINGS, "cuda:1").load(path)
    assert generators["cuda:1"].tolist() == list(range(16))

    old = torch.load(path)
    del old["cuda_rng"]  # as earlier versions wrote it
    torch.save(old, path)
    generators["cuda:1"] = torch.ones(16, dtype=torch.uint8)
    Training(build(), SETTINGS, "cuda:1").load(path)
    assert generators["cuda:1"].all()


def test_a_loss_that_is_not_finite_ends_the_run_and_is_reported(graph):
    huge = graph.clone()
    huge.x = huge.x * 1e38
    result = fit(
        lambda: create_model("residual_gcn", 5, 4, 2, 8, weight_norm="none"),
        [huge],
        [huge],
        SETTINGS,
        0,
    )
    assert result["diverged"] and result["epochs"] == 1
    assert result["best_epoch"] == -1 and result["val_acc"] == result["test_acc"] == 0


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
        ("data={name: cora, split: 1, split_seed: 2}", "data.split=1 has no effect without data.s"),
        ("data={name: trees, split_seed: 2}", "data.split_seed=2 has no effect without a data.na"),
        ("data.split_seed=-1", "data.split_seed=-1 is not possible: must be >= 0 and below 2^63"),
        ("data={name: trees, loader: cluster}", "data.loader='cluster' has no effect without"),
        ("data={name: trees, missing_rate: 0.5}", "data.missing_rate=0.5 has no effect without"),
        ("data={name: trees, undirected: true}", "data.undirected=True has no effect without"),
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


def test_cells_are_the_product_of_cases_and_grid():
    config = GraphSweepConfig(
        config="x.yaml",
        cases={"a": "model.name=gcn", "b": "model.name=ggnn data.name=actor"},
        grid=("model.num_layers=2,5", "train.lr=0.1"),
        output_dir="out",
    )
    grid = graph_sweep.cells(config)
    assert [cell["model.num_layers"] for cell, _ in grid] == ["2", "5", "2", "5"]
    cell, settings = grid[3]
    assert cell == {"case": "b", "model.num_layers": "5", "train.lr": "0.1"}
    assert settings == ["model.name=ggnn", "data.name=actor", "model.num_layers=5", "train.lr=0.1"]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_sweep_runs_in_processes_and_only_what_is_missing(tmp_path, monkeypatch, capsys):
    (tmp_path / "run.yaml").write_text(
        json.dumps(
            {
                "model": {"name": "gcn", "hidden_channels": 4},
                "data": {"name": "trees", "tree_depth": 2, "num_trees": 30},
                "train": {"epochs": 2},
                "run": {"output_dir": "unused"},
            }
        )
    )
    path = tmp_path / "sweep.yaml"
    content = {"config": "run.yaml", "grid": ["model.num_layers=2,3"], "seeds": [0]}
    content |= {"output_dir": str(tmp_path / "out"), "x": "model.num_layers"}
    path.write_text(json.dumps(content))
    assert graph_sweep.main(["--config", str(path)]) == 0
    table = capsys.readouterr().out
    assert table.count("\n") == 4 and (tmp_path / "out" / "plot.png").stat().st_size > 0
    results = (tmp_path / "out" / "results.jsonl").read_text()
    assert len(results.splitlines()) == 2

    def no_more_training(*args):
        raise AssertionError("trained again")

    monkeypatch.setattr(graph_sweep, "_train", no_more_training)
    assert graph_sweep.main(["--config", str(path)]) == 0
    assert capsys.readouterr().out == table
    assert (tmp_path / "out" / "results.jsonl").read_text() == results
    assert graph_sweep.main(["--config", str(path), "--table", "seeds=[0,1]"]) == 0
    assert capsys.readouterr().out == f"{table}\nNot run:\n\n- 2: seeds 1\n- 3: seeds 1\n"


def test_a_sweep_continues_an_interrupted_run(tmp_path, monkeypatch):
    content = {
        "model": {"name": "deep_gat", "hidden_channels": 3},
        "data": {"name": "trees", "tree_depth": 2, "num_trees": 30},
        "train": {"epochs": 3},
        "run": {"output_dir": "unused", "checkpoint_every": 1},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(content))
    config = read_config(GraphConfig, tmp_path / "run.yaml")

    def train(folder, stop_at):
        epochs = []

        def run_epoch(self, *batches, original=Training.run_epoch):
            if self.epoch == stop_at:
                raise KeyboardInterrupt
            epochs.append(self.epoch)
            original(self, *batches)

        with monkeypatch.context() as patch:
            patch.setattr(Training, "run_epoch", run_epoch)
            return graph_sweep._train(config, 0, tmp_path / folder), epochs

    whole, _ = train("whole", stop_at=None)
    with pytest.raises(KeyboardInterrupt):
        train("cut", stop_at=2)
    continued, epochs = train("cut", stop_at=None)
    assert epochs == [2]
    assert without_time(continued) == without_time(whole)
    assert whole["environment"]["threads"] == 1


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


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_no_committed_result_is_of_another_config(path, monkeypatch):
    if "results:" in path.read_text():
        monkeypatch.chdir(ROOT)
        assert graph_sweep.sweep(path, [], progress=False, only=[], train=False)


def test_a_wrong_axis_raises():
    with pytest.raises(ConfigError, match=r"x='model.name' is not possible: must be a key of grid"):
        GraphSweepConfig(config="x", output_dir="y", grid=("a.b=1",), x="model.name")


@pytest.mark.parametrize(
    ("name", "settings"),  # without dropout of the features, whose random numbers would differ
    [
        ("gcn", {"dropout": 0.0}),
        ("gcn2", {"dropout": 0.0}),
        ("classic", {}),
        ("ggnn", {"dropout": 0.0}),
        ("deep_gat", {"norm": "lipschitznorm"}),
        ("deep_gat", {"linear_ends": False, "residual": True, "dropout": 0.0}),
        ("deep_graph_transformer", {}),
        ("residual_gcn", {"input_dropout": 0.0}),
        ("residual_gat", {"input_dropout": 0.0}),
        ("lips_gat", {"input_dropout": 0.0}),
        ("lips_graph_transformer", {"input_dropout": 0.0}),
    ],
)
def test_sparse_features_train_like_dense_ones(graph, name, settings):
    graph = graph.clone()
    graph.x = torch.nn.functional.one_hot(torch.arange(40) % 13, 13).float()
    records, layouts = {}, {}
    for kind, batches in (("sparse", [graph]), ("dense", (graph,))):  # only a list is prepared
        records[kind], layouts[kind] = [], set()

        def build_seen(seen=layouts[kind]):
            model = create_model(name, 13, 4, 2, 2, **settings)
            model.register_forward_pre_hook(lambda _, args: seen.add(args[0].layout))
            return model

        fit(build_seen, batches, batches, SETTINGS, 0, on_epoch=records[kind].append)
    assert layouts == {"sparse": {torch.sparse_csr}, "dense": {torch.strided}}
    for sparse, dense in zip(records["sparse"], records["dense"], strict=True):
        assert sparse == pytest.approx(dense, rel=1e-4)


def test_a_validation_loss_that_is_not_a_number_is_no_accuracy(graph):
    """After one step with such a rate all logits are NaN, whose largest one would be class 0."""
    settings = replace(SETTINGS, lr=1e30, epochs=1)
    result = fit(lambda: create_model("gcn", 5, 8, 4, 4), [graph], [graph], settings, 0)
    assert result["diverged"] and result["val_acc"] == 0.0


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
        ({"name": "trees", "root": "there"}, "a data.name other than trees"),
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
