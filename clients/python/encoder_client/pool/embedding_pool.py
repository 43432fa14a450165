"""The receiver's memory for embeddings: one arena, taken once, registered once."""

from __future__ import annotations

import asyncio
import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import Self

from encoder_client.errors import PoolError
from encoder_client.pool.pool_arena import PoolArena
from encoder_client.pool.pool_ledger import PoolLedger, PoolStatistics, Ticket, TicketState
from encoder_client.pool.pool_stalls import StallWatch

DEFAULT_BYTES = 256 << 20
PATIENCE_SECONDS = 1.0
"""Longer than an encoder that has space usually takes for the next embedding, much shorter than limits of time."""


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

    def __init__(self, slots: Sequence[Slot], taken: Callable[[Slot], None]) -> None:
        self._slots: dict[int, Slot] = dict(enumerate(slots))
        self._taken = taken

    def take(self, index: int, nbytes: int | None = None) -> Slot:
        """Hands one slot over, whose embedding is there to be read; it then lives as long as its views.

        Args:
            index: its place among the sizes that were asked for.
            nbytes: its real size, at most what was asked for. None: what was asked for.
        """
        slot = self._slots.pop(index)
        self._taken(slot)
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
        patience: seconds that prompts in the queue keep leases while those ahead of them, who have space, get no
            embedding from their encoders (docs/architecture.md, "Why nothing waits in a circle").

    Example:
        >>> pool = EmbeddingPool(1 << 30)
        >>> async with EncoderClient("encoder:50051", pool=pool) as client: ...
    """

    def __init__(self, capacity: int = DEFAULT_BYTES, *, patience: float = PATIENCE_SECONDS) -> None:
        if capacity < 1:
            raise ValueError("a pool needs at least one byte")
        self.arena = PoolArena(capacity)
        self._ledger = PoolLedger(capacity)
        self._stalls = StallWatch(patience)
        self._returned: deque[int] = deque()
        self._waiters: dict[Ticket, _Waiter] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def address(self) -> int:
        """Where the arena begins in this process."""
        return self.arena.address

    @property
    def capacity(self) -> int:
        """The size of the arena in bytes."""
        return self._ledger.capacity

    @property
    def statistics(self) -> PoolStatistics:
        """What the pool holds and has done."""
        self._collect()
        return replace(self._ledger.statistics(), stalled=self._stalls.total)

    async def reserve(self, prompt_id: str, sizes: Sequence[int], timeout: float = 30.0) -> Reservation:
        """Waits for space for all of ``sizes`` at once.

        Args:
            prompt_id: the prompt; the one that was seen first goes first.
            sizes: bytes of each slot, all positive.
            timeout: seconds to wait at most.

        Raises:
            PoolError: they are larger than the pool, or no space came free in time.
        """
        return await self.ask(prompt_id, sizes, timeout)

    def ask(
        self,
        prompt_id: str,
        sizes: Sequence[int],
        timeout: float,
        stalled: Callable[[], None] | None = None,
    ) -> asyncio.Future[Reservation]:
        """As :meth:`reserve`, without waiting: the result is done at once if there is space. Cancel it to withdraw.

        Args:
            prompt_id: as in :meth:`reserve`.
            sizes: as in :meth:`reserve`.
            timeout: as in :meth:`reserve`.
            stalled: called at most once, in the queue, when the pool waits for encoders: whoever asks gives back the
                leases that it cannot read yet.

        Raises:
            PoolError: they are larger than the pool. That no space came free in time is the result's exception.
        """
        if not self._ledger.fits_ever(sizes):
            raise PoolError(
                f"the embeddings take {sum(sizes)} bytes, and the pool has {self.capacity}; give it more, or send "
                "fewer items at once"
            )
        loop = asyncio.get_running_loop()
        self._loop = loop
        now = loop.time()
        ticket = self._ledger.ask(prompt_id, sizes, now + timeout)
        waiter = _Waiter(loop.create_future(), timeout, stalled)
        self._waiters[ticket] = waiter
        if stalled is not None:
            self._stalls.waits(ticket, now)
        self._settle()
        if not waiter.answer.done():
            waiter.answer.add_done_callback(partial(self._answered, ticket))
        return waiter.answer

    def _answered(self, ticket: Ticket, answer: asyncio.Future[Reservation]) -> None:
        if answer.cancelled() and self._waiters.pop(ticket, None) is not None:
            self._ledger.withdraw(ticket)
            self._stalls.leaves(ticket)
            self._settle()

    def _slot(self, offset: int, nbytes: int) -> Slot:
        memory = (ctypes.c_char * nbytes).from_buffer(self.arena.map, offset)
        weakref.finalize(memory, self._give_back, offset).atexit = False
        return Slot(memory, self.arena.address + offset)

    def _taken(self, slot: Slot) -> None:
        assert self._loop is not None
        self._stalls.filled(slot.address - self.arena.address, self._loop.time())

    def _give_back(self, offset: int) -> None:
        # Runs wherever the last view died, also inside a garbage collection: it only notes the offset, wakes the loop.
        self._returned.append(offset)
        loop = self._loop
        if loop is not None and self._waiters:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits
                loop.call_soon_threadsafe(self._settle)

    def _collect(self) -> None:
        while self._returned:
            offset = self._returned.popleft()
            self._ledger.give_back(offset)
            self._stalls.filled(offset, 0.0 if self._loop is None else self._loop.time())

    def _settle(self) -> None:
        loop = self._loop
        assert loop is not None
        self._collect()
        for ticket in self._ledger.settle(loop.time()):
            self._stalls.leaves(ticket)
            waiter = self._waiters.pop(ticket)
            if ticket.state is TicketState.GRANTED:
                self._stalls.granted(ticket, loop.time())
                slots = [self._slot(*place) for place in zip(ticket.offsets, ticket.sizes, strict=True)]
                if not waiter.answer.done():
                    waiter.answer.set_result(Reservation(slots, self._taken))
            elif not waiter.answer.done():
                waiter.answer.set_exception(
                    PoolError(
                        f"no space for {sum(ticket.sizes)} bytes came free in {waiter.timeout:g} s; let go of "
                        f"embeddings sooner, or give the pool more than {self.capacity} bytes"
                    )
                )
        for ticket in self._stalls.told(loop.time()):
            if (stalled := self._waiters[ticket].stalled) is not None:
                stalled()
        if self._timer is not None:
            self._timer.cancel()
        times = [time for time in (self._ledger.next_deadline(), self._stalls.next_time()) if time is not None]
        self._timer = loop.call_at(min(times), self._settle) if times else None


@dataclass(frozen=True)
class _Waiter:
    """Who waits for a wish."""

    answer: asyncio.Future[Reservation]
    timeout: float
    stalled: Callable[[], None] | None
