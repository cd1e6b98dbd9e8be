"""What a sweep of graph runs does about mistakes, failures, Ctrl-C, equal cells and old results."""

import json
import multiprocessing
import os
import signal
import time
import uuid

import pytest

from lipsformer._configfile import read_config
from lipsformer.engine.lock import FolderLock
from lipsformer.graph.config import GraphConfig, GraphSweepConfig
from lipsformer.graph.training import Training
from scripts import graph_sweep
from tests.conftest import ROOT
from tests.graph.communities import without_time

SWEEPS = [
    path
    for path in sorted((ROOT / "configs" / "graph").glob("*.yaml"))
    if "results:" in path.read_text()
]

FORK = multiprocessing.get_context("fork")
PAUSE = 20  # seconds; long against everything else here
RESULT = {
    **{"best_epoch": 0, "val_acc": 0.5, "test_acc": 0.5, "last_test_acc": 0.5},
    **{"highest_train_acc": 0.5, "last_loss": 1.0, "epochs": 1, "diverged": False, "seconds": 1.0},
}


def pretend_to_train(config, seed, folder):
    """Note the call in a file, then do what the number of layers says.

    Return at once from 2, send Ctrl-C to this worker from 20, fail from 30, take long from 40.
    """
    layers = config.model.num_layers
    calls = folder.parents[1] / "calls"
    calls.mkdir(exist_ok=True)
    (calls / f"{layers}-{uuid.uuid4().hex}").touch()
    if layers >= 40:
        time.sleep(PAUSE)
    elif layers >= 30:
        raise RuntimeError("30 layers are too many")
    elif layers >= 20:
        os.kill(os.getpid(), signal.SIGINT)
    return {"seed": seed, **RESULT}


def write_sweep(folder, **settings):
    base = {
        "model": {"name": "gcn", "hidden_channels": 4},
        "data": {"name": "trees", "tree_depth": 2, "num_trees": 30},
        "run": {"output_dir": "unused"},
    }
    (folder / "run.yaml").write_text(json.dumps(base))
    sweep = {"config": "run.yaml", "output_dir": str(folder / "out"), "num_workers": 2}
    (folder / "sweep.yaml").write_text(json.dumps({**sweep, **settings}))
    return ["--config", str(folder / "sweep.yaml")]


@pytest.fixture
def pretending(monkeypatch):
    """Workers that are forked, so that they know the function that pretends to train."""
    monkeypatch.setattr(graph_sweep, "_train", pretend_to_train)
    monkeypatch.setattr(graph_sweep.multiprocessing, "get_context", lambda method: FORK)


def calls(folder):
    """The numbers of layers of all calls of `pretend_to_train`, sorted."""
    return sorted(int(path.name.partition("-")[0]) for path in (folder / "out/calls").glob("*"))


def lines(folder):
    log = folder / "out" / "results.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def trained(folder):
    return [int(line["cell"]["model.num_layers"]) for line in lines(folder)]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("model.name=gnc", "model.name='gnc' cannot be built: model 'gnc' is not known"),
        (
            "model.name=deep_gat model.kwargs.heads=many",
            "model.name='deep_gat' with model.kwargs={'heads': 'many'} cannot be built: ",
        ),
        ("model.num_layer=2", "did you mean model.num_layers?"),
        (
            "data.name=coro data.tree_depth=3 data.num_trees=8000",
            "data.name='coro' is not known",
        ),
        ("run.device=no_device", "run.device='no_device' is not possible: this machine has cpu"),
    ],
)
def test_a_mistake_in_one_cell_shows_before_the_first_training(tmp_path, capsys, case, message):
    command = write_sweep(tmp_path, cases={"good": "", "bad": case}, grid=["train.lr=0.1"])
    assert graph_sweep.main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: case=bad, train.lr=0.1: ") and error.count("\n") == 1
    assert message in error
    assert not (tmp_path / "out").exists()


