"""A pool whose command was killed leaves no process behind."""

import multiprocessing
import os
import signal
from concurrent.futures import ProcessPoolExecutor

import pytest

from scripts._workers import end_with_parent


def test_a_worker_ends_when_its_command_is_killed():
    fork = multiprocessing.get_context("fork")
    reader, writer = fork.Pipe(duplex=False)

    def command_of_one_worker():
        workers = ProcessPoolExecutor(1, mp_context=fork, initializer=end_with_parent)
        workers.submit(os.getpid).result()
        writer.send("started")
        signal.pause()

    process = fork.Process(target=command_of_one_worker)
    process.start()
    writer.close()  # the command and its worker hold the others
    assert reader.recv() == "started"
    process.kill()
    assert reader.poll(20), "the worker lives on"
    with pytest.raises(EOFError):
        reader.recv()
