"""Embeddings that stay in the encoder's memory: mapped, not copied, under leases that are renewed while views live."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import weakref
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from math import inf
from threading import get_ident
from time import monotonic

from encoder_client.embedding import Embedding
from encoder_client.errors import EncoderError, ReadError
from encoder_client.pool.embedding_pool import Slot
from encoder_client.transports import SlotClosedError, TransportError
from encoder_client.transports.mapped_arena import MappedArena
from encoder_client.transports.shared_memory import SharedMemoryReader
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, LeaseGrant, Locator

logger = logging.getLogger("encoder_client")

DEFAULT_BYTES = 256 << 20
MOST_AT_ONCE = 256
"""Each takes a mapping and a descriptor of the process."""
_RENEWED_AT = 1 / 3
"""Of a lease's life: two tries to renew it may fail."""

Renew = Callable[[EmbeddingChunk], Awaitable[float]]
"""Extends the lease of a chunk; tells the seconds that it lives from now. Raises ReadError: it had ended."""
Release = Callable[[EmbeddingChunk], Awaitable[None]]
"""Gives the lease of a chunk back."""


class InPlaceEmbedding(Embedding):
    """An embedding whose bytes are the encoder's own.

    Views are writable, and nobody else sees what is written: each page that is written becomes this process's own. The
    encoder keeps the bytes as they are for as long as the lease lives, which is renewed until this object (or
    :meth:`release`) and all views are gone.

    Args:
        chunk: the READY chunk that describes it.
        slot: a mapping of its bytes.
        seconds: how long it took to map it.
        arena: where it is.
        slot_offset: of its header there.
    """

    def __init__(self, chunk: EmbeddingChunk, slot: Slot, seconds: float, arena: MappedArena, slot_offset: int) -> None:
        super().__init__(chunk, slot, SharedMemoryReader.name, seconds)
        self._arena = arena
        self._slot_offset = slot_offset

    @property
    def intact(self) -> bool:
        """Until now its bytes have been what the chunk describes.

        To be asked after each use of them: if the engine died, or the lease could not be renewed, they may be another
        embedding's by now.
        """
        try:
            self._arena.recheck(self.chunk, self._slot_offset)
        except SlotClosedError:
            return False
        return True


Memory = weakref.ref[ctypes.Array[ctypes.c_char]]
"""The memory of a slot, which dies with the last view of it."""


class _Hold:
    """One lease, until the last view of its bytes is gone."""

    __slots__ = ("chunk", "expires_at", "memory", "renew_at")

    def __init__(self, chunk: EmbeddingChunk, memory: Memory, seconds: float) -> None:
        self.chunk = chunk
        self.memory = memory
        self.lives(seconds)

    def lives(self, seconds: float) -> None:
        """The lease ends in so many seconds, if it is not renewed."""
        now = monotonic()
        self.expires_at = now + seconds
        self.renew_at = now + seconds * _RENEWED_AT


