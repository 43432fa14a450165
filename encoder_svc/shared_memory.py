"""Memory that the front makes and its children map: anonymous files (memfd), handed on as inherited descriptors.

They have no name: nothing is left in ``/dev/shm`` however a process dies, and the size of ``/dev/shm`` (64 MB in a
default container) does not bound them, only the memory of the machine or container does.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

import numpy as np
import numpy.typing as npt


class SharedMemory:
    """A mapped block of shared memory.

    Args:
        descriptor: an open descriptor of the block, which this object then owns.
        size: its size in bytes.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.descriptor = descriptor
        self.size = size
        self._map = mmap.mmap(descriptor, size)
        self.view = memoryview(self._map)

    @classmethod
    def create(cls, name: str, size: int) -> SharedMemory:
        """Makes a new block of ``size`` bytes, zeroed; pages are taken from the system when first written.

        Args:
            name: shown in ``/proc/<pid>/maps``.
            size: bytes, at least 1.
        """
        descriptor = os.memfd_create(f"encoder-svc:{name}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        # Nobody can take pages away from those who map it, which would kill them (SIGBUS).
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        return cls(descriptor, size)

    @property
    def address(self) -> int:
        """The address of the first byte in this process."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    def array(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """A view of ``nbytes`` bytes from ``offset``, shape (nbytes,), writable, without a copy."""
        return np.frombuffer(self._map, dtype=np.uint8, count=nbytes, offset=offset)

    def close(self) -> None:
        """Closes the descriptor. The mapping goes when the last view of it does."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
