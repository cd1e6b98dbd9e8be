"""Train the missing runs of a study, each in a process of one thread."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType
from typing import IO

from benchmarks.study.plan import ROOT, Study
from benchmarks.study.record import LOGS, record
from benchmarks.study.table import outcome
from lipsformer.engine.exits import EXIT_STOPPED, EXIT_USER_ERROR, FINAL
from lipsformer.engine.lock import FolderLock
from lipsformer.jsonl import append_jsonl

STOPPED = (EXIT_STOPPED, -signal.SIGINT, -signal.SIGTERM)  # the last two before train.py listens


class Processes:
    """Run processes from several threads, and pass SIGTERM and Ctrl-C on to them as SIGTERM.

    On SIGTERM train.py saves its run and ends, so no training outlives a queue that is stopped.
    """

    def __init__(self) -> None:
        self.stopped = False
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "Processes":
        numbers = (signal.SIGTERM, signal.SIGINT)
        self._before = {number: signal.signal(number, self._stop) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def run(self, command: Sequence[str], log: IO[str]) -> int:
        """Run a command to its end; return its exit code."""
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        self._started.append(process)
        if self.stopped:  # the signal may have come just before the process was in the list
            process.terminate()
        return process.wait()

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True
        for process in self._started:
            process.terminate()


def train(
    study: Study, row: str, seed: int, folder: Path, processes: Processes
) -> tuple[int, Path]:
    """Train one run to its end in a process of its own; return the exit code and the log.

    The log is named after the time of the start, and its time of change is the end, for `record`.
    If the queue is killed, that is the last line of the training, which may go on without it. The
    lock of the run then refuses a new start.
    """
    where = json.dumps(str(folder))  # quoted, because YAML reads a blank and # as a comment
    settings = [*study.settings(row, seed), f"run.output_dir={where}", "run.report=false"]
    path = folder / LOGS / f"{time.time():.2f}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as log:
        command = [sys.executable, "train.py", "--config", study.config, *settings]
        code = processes.run(command, log)
    path.touch()
    return code, path


def run(study: Study, name: str, runs: Path, workers: int, only: Sequence[str]) -> int:
    """Train what is missing, `workers` runs at a time, and append a line for each that finishes.

    Returns:
        The exit code of the command.

    Raises:
        ConfigError: If another queue of these results is running. Both would add a line for a run
            that one of them starts after the other one has finished it.
    """
    path = ROOT / study.results
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FolderLock(path.with_name(f"{path.name}.lock"))
    lock.acquire()
    try:
        return _train_missing(study, name, runs, workers, only, path)
    finally:
        lock.release()


def _train_missing(
    study: Study, name: str, runs: Path, workers: int, only: Sequence[str], path: Path
) -> int:
    done = {(line["row"], line["seed"]) for line in study.lines()}
    missing = [r for r in study.runs() if r not in done and (not only or r[0] in only)]
    lock = threading.Lock()

    def work(job: tuple[str, int]) -> int:
        if processes.stopped:
            return 0
        title, folder = f"{job[0]} seed {job[1]}", runs / name / f"{job[0]}-seed{job[1]}"
        code, log = train(study, *job, folder, processes)
        if code in STOPPED:
            print(f"{title} has not ended ({log}); repeat the command", flush=True)
            return 0
        if code not in (0, *FINAL):
            last = log.read_text().strip().rpartition("\n")[2]
            print(f"{title} failed with exit code {code}, and {log} ends with: {last}", flush=True)
            return EXIT_USER_ERROR if code == EXIT_USER_ERROR else 1
        line = record(study, *job, folder, code)
        with lock:
            append_jsonl(path, line)
        print(f"{title}: {outcome(line)}", flush=True)
        return 0

    with Processes() as processes, ThreadPoolExecutor(workers) as pool:
        failed = max(pool.map(work, missing), default=0)
    return failed or (EXIT_STOPPED if processes.stopped else 0)
