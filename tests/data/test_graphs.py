import gzip
import math
import sys
from urllib.error import URLError

import pytest
import torch
from torch_geometric.data import Batch
from torch_geometric.datasets import Planetoid

from data import graphs
from data.errors import DataError
from data.generated_graphs import generated_arxiv
from data.graphs import (
    TreeBatches,
    TreeNeighborsMatch,
    load_graph,
    missing_nodes,
    random_split,
)

COUNTS = {  # nodes, edges, features, classes
    "cora": (2708, 10556, 1433, 7),
    "citeseer": (3327, 9104, 3703, 6),
    "pubmed-partial": (19717, 88648, 500, 3),
    "chameleon": (2277, 36101, 2325, 5),
    "squirrel": (5201, 217073, 2089, 5),
    "actor": (7600, 30019, 932, 5),
}


@pytest.mark.data
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", COUNTS)
def test_real_graphs_have_their_published_sizes(datasets, name):
    data = load_graph(name, datasets / "graphs", normalize_features=False)
    counts = (data.num_nodes, data.num_edges, data.num_features, int(data.y.max()) + 1)
    assert counts == COUNTS[name]
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask])
    assert masks.dim() == 2 and not (masks.sum(0) > 1).any()


@pytest.mark.data
def test_planetoid_split_is_the_public_one_and_rows_are_normalized(datasets):
    data = load_graph("cora", datasets / "graphs")
    sizes = [int(data[f"{split}_mask"].sum()) for split in ("train", "val", "test")]
    assert sizes == [140, 500, 1000]
    assert data.y[data.train_mask].bincount().tolist() == [20] * 7
    torch.testing.assert_close(data.x.sum(1), torch.ones(2708))


@pytest.mark.data
def test_missing_features_spare_the_training_nodes_and_follow_the_seed(datasets):
    data = load_graph("cora", datasets / "graphs", missing_rate=1.0)
    assert (data.x.any(dim=1) == data.train_mask).all()
    half = [
        load_graph("cora", datasets / "graphs", missing_rate=0.5, missing_seed=seed).x
        for seed in (0, 0, 1)
    ]
    torch.testing.assert_close(half[0], half[1])
    assert not torch.equal(half[0], half[2])
    assert (~half[0].any(dim=1)).sum() == round(0.5 * (2708 - 140))


def loop_split(y, seed):
    """tunedGNN's draw as a loop: PyTorch's global generator, one class after the other."""
    torch.manual_seed(seed)
    training, others = set(), []
    for label in sorted(set(y.tolist())):
        own = [node for node in range(len(y)) if y[node] == label]
        order = [own[place] for place in torch.randperm(len(own)).tolist()]
        training.update(order[:20])
        others += order[20:]
    others = [others[place] for place in torch.randperm(len(others)).tolist()]
    return training, set(others[:500]), set(others[500:1500])


def test_a_random_split_is_the_draw_of_tuned_gnn():
    y = torch.arange(1709) ** 2 % 7 + 3  # four classes, the smallest with 245 nodes
    masks = random_split(y, seed=123)
    found = [set(mask.nonzero().flatten().tolist()) for mask in masks.values()]
    assert list(masks) == ["train_mask", "val_mask", "test_mask"]
    assert found == list(loop_split(y, 123)) != list(loop_split(y, 124))
    assert y[masks["train_mask"]].unique(return_counts=True)[1].tolist() == [20] * 4


@pytest.mark.data
def test_a_seed_replaces_the_public_split(datasets):
    public = load_graph("cora", datasets / "graphs")
    drawn = load_graph("cora", datasets / "graphs", split_seed=123)
    parts = ("train_mask", "val_mask", "test_mask")
    found = [set(drawn[part].nonzero().flatten().tolist()) for part in parts]
    assert found == list(loop_split(public.y, 123))
    assert not torch.equal(drawn.train_mask, public.train_mask)


def test_missing_nodes_draws_the_stated_share():
    train = torch.arange(13) < 4
    missing = missing_nodes(train, 1 / 3, seed=0)
    assert missing.sum() == 3 and not (missing & train).any()


