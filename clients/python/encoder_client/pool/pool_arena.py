"""The memory of a pool: an anonymous file (memfd), so that another process of the host can map it.

Only this process can write it. Whoever is given the descriptor can neither write nor shrink nor grow the file, by seals
that nobody can take off; a private map of it is writable all the same, and what is written there nobody else sees.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from contextlib import suppress

_F_SEAL_FUTURE_WRITE = 0x0010
"""Linux 5.1: no writing but by the maps that are there. Python 3.11 has no name for it."""


class PoolArena:
    """Mapped memory. Its pages are taken from the system when they are first written.

    Args:
        capacity: bytes.
    """

    def __init__(self, capacity: int) -> None:
        self.descriptor = -1
        """Of the file. -1 on systems without anonymous files: then nobody else can map it."""
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("encoder-client:pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            weakref.finalize(self, os.close, self.descriptor)
            os.ftruncate(self.descriptor, capacity)
        self.map = mmap.mmap(self.descriptor, capacity)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        """Where it begins in this process."""
        if self.descriptor >= 0:
            with suppress(OSError):  # an older kernel
                fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
