"""Clusters of a graph, their steps, and two processes that train on them like one."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch_geometric.data import Data
from torch_geometric.utils import subgraph

from data import DataError
from data.clusters import ClusterBatches, metis_clusters
from lipsformer._configfile import read_config
from lipsformer._ranks import on_first_rank, rank_and_count
from lipsformer.graph import create_model
from lipsformer.graph.config import GraphConfig, GraphTrainConfig
from lipsformer.graph.training import Training, fit
from scripts import _graph_seed, train_graph
from tests.launch import CONTEXT

ROOT = Path(__file__).resolve().parents[2]
NODES, PARTS, PER_STEP, FEATURES, LAYERS = 101, 7, 3, 5, 2
MODELS = {
    "deep_gat": {"norm": "lipschitznorm+layernorm", "heads": 2, "attn_dropout": 0.0},
    "gcn": {},  # needs the hop more, for the degrees
}


def communities() -> Data:
    """A noisy ring: most edges join near nodes."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(NODES, (613,), generator=generator)
    source = (target + torch.randint(-5, 6, (613,), generator=generator)) % NODES
    far = torch.rand(613, generator=generator) < 0.1
    source[far] = torch.randint(NODES, (613,), generator=generator)[far]
    part = torch.randperm(NODES, generator=generator) % 3
    x = torch.randn(NODES, FEATURES, dtype=torch.double, generator=generator)
    masks = {f"{name}_mask": part == i for i, name in enumerate(("train", "val", "test"))}
    edge_index = torch.stack([source, target])
    return Data(x=x, edge_index=edge_index, y=torch.arange(NODES) * 3 // NODES, **masks)


def cut(edge_index: torch.Tensor, clusters: torch.Tensor) -> int:
    source, target = clusters[edge_index]
    return int((source != target).sum())


def test_metis_clusters_are_balanced_repeatable_and_cut_few_edges():
    pytest.importorskip("pymetis")
    edge_index = communities().edge_index
    clusters = metis_clusters(edge_index, NODES, PARTS)
    sizes = clusters.bincount(minlength=PARTS)
    assert sizes.sum() == NODES and sizes.min() >= 10 and sizes.max() <= 19
    assert clusters.equal(metis_clusters(edge_index, NODES, PARTS))
    generator = torch.Generator().manual_seed(1)
    random = torch.randperm(NODES, generator=generator) % PARTS
    assert cut(edge_index, clusters) < 0.5 * cut(edge_index, random)


def test_mistakes_about_clusters_are_one_sentence(monkeypatch):
    edge_index = communities().edge_index
    pytest.importorskip("pymetis")
    with pytest.raises(DataError, match=r"num_parts=103 is more than the 101 nodes"):
        metis_clusters(edge_index, NODES, 103)
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(DataError, match=r"needs pymetis: pip install 'lipsformer\[clusters\]'"):
        metis_clusters(edge_index, NODES, PARTS)


@pytest.mark.parametrize("drawn", [False, True])
def test_a_step_holds_all_edges_among_its_clusters_and_an_epoch_all_nodes(drawn):
    data = communities()
    data.x[:, 0] = torch.arange(NODES)  # says which node a row is
    clusters = None if drawn else torch.arange(NODES) * 5 % PARTS
    torch.manual_seed(0)
    batches = ClusterBatches(data, PARTS, parts_per_step=PER_STEP, clusters=clusters)
    epochs = [[batch.x[:, 0].long() for batch in batches] for _ in range(2)]
    for steps in epochs:
        assert len(steps) == 3 and torch.cat(steps).sort().values.equal(torch.arange(NODES))
    assert any(set(a.tolist()) != set(b.tolist()) for a, b in zip(*epochs, strict=True))
    for batch in batches:
        nodes = batch.x[:, 0].long()
        expected, _ = subgraph(nodes, data.edge_index)
        found = nodes[batch.edge_index]
        assert sorted(found.T.tolist()) == sorted(expected.T.tolist())
        assert batch.y.equal(data.y[nodes]) and batch.train_mask.equal(data.train_mask[nodes])
        assert batch.num_train == data.train_mask[nodes].sum()


SETTINGS = GraphTrainConfig(lr=0.01, epochs=4, clip_grad=0.5, plateau_patience=1)


def train(name: str, folder: Path, dropout: float, stop: int | None = None) -> None:
    """Train on the ranks that there are, and write the weights and the outcome of each."""
    rank, num_ranks = rank_and_count()
    data, kept = communities(), []
    batches = ClusterBatches(
        data,
        PARTS,
        parts_per_step=PER_STEP,
        clusters=torch.arange(NODES) * PARTS // NODES,
        halo_hops=LAYERS + 1,
        rank=rank,
        num_ranks=num_ranks,
        draw_seed=lambda: on_first_rank(lambda: int(torch.randint(2**62, ()))),
    )

    def build():
        kwargs = MODELS[name] | {"dropout": dropout}
        kept.append(create_model(name, FEATURES, 4, 3, LAYERS, **kwargs))
        return kept[0].double()

    def on_epoch(record):
        if record["epoch"] == stop:
            raise KeyboardInterrupt

    options = {"folder": folder, "checkpoint_every": 2, "on_epoch": on_epoch}
    result = fit(build, batches, [data], SETTINGS, 3, **options)
    del result["seconds"]
    torch.save({"weights": kept[0].state_dict(), "result": result}, folder / f"outcome.{rank}")


def _process(rank: int, root: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{root}/store", rank=rank, world_size=2)
    for name in MODELS:
        train(name, root / name, 0.0)
    train("deep_gat", root / "whole", 0.5)
    with contextlib.suppress(KeyboardInterrupt):
        train("deep_gat", root / "cut", 0.5, stop=2)
    dist.barrier()
    train("deep_gat", root / "cut", 0.5)
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Path:
    """The folders of all runs on two processes, which start only once."""
    root = tmp_path_factory.mktemp("two")
    for name in (*MODELS, "whole", "cut"):
        (root / name).mkdir()
    ranks = [CONTEXT.Process(target=_process, args=(rank, root)) for rank in (0, 1)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    return root


def outcomes(folder: Path) -> list[dict]:
    return [torch.load(path) for path in sorted(folder.glob("outcome.*"))]


def records(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "seed3.jsonl").read_text().splitlines()]


@pytest.mark.dist
@pytest.mark.parametrize("name", MODELS)
def test_two_processes_train_like_one(two, tmp_path, name):
    train(name, tmp_path, 0.0)
    (one,) = outcomes(tmp_path)
    first, second = outcomes(two / name)
    for key, weight in one["weights"].items():
        torch.testing.assert_close(first["weights"][key], weight, rtol=1e-7, atol=1e-9)
        assert first["weights"][key].equal(second["weights"][key])
    assert first["result"] == second["result"] == pytest.approx(one["result"], rel=1e-7)
    for mine, theirs in zip(records(tmp_path), records(two / name), strict=True):
        assert theirs == pytest.approx(mine, rel=1e-7)


def write_config(folder: Path, **data) -> list[str]:
    content = {
        "model": {"name": "deep_gat", "hidden_channels": 4, "kwargs": {"heads": 2}},
        "data": {"name": "cora", **data},
        "train": {"epochs": 2, "seeds": [0, 1]},
        "run": {"output_dir": str(folder / "out")},
    }
    path = folder / "run.yaml"
    path.write_text(json.dumps(content))
    return ["--config", str(path)]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.parts_per_step=0", "data.parts_per_step=0 is not possible: must be >= 1"),
        ("data.halo_hops=-1", "data.halo_hops=-1 is not possible: must be >= 0, or null"),
        ("data.num_parts=103", "data.num_parts=103 is more than the 101 nodes"),
    ],
)
def test_mistakes_in_a_config_end_in_one_line(tmp_path, monkeypatch, capsys, override, message):
    pytest.importorskip("pymetis")
    monkeypatch.setattr(_graph_seed, "load_graph", lambda *args, **kwargs: communities())
    assert train_graph.main([*write_config(tmp_path, loader="cluster"), override]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_without_pyg_lib_sampled_neighborhoods_end_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(_graph_seed, "load_graph", lambda *args, **kwargs: communities())
    monkeypatch.setattr(_graph_seed, "find_spec", lambda name: None)
    assert train_graph.main(write_config(tmp_path, loader="neighbor")) == 2
    error = capsys.readouterr().err
    assert "data.loader=neighbor needs pyg-lib" in error and error.count("\n") == 1


def test_sampled_neighborhoods_train(tmp_path, monkeypatch):
    pytest.importorskip("pyg_lib", reason="NeighborLoader samples with pyg-lib")
    data = communities()
    data.x = data.x.float()
    monkeypatch.setattr(_graph_seed, "load_graph", lambda *args, **kwargs: data.clone())
    arguments = write_config(tmp_path, loader="neighbor", batch_size=11)
    config = read_config(GraphConfig, arguments[1])
    steps = list(_graph_seed.load_batches(config).train)
    assert sum(int(batch.train_mask.sum()) for batch in steps) == data.train_mask.sum()
    assert train_graph.main(arguments) == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.dist
@pytest.mark.data
@pytest.mark.parametrize("loader", ["cluster", "full"])
def test_train_graph_on_two_processes(datasets, tmp_path, loader):
    """Only process 0 writes, and a loader that cannot be shared ends in one line."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["-m", "scripts.train_graph", *write_config(tmp_path, loader=loader)]
    command += [f"data.root={datasets}", "data.num_parts=13", "data.parts_per_step=5"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for _ in range(2):  # the second command finds all seeds finished
        found = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
        )
        if loader == "full":
            assert found.returncode != 0
            assert "error: data.loader='full' is not possible: several processes" in found.stderr
            return
        assert found.returncode == 0, found.stderr
        assert found.stdout.count('"seeds": 2') == 1
    lines = (tmp_path / "out" / "results.jsonl").read_text().splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [0, 1]


@pytest.mark.dist
def test_two_processes_continue_exactly_with_dropout(two):
    whole, cut = outcomes(two / "whole"), outcomes(two / "cut")
    for a, b in zip(whole, cut, strict=True):
        assert a["result"] == b["result"]
        assert all(a["weights"][key].equal(b["weights"][key]) for key in a["weights"])
    assert records(two / "whole") == records(two / "cut")


def test_a_checkpoint_of_two_processes_is_not_continued_by_one(tmp_path):
    path = tmp_path / "seed3.pt"
    torch.save({"rng": torch.stack([torch.get_rng_state()] * 2)}, path)
    training = Training(create_model("gcn", 5, 4, 3, 2), SETTINGS, "cpu")
    with pytest.raises(ValueError, match=r"was written by 2 processes, not 1: continue with 2"):
        training.load(path)