def test_absent_unknown_and_broken_graphs_raise_one_clear_error(tmp_path, monkeypatch):
    with pytest.raises(DataError, match=r"cora is not in .*Cora/raw; set data.download=true"):
        load_graph("cora", tmp_path)
    with pytest.raises(DataError, match=r"data.name='coro' is not known; choose trees, cora"):
        load_graph("coro", tmp_path)

    def broken():
        graph = TreeNeighborsMatch(2, 10)[0]
        graph.x[1, 0] = math.nan
        return graph

    monkeypatch.setitem(graphs._GENERATED, "broken", broken)
    with pytest.raises(DataError, match="broken: the features of 1 nodes are not finite, first 1"):
        load_graph("broken", tmp_path)


def test_nothing_is_downloaded_unless_that_is_allowed(tmp_path, monkeypatch):
    def download(self):
        downloads.append(self.raw_dir)
        raise URLError("no route to host")

    downloads = []
    monkeypatch.setattr(Planetoid, "download", download)
    raw = tmp_path / "Cora" / "raw"
    raw.mkdir(parents=True)
    (raw / "ind.cora.x").touch()
    with pytest.raises(DataError, match=r"Cora/raw is incomplete .*; set data.download=true"):
        load_graph("cora", tmp_path)
    assert not downloads
    with pytest.raises(DataError, match=r"data.download=true: cora cannot be .* no route to host"):
        load_graph("cora", tmp_path, download=True)
    assert downloads == [str(raw)]


def test_a_damaged_file_is_named(tmp_path):
    raw = tmp_path / "Cora" / "raw"
    raw.mkdir(parents=True)
    for part in ("x", "tx", "allx", "y", "ty", "ally", "graph", "test.index"):
        (raw / f"ind.cora.{part}").touch()
    with pytest.raises(DataError, match=r"cora in .*Cora/raw is incomplete or damaged: "):
        load_graph("cora", tmp_path)


def test_ogb_never_asks_on_the_terminal_whether_to_download(tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(question))
    (tmp_path / "ogbn_arxiv" / "raw").mkdir(parents=True)
    with pytest.raises(DataError, match=r"ogbn-arxiv is not in .*; set data.download=true"):
        load_graph("ogbn-arxiv", tmp_path)


def test_without_ogb_its_graph_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    with pytest.raises(DataError, match=r"ogbn-arxiv cannot be read: .*ogb.*; pip install"):
        load_graph("ogbn-arxiv", tmp_path, download=True)


@pytest.mark.data
def test_a_split_that_is_not_there_raises(datasets):
    with pytest.raises(DataError, match=r"data.split=10 is not possible: texas has 10 splits"):
        load_graph("texas", datasets / "graphs", split=10)


@pytest.mark.parametrize("depth", [2, 3, 8])
def test_trees_ask_for_the_value_of_the_leaf_with_the_root_key(depth):
    trees = TreeNeighborsMatch(depth, 30, seed=1)
    leaves = 2**depth
    seen = set()
    for index in range(len(trees)):
        tree = trees[index]
        keys, values = tree.x.split(leaves + 1, dim=1)
        leaf_keys, leaf_values = keys[-leaves:].argmax(1), values[-leaves:].argmax(1)
        assert sorted(leaf_values.tolist()) == list(range(leaves))
        match = (leaf_keys == keys[0].argmax()).nonzero().item()
        assert tree.y[0] == leaf_values[match]
        masks = torch.stack([tree[f"{split}_mask"] for split in ("train", "val", "test")])
        assert masks[:, 0].sum() == 1 and not masks[:, 1:].any()
        seen.add(int(masks[:, 0].long().argmax()))
    assert seen == {0, 1, 2}
    # every leaf reaches the root in exactly `depth` steps along the edges
    adjacency = torch.zeros(2 * leaves - 1, 2 * leaves - 1)
    adjacency[trees.edge_index[1], trees.edge_index[0]] = 1
    reach = torch.linalg.matrix_power(adjacency, depth)[0]
    assert reach[-leaves:].tolist() == [1] * leaves and reach[:-leaves].sum() == 0


