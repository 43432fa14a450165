"""How much memory this process may use: the machine's, or its container's if that is less."""

from __future__ import annotations

import os
from pathlib import Path

from encoder_svc.errors import SetupError

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_limit() -> int:
    """Bytes of memory that this machine or container has."""
    limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in _CGROUP_LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            limit = min(limit, int(text))
    return limit


def check_memory(arena_bytes: int) -> None:
    """Refuses arenas that can never be filled.

    Args:
        arena_bytes: bytes of all arenas together.

    Raises:
        SetupError: they are larger than the memory.
    """
    limit = memory_limit()
    if arena_bytes > limit:
        raise SetupError(
            f"the arenas would take {arena_bytes >> 20} MiB and this machine or container has {limit >> 20} MiB of "
            "memory; set --arena-bytes and --input-arena-bytes lower, or raise the container's memory limit"
        )
