"""Freed memory is kept: the operating system counts the pages that a process gets anew."""

import os
import platform
import subprocess
import sys

import pytest

CODE = """
import resource
import torch
from lipsformer.engine.allocator import keep_freed_memory

def new_pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        tensors = [torch.ones(3_000_017) for _ in range(7)]
        del tensors
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

new_pages()
default = new_pages()
keep_freed_memory()
new_pages()
print(default, new_pages())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has this setting")
def test_a_process_that_keeps_its_memory_gets_no_new_pages():
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC", "GLIBC"))}
    command = [sys.executable, "-c", CODE]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    default, kept = map(int, result.stdout.split())
    pages = 3 * 7 * 3_000_017 * 4 // os.sysconf("SC_PAGE_SIZE")
    assert default > pages / 2  # else the test would show nothing
    assert kept < pages / 100