def test_a_refused_sweep_leaves_no_folder_for_its_results(tmp_path, capsys):
    places = {"output_dir": "sweeps/out", "results": "kept/far/results.jsonl"}
    places = {key: str(tmp_path / place) for key, place in places.items()}
    settings = {"cases": {"bad": "model.name=gnc"}, "grid": ["train.lr=0.1"]}
    assert graph_sweep.main(write_sweep(tmp_path, **settings, **places)) == 2
    assert "model 'gnc' is not known" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml", "sweep.yaml"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"grid": ["model.name=gcn,ggnn"], "x": "model.name"}, "its values must be numbers, not"),
        ({"grid": ["train.lr=0.1"], "x": "model.name"}, "must be a key of grid: train.lr"),
        ({"grid": ["train.lr=0.1", "train.lr=0.2"]}, "is not possible: each key only once"),
        ({"seeds": [3, 3]}, "seeds=(3, 3) is not possible: each only once"),
        ({"seeds": [-1]}, "seeds=(-1,) is not possible: must be >= 0 and below 2^32"),
        ({"cases": {"a": "train.lr=1 train.seeds=[1]"}}, "train.seeds='[1]' is not possible: "),
        ({"overrides": ["train.seeds=[1]"]}, "train.seeds='[1]' is not possible: "),
    ],
)
def test_a_mistake_in_the_grid_ends_in_one_sentence(tmp_path, capsys, settings, message):
    assert graph_sweep.main(write_sweep(tmp_path, **settings)) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_an_output_folder_that_is_a_file_ends_in_one_sentence(tmp_path, capsys):
    (tmp_path / "out").write_text("a file")
    assert graph_sweep.main(write_sweep(tmp_path)) == 2
    error = capsys.readouterr().err
    assert f"the output folder {tmp_path / 'out'} cannot be used: File exists" in error
    assert error.count("\n") == 1 and (tmp_path / "out").read_text() == "a file"


@pytest.mark.parametrize("line", ["{}", "[]", json.dumps({"overrides": [], "seed": 0})])
def test_a_line_that_is_no_result_ends_in_one_sentence(tmp_path, capsys, line):
    log = tmp_path / "results.jsonl"
    log.write_text(line + "\n")
    assert graph_sweep.main(write_sweep(tmp_path, results=str(log))) == 2
    error = capsys.readouterr().err
    assert f"{log} has the line {line}, which is no result without " in error
    assert error.count("\n") == 1 and log.read_text() == line + "\n"


def test_a_sweep_does_not_write_into_the_folder_of_another_one(tmp_path, capsys):
    command = write_sweep(tmp_path, grid=["model.num_layers=2"])
    lock = FolderLock(tmp_path / "out")
    lock.acquire()
    before = [path.name for path in (tmp_path / "out").iterdir()]
    assert graph_sweep.main(command) == 2
    assert f"{tmp_path / 'out'} is in use by process {os.getpid()} " in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == before
    assert graph_sweep.main([*command, "--table"]) == 0, "a table only reads"
    lock.release()


@pytest.mark.dist
def test_a_failure_keeps_the_finished_results_and_ends_the_other_runs(tmp_path, pretending):
    command = write_sweep(tmp_path, grid=["model.num_layers=40,2,3,30,4,5"])
    with pytest.raises(RuntimeError, match="30 layers are too many"):
        graph_sweep.main(command)
    assert trained(tmp_path) == [2, 3]
    assert calls(tmp_path) == [2, 3, 30, 40]
    assert not (tmp_path / "out" / "lock.json").exists()
    with pytest.raises(RuntimeError, match="30 layers are too many"):
        graph_sweep.main(write_sweep(tmp_path, grid=["model.num_layers=2,3,30"]))
    assert calls(tmp_path) == [2, 3, 30, 30, 40], "only what is missing runs again"


@pytest.mark.dist
def test_a_result_that_arrives_with_a_failure_is_kept(tmp_path, pretending, monkeypatch):
    wait = graph_sweep.wait
    monkeypatch.setattr(graph_sweep, "wait", lambda running, return_when: wait(running))
    command = write_sweep(tmp_path, grid=["model.num_layers=30,2,3,4,5"], num_workers=4)
    with pytest.raises(RuntimeError, match="30 layers are too many"):
        graph_sweep.main(command)
    assert sorted(trained(tmp_path)) == [2, 3, 4]
    assert calls(tmp_path) == [2, 3, 4, 30], "a job begins only when a worker is free"


@pytest.mark.dist
def test_ctrl_c_ends_the_command_with_its_workers_and_keeps_the_finished_results(
    tmp_path, pretending
):
    command = write_sweep(tmp_path, grid=["model.num_layers=2,40,41,3,4"])
    reader, writer = FORK.Pipe(duplex=False)

    def run():
        os.setsid()  # the command and its workers form the group of a terminal
        # a shell starts background processes with SIGINT ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
        graph_sweep.main(command)

    process = FORK.Process(target=run)
    process.start()
    writer.close()  # the command and its workers hold the others
    deadline = time.monotonic() + 60
    while not (trained(tmp_path) == [2] and calls(tmp_path) == [2, 40, 41]):
        assert time.monotonic() < deadline, "the runs have not started"
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    assert reader.poll(PAUSE / 2), "a process lives on"
    with pytest.raises(EOFError):
        reader.recv()
    process.join()
    assert process.exitcode != 0
    assert trained(tmp_path) == [2]
    assert calls(tmp_path) == [2, 40, 41]
    assert not (tmp_path / "out" / "lock.json").exists()


@pytest.mark.dist
def test_workers_leave_ctrl_c_to_the_command(tmp_path, pretending):
    assert graph_sweep.main(write_sweep(tmp_path, grid=["model.num_layers=20,21"])) == 0
    assert sorted(trained(tmp_path)) == [20, 21]


