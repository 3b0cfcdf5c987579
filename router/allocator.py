"""glibc's allocator settings: request bodies of hundreds of KiB must not mmap and unmap each time.

By default glibc maps blocks over 128 KiB afresh and returns them at once, so that every large body
pays page faults for all of its pages. With a higher threshold they are reused from the heap.
"""

from __future__ import annotations

import ctypes
import platform

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_THRESHOLD_BYTES = 32 * 1024 * 1024


def keep_large_blocks() -> bool:
    """Raise glibc's mmap and trim thresholds; False where the C library is another one."""
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(
        libc.mallopt(_M_MMAP_THRESHOLD, _THRESHOLD_BYTES)
        and libc.mallopt(_M_TRIM_THRESHOLD, 2 * _THRESHOLD_BYTES)
    )
