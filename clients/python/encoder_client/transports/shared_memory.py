"""From memory of the same host: the encoder's arena is mapped, and a slot is copied out of it.

The word that says whether the slot is what it was is looked at before and after, so no checksum is needed.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from functools import partial

import numpy as np
import numpy.typing as npt

from encoder_client.checksums import RunningChecksum
from encoder_client.pool.embedding_pool import Slot
from encoder_client.transports import TransferStuckError
from encoder_client.transports.mapped_arena import MappedArena, host_boot_id
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, LeaseGrant, Locator

MOST_ARENAS = 64
"""Arenas that are mapped at a time; of more, the one that was used least recently is let go."""
COPIED_AT_ONCE = 8 << 20
"""Bytes that are copied in the event loop, in about a millisecond. More are copied by threads."""
THREADS = 2
"""For one copy: one core alone does not use all that the memory can do. Four are no faster."""


class SharedMemoryReader:
    """Reads arenas of engines of this host and user."""

    name = "shared_memory"
    needs_checksum = False

    def __init__(self) -> None:
        self._host = host_boot_id()
        self._arenas: OrderedDict[str, MappedArena] = OrderedDict()
        self._openings: dict[str, asyncio.Task[MappedArena]] = {}

    def reaches(self, locator: Locator) -> bool:
        """See :class:`~encoder_client.transports.Reader`: whether it is this host, by no address."""
        return bool(self._host) and locator.shared_memory.host_boot_id == self._host

    async def read(
        self,
        chunk: EmbeddingChunk,
        locator: Locator,
        lease: LeaseGrant,
        slot: Slot,
        checksum: RunningChecksum,
        timeout: float,
    ) -> None:
        """See :class:`~encoder_client.transports.Reader`."""
        slot_offset = locator.shared_memory.slot_offset
        arena = self.mapped(chunk) or await self.arena(chunk, locator, timeout)
        arena.check(chunk, slot_offset)
        source = arena.payload(chunk, slot_offset)
        target = np.frombuffer(memoryview(slot.memory), np.uint8, chunk.nbytes)
        if chunk.nbytes <= COPIED_AT_ONCE:
            np.copyto(target, source)
        else:
            try:
                async with asyncio.timeout(timeout):
                    await _copy_in_threads(target, source)
            except TimeoutError:
                raise TransferStuckError(
                    f"it was not copied in {timeout:.3g} s: the process's threads are busy"
                ) from None
        arena.recheck(chunk, slot_offset)

    async def arena(self, chunk: EmbeddingChunk, locator: Locator, timeout: float) -> MappedArena:
        """The arena that a chunk's slot is in, mapped.

        Raises:
            TransportError: it cannot be had.
        """
        arena = self.mapped(chunk)
        if arena is not None:
            return arena
        boot_id = chunk.encoder.engine_boot_id
        opening = self._openings.get(boot_id)
        if opening is None:
            opening = asyncio.create_task(self._open(boot_id, locator.shared_memory.socket_path, timeout))
            self._openings[boot_id] = opening
            opening.add_done_callback(partial(self._opened, boot_id))
        # Others may wait for it too: whoever is cancelled leaves it to them.
        return await asyncio.shield(opening)

    def mapped(self, chunk: EmbeddingChunk) -> MappedArena | None:
        """The arena that a chunk's slot is in, if it is mapped already."""
        boot_id = chunk.encoder.engine_boot_id
        arena = self._arenas.get(boot_id)
        if arena is not None and len(self._arenas) > 1:
            self._arenas.move_to_end(boot_id)
        return arena

    async def _open(self, boot_id: str, path: str, timeout: float) -> MappedArena:
        return await asyncio.to_thread(MappedArena.open, path, boot_id, timeout)

    def _opened(self, boot_id: str, opening: asyncio.Task[MappedArena]) -> None:
        del self._openings[boot_id]
        if opening.cancelled() or opening.exception() is not None:
            return
        arena = opening.result()
        self._arenas[boot_id] = arena
        # It says nothing more, until it ends: then nothing keeps a dead engine's memory but views of it.
        asyncio.get_running_loop().add_reader(arena.connection, self._forget, boot_id)
        if len(self._arenas) > MOST_ARENAS:
            self._forget(next(iter(self._arenas)))

    def _forget(self, boot_id: str) -> None:
        arena = self._arenas.pop(boot_id)
        asyncio.get_running_loop().remove_reader(arena.connection)
        arena.close()

    def close(self) -> None:
        """See :class:`~encoder_client.transports.Reader`."""
        for opening in self._openings.values():
            opening.cancel()
        for boot_id in list(self._arenas):
            self._forget(boot_id)


async def _copy_in_threads(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    """Copies bytes, both of shape (nbytes,). If this is cancelled, the threads go on, and hold both until their end."""
    loop, share = asyncio.get_running_loop(), -(-len(source) // THREADS)
    parts = [slice(begin, begin + share) for begin in range(0, len(source), share)]
    # NumPy's copy lets go of the interpreter, a memoryview's does not.
    await asyncio.gather(*(loop.run_in_executor(None, np.copyto, target[part], source[part]) for part in parts))
