"""The receiver's memory for embeddings: one arena, taken once, registered once."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

from encoder_client.errors import PoolError
from encoder_client.pool_ledger import PoolLedger, PoolStatistics, Ticket, TicketState

DEFAULT_BYTES = 256 << 20


class Slot:
    """A piece of the arena. It goes back when neither this object nor any view of its memory is alive.

    Args:
        memory: a ctypes array over the piece. Views hold it, whoever makes them (NumPy, torch, memoryview): its death
            is the death of the last of them.
        address: where the piece begins in this process.
    """

    def __init__(self, memory: ctypes.Array[ctypes.c_char], address: int) -> None:
        self.memory = memory
        self.address = address

    @classmethod
    def outside(cls, nbytes: int) -> Slot:
        """A piece of ordinary memory, for when the one in the arena cannot be used any more."""
        memory = (ctypes.c_char * nbytes)()
        return cls(memory, ctypes.addressof(memory))

    @property
    def nbytes(self) -> int:
        """The size of the piece."""
        return len(self.memory)

    @property
    def view(self) -> memoryview:
        """A writable view of bytes, shape (nbytes,). It keeps the piece."""
        return memoryview(self.memory).cast("B")


class Reservation:
    """The space of one prompt's parts. Slots that were not taken out of it go back when it is left.

    Example:
        >>> async with await pool.reserve("prompt-7", [4096, 8192]) as reservation:
        ...     slot = reservation.take(0)
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots: dict[int, Slot] = dict(enumerate(slots))

    def take(self, index: int, nbytes: int | None = None) -> Slot:
        """Hands one slot over; it then lives as long as its views.

        Args:
            index: its place among the sizes that were asked for.
            nbytes: its real size, at most what was asked for. None: what was asked for.
        """
        slot = self._slots.pop(index)
        if nbytes is None or nbytes == slot.nbytes:
            return slot
        if nbytes > slot.nbytes:
            raise PoolError(f"{slot.nbytes} bytes are reserved, and {nbytes} are needed")
        shorter = (ctypes.c_char * nbytes).from_buffer(slot.memory)
        return Slot(shorter, slot.address)

    def close(self) -> None:
        """Gives back what was not taken."""
        self._slots.clear()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EmbeddingPool:
    """An arena that embeddings are read into.

    Its pages are taken from the system when they are first written. Space is granted by prompt, all or nothing, the
    oldest prompt first, within a bounded wait; a slot goes back when the last view of it is gone, never by the clock.
    Reserving belongs to one event loop; views may die in any thread.

    Args:
        capacity: bytes of the arena.

    Example:
        >>> pool = EmbeddingPool(1 << 30)
        >>> async with EncoderClient("encoder:50051", pool=pool) as client: ...
    """

    def __init__(self, capacity: int = DEFAULT_BYTES) -> None:
        if capacity < 1:
            raise ValueError("a pool needs at least one byte")
        self._map = mmap.mmap(-1, capacity)
        self._ledger = PoolLedger(capacity)
        self._returned: deque[int] = deque()
        self._waiters: dict[Ticket, asyncio.Future[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @property
    def address(self) -> int:
        """Where the arena begins in this process."""
        return self._address

    @property
    def capacity(self) -> int:
        """The size of the arena in bytes."""
        return self._ledger.capacity

    @property
    def statistics(self) -> PoolStatistics:
        """What the pool holds and has done."""
        self._collect()
        return self._ledger.statistics()

    async def reserve(self, prompt_id: str, sizes: Sequence[int], timeout: float = 30.0) -> Reservation:
        """Waits for space for all of ``sizes`` at once.

        Args:
            prompt_id: the prompt; the one that was seen first goes first.
            sizes: bytes of each slot, all positive.
            timeout: seconds to wait at most.

        Raises:
            PoolError: they are larger than the pool, or no space came free in time.
        """
        if not self._ledger.fits_ever(sizes):
            raise PoolError(
                f"the embeddings take {sum(sizes)} bytes, and the pool has {self.capacity}; give it more, or send "
                "fewer items at once"
            )
        loop = asyncio.get_running_loop()
        self._loop = loop
        ticket = self._ledger.ask(prompt_id, sizes, loop.time() + timeout)
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters[ticket] = waiter
        self._settle()
        try:
            await waiter
        except asyncio.CancelledError:
            self._waiters.pop(ticket, None)
            if ticket.state is TicketState.GRANTED:
                for offset in ticket.offsets:
                    self._ledger.give_back(offset)
            self._ledger.withdraw(ticket)
            self._settle()
            raise
        if ticket.state is TicketState.EXPIRED:
            raise PoolError(
                f"no space for {sum(sizes)} bytes came free in {timeout:g} s; let go of embeddings sooner, or give the "
                f"pool more than {self.capacity} bytes"
            )
        return Reservation([self._slot(*place) for place in zip(ticket.offsets, ticket.sizes, strict=True)])

    def _slot(self, offset: int, nbytes: int) -> Slot:
        memory = (ctypes.c_char * nbytes).from_buffer(self._map, offset)
        weakref.finalize(memory, self._give_back, offset).atexit = False
        return Slot(memory, self._address + offset)

    def _give_back(self, offset: int) -> None:
        # Runs wherever the last view died, also inside a garbage collection: it only notes the offset, wakes the loop.
        self._returned.append(offset)
        loop = self._loop
        if loop is not None and self._waiters:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits
                loop.call_soon_threadsafe(self._settle)

    def _collect(self) -> None:
        while self._returned:
            self._ledger.give_back(self._returned.popleft())

    def _settle(self) -> None:
        loop = self._loop
        assert loop is not None
        self._collect()
        for ticket in self._ledger.settle(loop.time()):
            waiter = self._waiters.pop(ticket)
            if not waiter.done():
                waiter.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
        deadline = self._ledger.next_deadline()
        self._timer = None if deadline is None else loop.call_at(deadline, self._settle)
