"""Freed memory is kept: the C library's own account says how much of it is free and still held."""

import ctypes
import os
import platform
import subprocess
import sys

import pytest

TENSOR = 4 * 7_000_003  # bytes

CODE = """
import ctypes
import torch
from lipsformer.engine.allocator import keep_freed_memory

NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"

class Account(ctypes.Structure):  # struct mallinfo2 of <malloc.h>
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]

account = ctypes.CDLL(None).mallinfo2
account.restype = Account

def held_after_freeing():
    before = account().fordblks
    torch.ones(7_000_003)
    return account().fordblks - before

print(held_after_freeing())
keep_freed_memory()
print(held_after_freeing())
"""


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc" or not hasattr(ctypes.CDLL(None), "mallinfo2"),
    reason="only glibc has this setting, and its account in bytes since version 2.33",
)
def test_a_process_keeps_the_memory_that_it_has_freed():
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC", "GLIBC"))}
    command = [sys.executable, "-c", CODE]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    before, after = map(int, result.stdout.split())
    assert before < 0.1 * TENSOR  # else the test would show nothing
    assert after > 0.9 * TENSOR  # the rest was free before
