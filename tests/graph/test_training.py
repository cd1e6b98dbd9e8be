"""Training of graph networks, epoch by epoch."""

import json
import math
from dataclasses import replace

import pytest
import torch

from lipsformer.graph import create_model
from lipsformer.graph import training as training_module
from lipsformer.graph.config import (
    GraphTrainConfig,
)
from lipsformer.graph.training import Training, evaluate, fit
from tests.graph.communities import build, communities, without_time

SETTINGS = GraphTrainConfig(lr=0.01, epochs=12, patience=12, seeds=(0, 1))


@pytest.fixture(scope="module")
def graph():
    return communities()


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