class InPlaceReads:
    """Maps embeddings, and renews their leases in the background. It belongs to one event loop.

    Args:
        reader: has the arenas.
        renew: extends a lease.
        release: gives a lease back.
        most_bytes: of all embeddings that are in place at a time.
    """

    def __init__(self, reader: SharedMemoryReader, renew: Renew, release: Release, most_bytes: int) -> None:
        self._reader = reader
        self._renew = renew
        self._release = release
        self._most_bytes = most_bytes
        self._holds: dict[int, _Hold] = {}
        """By the identity of the reference to their memory."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._timer: asyncio.TimerHandle | None = None
        """One for all holds: most of them end before they are renewed."""
        self._next_renewal = inf
        self._gone: deque[Memory] = deque()
        self._told = False
        """The loop has been told of what is gone and has not looked yet."""
        self._tasks: set[asyncio.Future[None]] = set()
        self.nbytes = 0
        """Of all embeddings that are in place."""

    def has_room(self, nbytes: int) -> bool:
        """An embedding of so many bytes may still be read in place."""
        return len(self._holds) < MOST_AT_ONCE and self.nbytes + nbytes <= self._most_bytes

    async def read(
        self, chunk: EmbeddingChunk, locator: Locator, lease: LeaseGrant, timeout: float
    ) -> InPlaceEmbedding:
        """Maps an embedding. Its lease is this object's from then on.

        Args:
            chunk: READY and checked; there is room for it.
            locator: in shared memory of this host.
            lease: the right to read.
            timeout: seconds that it may take.

        Raises:
            TransportError: it cannot be mapped; the lease is still the caller's.
            SlotClosedError: the encoder does not hold it any more.
        """
        begun = monotonic()
        slot_offset = locator.shared_memory.slot_offset
        arena = self._reader.mapped(chunk) or await self._reader.arena(chunk, locator, timeout)
        arena.check(chunk, slot_offset)
        try:
            slot = arena.map_slot(chunk, slot_offset)
        except OSError as error:
            raise TransportError(f"the slot cannot be mapped: {error.strerror}") from None
        self._hold(chunk, lease, slot)
        return InPlaceEmbedding(chunk, slot, monotonic() - begun, arena, slot_offset)

    async def close(self) -> None:
        """Gives all leases back: views that are still there may change from now on."""
        if self._timer is not None:
            self._timer.cancel()
        for hold in list(self._holds.values()):
            self._end(hold.memory)
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _hold(self, chunk: EmbeddingChunk, lease: LeaseGrant, slot: Slot) -> None:
        if self._loop is None:
            self._loop, self._thread = asyncio.get_running_loop(), get_ident()
        memory = weakref.ref(slot.memory, self._is_gone)
        ttl = lease.ttl
        hold = self._holds[id(memory)] = _Hold(chunk, memory, ttl.seconds + ttl.nanos / 1e9)
        self.nbytes += chunk.nbytes
        self._plan(hold.renew_at)

    def _is_gone(self, memory: Memory) -> None:
        # Runs wherever the last view died, also inside a garbage collection: it only notes that, and tells the loop.
        self._gone.append(memory)
        if self._told:
            return
        self._told = True
        loop = self._loop
        assert loop is not None
        if get_ident() == self._thread and asyncio.current_task(loop) is not None:
            # Inside a task: the loop looks at what is ready before it sleeps again.
            loop.call_soon(self._collect)
            return
        # It may be asleep, or on its way there: the garbage is collected between any two steps of it, too.
        with suppress(RuntimeError):  # it is closed: the lease runs out by itself
            loop.call_soon_threadsafe(self._collect)

    def _collect(self) -> None:
        self._told = False
        while self._gone:
            self._end(self._gone.popleft())

    def _plan(self, time: float) -> None:
        if time < self._next_renewal:
            assert self._loop is not None
            if self._timer is not None:
                self._timer.cancel()
            self._next_renewal = time
            self._timer = self._loop.call_later(max(0.0, time - monotonic()), self._renew_due)

    def _renew_due(self) -> None:
        self._timer, self._next_renewal, now = None, inf, monotonic()
        for hold in self._holds.values():
            if hold.renew_at <= now:
                hold.renew_at = inf  # until there is an answer
                self._start(self._extend(hold))
        self._plan(min((hold.renew_at for hold in self._holds.values()), default=inf))

    async def _extend(self, hold: _Hold) -> None:
        try:
            hold.lives(await self._renew(hold.chunk))
        except ReadError as error:
            logger.warning("an embedding in place is lost: %s", error)
            return
        except EncoderError as error:
            seconds = hold.expires_at - monotonic()
            logger.warning("the lease of an embedding in place was not renewed, it has %.0f s: %s", seconds, error)
            if seconds <= 0:
                return
            hold.lives(seconds)
        if id(hold.memory) in self._holds:
            self._plan(hold.renew_at)

    def _end(self, memory: Memory) -> None:
        hold = self._holds.pop(id(memory), None)
        if hold is None:
            return
        self.nbytes -= hold.chunk.nbytes
        self._start(self._release(hold.chunk))

    def _start(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
