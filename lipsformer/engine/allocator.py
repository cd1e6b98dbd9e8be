"""What the C library does with memory that a process has freed."""

import ctypes
import platform

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of mallopt's parameters in <malloc.h>
_LARGEST = 32 << 20  # bytes; glibc takes no larger threshold


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next tensors, whatever their size up to 32 MB.

    glibc returns the end of its heap to the system as soon as it is free. The next training step
    then asks for the same pages again, and each of them costs a page fault. The process keeps what
    it needed at most until it ends. With other C libraries nothing changes.

    Example:
        >>> from lipsformer.engine.allocator import keep_freed_memory
        >>> keep_freed_memory()
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_MMAP_THRESHOLD, _LARGEST)
        libc.mallopt(_TRIM_THRESHOLD, -1)  # never