def test_trees_are_the_same_for_the_same_seed():
    first, same, other = (TreeNeighborsMatch(3, 20, seed).values for seed in (0, 0, 1))
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_batch_of_trees_equals_pygs_batch_of_single_ones():
    trees = TreeNeighborsMatch(3, 40)
    order = torch.tensor([31, 2, 36, 11, 38])  # training, validation and test trees
    ours, pyg = trees.batch(order), Batch.from_data_list([trees[i] for i in order.tolist()])
    for key in ("x", "edge_index", "y", "train_mask", "val_mask", "test_mask"):
        assert torch.equal(ours[key], pyg[key]), key


def test_tree_batches_cover_the_first_trees_once_in_a_new_order_each_time():
    trees = TreeNeighborsMatch(2, 23)
    torch.manual_seed(0)
    batches = TreeBatches(trees, 17, 5, shuffle=True)
    orders = [torch.cat([batch.y[batch.y >= 0] for batch in batches]) for _ in range(2)]
    labels = trees.values.gather(1, trees.keys[:, None])[:17, 0]
    assert not torch.equal(*orders)
    assert all(torch.equal(order.sort()[0], labels.sort()[0]) for order in orders)


def write_csv(path, tensor):
    rows = tensor if tensor.dim() == 2 else tensor[:, None]
    text = "".join(",".join(map(str, row)) + "\n" for row in rows.tolist())
    with gzip.open(path, "wt") as file:
        file.write(text)


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_ogbn_arxiv_is_read_from_the_files_of_ogb(tmp_path):
    pytest.importorskip("ogb")
    expected = generated_arxiv(53, 101, 128, 40, num_train=31, num_val=11)
    raw, split = tmp_path / "ogbn_arxiv" / "raw", tmp_path / "ogbn_arxiv" / "split" / "time"
    raw.mkdir(parents=True)
    split.mkdir(parents=True)
    (tmp_path / "ogbn_arxiv" / "RELEASE_v1.txt").touch()
    (tmp_path / "ogbn_arxiv" / "mapping").mkdir()
    write_csv(raw / "edge.csv.gz", expected.edge_index.T)
    write_csv(raw / "node-feat.csv.gz", expected.x)
    write_csv(raw / "node-label.csv.gz", expected.y)
    write_csv(raw / "node_year.csv.gz", torch.full((53,), 2019))
    write_csv(raw / "num-node-list.csv.gz", torch.tensor([53]))
    write_csv(raw / "num-edge-list.csv.gz", torch.tensor([101]))
    for name, key in (("train", "train"), ("valid", "val"), ("test", "test")):
        write_csv(split / f"{name}.csv.gz", expected[f"{key}_mask"].nonzero())
    for _ in range(2):  # first written, then read, in PyG's form
        data = load_graph("ogbn-arxiv", tmp_path, normalize_features=False)
        for key in ("x", "edge_index", "y", "train_mask", "val_mask", "test_mask"):
            torch.testing.assert_close(data[key], expected[key])


def test_the_generated_graph_has_its_sizes_and_a_power_law_of_in_degrees():
    data = generated_arxiv(20_011, 140_009, 3, 5, num_train=1009, num_val=503)
    assert data.x.shape == (20_011, 3) and data.edge_index.shape == (2, 140_009)
    assert (data.edge_index[0] != data.edge_index[1]).all()
    masks = torch.stack([data.train_mask, data.val_mask, data.test_mask]).int()
    assert masks.sum(1).tolist() == [1009, 503, 18_499] and (masks.sum(0) == 1).all()
    source, target = data.edge_index
    assert len((source * 20_011 + target).unique()) == 140_009
    assert (data.y[source] == data.y[target]).double().mean() == pytest.approx(0.72, abs=0.02)
    # P(degree >= k) falls like k^(1 - 2.5)
    degree = target.bincount(minlength=20_011)
    few, many = ((degree >= k).sum().item() for k in (20, 80))
    assert math.log(few / many) / math.log(4) == pytest.approx(1.5, abs=0.15)
    again = generated_arxiv(20_011, 140_009, 3, 5, num_train=1009, num_val=503)
    assert again.edge_index.equal(data.edge_index) and again.x.equal(data.x)
