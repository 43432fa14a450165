"""An encoder's arena as this process sees it: mapped once for each life of an engine, for reading only."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import socket
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from encoder_client.pool.embedding_pool import Slot
from encoder_client.transports import SlotClosedError, TransportError
from epd import arena_socket, slot_header
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk

_HOST_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_WRITABLE = mmap.PROT_READ | mmap.PROT_WRITE
_CLOSED = "the slot is not open any more"


def host_boot_id() -> str:
    """Names this boot of this host; empty if the system does not tell."""
    try:
        return _HOST_BOOT_ID.read_text().strip()
    except OSError:
        return ""


class MappedArena:
    """The arena of one life of an engine.

    Its pages enter this process's tables where slots are read, and not all at once when it is mapped: pages that the
    encoder has not used yet would be taken from the system for nothing, and counted for every reader.

    Args:
        descriptor: of the arena; owned by this object from now on.
        nbytes: its size.
        connection: to the engine. Its end is the arena's: nobody writes there any more.
    """

    def __init__(self, descriptor: int, nbytes: int, connection: socket.socket) -> None:
        self.descriptor = descriptor
        self.connection = connection
        self._map = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        self._view = memoryview(self._map)
        self._bytes = np.frombuffer(self._map, np.uint8)

    @classmethod
    def open(cls, path: str, boot_id: str, timeout: float) -> Self:
        """Connects to an engine's socket and maps what it hands out. It waits for the engine.

        Args:
            path: of the socket.
            boot_id: of the engine whose arena is wanted.
            timeout: seconds, for each of two steps.

        Raises:
            TransportError: nobody is there, or another engine is.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        descriptors: list[int] = []
        try:
            connection.settimeout(timeout)
            connection.connect(path)
            message, descriptors, _, _ = socket.recv_fds(connection, arena_socket.SIZE, 1)
            served, nbytes = arena_socket.parse(message)
            if served != boot_id:
                raise TransportError("another engine serves there, or another life of it")
            if len(descriptors) != 1:
                raise TransportError("the engine handed out no arena")
            _check_file(descriptors[0], nbytes)
            connection.setblocking(False)
            return cls(descriptors[0], nbytes, connection)
        except (OSError, ValueError, TransportError) as error:
            connection.close()
            for descriptor in descriptors:
                os.close(descriptor)
            if isinstance(error, TransportError):
                raise
            raise TransportError(f"the arena cannot be mapped: {error}") from None

    def check(self, chunk: EmbeddingChunk, slot_offset: int) -> None:
        """Checks that the chunk's slot is there and may be read: before its bytes are looked at, and after.

        Raises:
            SlotClosedError: it is closed, or the place is used for another slot.
        """
        if not slot_header.is_open(self._view, slot_offset, chunk.generation, chunk.nbytes, chunk.slot_key):
            raise SlotClosedError(_CLOSED)

    def recheck(self, chunk: EmbeddingChunk, slot_offset: int) -> None:
        """Checks that nothing has changed in a slot since :meth:`check`: its generation is zeroed before anything does.

        Raises:
            SlotClosedError: it was closed meanwhile.
        """
        if slot_header.read_generation(self._view, slot_offset) != chunk.generation:
            raise SlotClosedError(_CLOSED)

    def payload(self, chunk: EmbeddingChunk, slot_offset: int) -> npt.NDArray[np.uint8]:
        """The bytes of a slot that was checked, shape (nbytes,): the encoder's own, for reading only."""
        start = slot_offset + slot_header.SIZE
        return self._bytes[start : start + chunk.nbytes]

    def map_slot(self, chunk: EmbeddingChunk, slot_offset: int) -> Slot:
        """Maps a payload that was checked, without a copy: a page that is written becomes this process's own.

        A mapping of its own for each, so that what was written is gone with it, and never seen in the place's next use.

        Raises:
            OSError: the process has too many mappings or descriptors.
            SlotClosedError: the engine is gone.
        """
        if self.descriptor < 0:  # what the system would map then is zeros
            raise SlotClosedError(_CLOSED)
        nbytes, start = chunk.nbytes, slot_offset + slot_header.SIZE
        before = start % mmap.ALLOCATIONGRANULARITY
        pages = mmap.mmap(self.descriptor, before + nbytes, mmap.MAP_PRIVATE, _WRITABLE, offset=start - before)
        memory = (ctypes.c_char * nbytes).from_buffer(pages, before)
        return Slot(memory, ctypes.addressof(memory))

    def close(self) -> None:
        """Lets go of the engine. The mapping goes when the last view of it does."""
        self.connection.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


def _check_file(descriptor: int, nbytes: int) -> None:
    if os.fstat(descriptor).st_size != nbytes:
        raise TransportError("the arena is not as large as the engine says")
    # A peer that cut the file would kill whoever reads where it was (SIGBUS).
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise TransportError("the arena could be cut while it is mapped")
