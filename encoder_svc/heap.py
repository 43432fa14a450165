"""Keeps large blocks of memory in the process, so that media of some MB do not cost a page fault for every 4 KiB."""

from __future__ import annotations

import ctypes
import os

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
# The most that glibc takes (HEAP_MAX_SIZE / 2). Blocks up to here are used again instead of being mapped and faulted
# in anew: 5 MB are then copied in a sixth of the time.
_MMAP_THRESHOLD = 32 << 20
_TRIM_THRESHOLD = 512 << 20


def keep_large_blocks() -> None:
    """Tells glibc's malloc so, unless the operator has. Elsewhere it does nothing."""
    # glibc reads its MALLOC_ variables before main; from here only mallopt works.
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD)
        mallopt(_M_TRIM_THRESHOLD, _TRIM_THRESHOLD)