@pytest.mark.dist
def test_cells_with_equal_settings_share_one_run_per_seed(tmp_path, pretending):
    cases = {
        "plain": "",
        "written out": "model.num_layers=2",
        "in another order": "train.lr=0.005 model.num_layers=2",
        "other": "model.num_layers=3",
    }
    assert graph_sweep.main(write_sweep(tmp_path, cases=cases, seeds=[0, 1])) == 0
    assert calls(tmp_path) == [2, 2, 3, 3]
    found = sorted((line["cell"]["case"], line["seed"]) for line in lines(tmp_path))
    assert found == sorted((case, seed) for case in cases for seed in (0, 1))


@pytest.mark.dist
def test_a_result_of_another_config_is_refused(tmp_path, pretending, capsys):
    command = write_sweep(tmp_path, cases={"two": "model.num_layers=2"}, seeds=[7])
    assert graph_sweep.main(command) == 0
    table = capsys.readouterr().out
    base, log = tmp_path / "run.yaml", tmp_path / "out" / "results.jsonl"
    before, written = base.read_text(), log.read_text()

    base.write_text(json.dumps({**json.loads(before), "train": {"lr": 0.5}}))
    for option in ([], ["--table"]):
        assert graph_sweep.main([*command, *option]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"error: case=two: {log} has a result of seed 7 that was trained")
        assert "delete that line to train it again, or restore the config" in error
    assert log.read_text() == written and calls(tmp_path) == [2]

    base.write_text(before)
    assert graph_sweep.main(command) == 0
    assert capsys.readouterr().out == table and calls(tmp_path) == [2]

    (line,) = lines(tmp_path)
    del line["config_hash"]  # as earlier versions wrote it
    log.write_text(json.dumps(line) + "\n")
    base.write_text(json.dumps({**json.loads(before), "train": {"lr": 0.5}}))
    assert graph_sweep.main(command) == 0
    assert capsys.readouterr().out == table and calls(tmp_path) == [2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cases": {"five": "model.num_layers=5"}}, "a case sets model.num_layers already"),
        ({"grid": ["model.num_layers=2,3, 2"]}, "each value only once"),
    ],
)
def test_a_grid_that_would_train_a_cell_as_another_is_refused(tmp_path, capsys, settings, message):
    command = write_sweep(tmp_path, **{"grid": ["model.num_layers=2,3"], **settings})
    assert graph_sweep.main(command) == 2
    assert message in capsys.readouterr().err


def test_results_that_cannot_be_written_end_the_sweep_before_its_first_training(
    tmp_path, capsys, pretending
):
    (tmp_path / "file").write_text("")
    for place in (tmp_path, tmp_path / "file" / "results.jsonl"):
        command = write_sweep(tmp_path, grid=["model.num_layers=2,3"], results=str(place))
        assert graph_sweep.main(command) == 2
        error = capsys.readouterr().err
        assert f"results '{place}' cannot be written: " in error and error.count("\n") == 1
        assert not calls(tmp_path)


def test_two_sweeps_do_not_share_a_file_of_results(tmp_path, capsys, pretending):
    results = tmp_path / "shared" / "results.jsonl"
    command = write_sweep(tmp_path, grid=["model.num_layers=2,3"], results=str(results))
    lock = FolderLock(results.with_name("results.jsonl.lock"))
    lock.acquire()
    assert graph_sweep.main(command) == 2
    assert "results.jsonl.lock is in use by process" in capsys.readouterr().err
    assert not calls(tmp_path)
    lock.release()
    assert graph_sweep.main(command) == 0
    assert sorted(path.name for path in results.parent.iterdir()) == ["results.jsonl"]


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
    settings = {"grid": ["model.num_layers=2,3"], "seeds": [0], "x": "model.num_layers"}
    command = write_sweep(tmp_path, overrides=["train.epochs=2"], **settings)
    assert graph_sweep.main(command) == 0
    table = capsys.readouterr().out
    assert table.count("\n") == 4 and (tmp_path / "out" / "plot.png").stat().st_size > 0
    results = (tmp_path / "out" / "results.jsonl").read_text()
    assert len(results.splitlines()) == 2

    def no_more_training(*args):
        raise AssertionError("trained again")

    monkeypatch.setattr(graph_sweep, "_train", no_more_training)
    assert graph_sweep.main(command) == 0
    assert capsys.readouterr().out == table
    assert (tmp_path / "out" / "results.jsonl").read_text() == results
    assert graph_sweep.main([*command, "--table", "seeds=[0,1]"]) == 0
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


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_no_committed_result_is_of_another_config(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert graph_sweep.sweep(path, [], progress=False, only=[], train=False)
