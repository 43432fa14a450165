"""The bookkeeping of a pool: who waits for space, who has which. Pure: time is passed in, no bytes are touched.

* Space is asked for by prompt, all parts of a call at once, and granted all or nothing: no prompt holds a part of its
  space while it waits for the rest, so two prompts cannot wait for each other.
* The oldest prompt is served first, and nobody overtakes it: a large one does not starve behind small ones.
* Every wait has an end.

Free space is found by best fit, the lowest address among equals, in a list of free runs that are merged on return.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

ALIGNMENT = 64
"""Every slot begins at a multiple of so many bytes: a cache line, and more than any element type asks for."""


class TicketState(Enum):
    """How far a wish for space has come."""

    WAITING = "waiting"
    """In the queue."""
    GRANTED = "granted"
    """All its space is taken for it."""
    EXPIRED = "expired"
    """Its time ran out in the queue."""
    WITHDRAWN = "withdrawn"
    """Whoever asked gave up."""


ALLOWED = {
    TicketState.WAITING: {TicketState.GRANTED, TicketState.EXPIRED, TicketState.WITHDRAWN},
    TicketState.GRANTED: set(),
    TicketState.EXPIRED: set(),
    TicketState.WITHDRAWN: set(),
}


@dataclass(eq=False)
class Ticket:
    """One wish for space."""

    prompt_id: str
    sizes: tuple[int, ...]
    """Bytes of each slot."""
    deadline: float
    age: tuple[int, int]
    """When the prompt was first seen, then when this was asked for: smaller is older."""
    state: TicketState = TicketState.WAITING
    offsets: tuple[int, ...] = ()
    """Where the slots begin, once granted."""

    def move(self, state: TicketState) -> None:
        """Goes on to another state."""
        assert state in ALLOWED[self.state], f"{self.state} cannot become {state}"
        self.state = state


@dataclass
class _Prompt:
    first_seen: int
    uses: int = 0
    """Waiting tickets and slots. At 0 the prompt is forgotten."""


@dataclass(frozen=True)
class PoolStatistics:
    """What a pool holds and has done. Sizes are in bytes."""

    capacity: int
    used: int
    peak: int
    """The greatest ``used`` so far."""
    slots: int
    """Slots that are taken."""
    waiting: int
    """Wishes in the queue."""
    largest_free: int
    """The largest run of free space."""
    granted: int
    """Wishes granted so far."""
    expired: int
    """Wishes whose time ran out so far."""
    stalled: int = 0
    """Wishes so far whose owners were told to give leases back, since the pool waited for encoders."""


@dataclass
class PoolLedger:
    """The books of one arena of ``capacity`` bytes."""

    capacity: int
    _free: list[tuple[int, int]] = field(default_factory=list)
    _taken: dict[int, tuple[int, str]] = field(default_factory=dict)
    _queue: list[Ticket] = field(default_factory=list)
    _prompts: dict[str, _Prompt] = field(default_factory=dict)
    _clock: int = 0
    _used: int = 0
    _peak: int = 0
    _granted: int = 0
    _expired: int = 0

    def __post_init__(self) -> None:
        self._free = [(0, self.capacity)]

    def fits_ever(self, sizes: Sequence[int]) -> bool:
        """The slots would fit into an empty pool."""
        return sum(map(_rounded, sizes)) <= self.capacity

    def ask(self, prompt_id: str, sizes: Sequence[int], deadline: float) -> Ticket:
        """Puts a wish into the queue; :meth:`settle` grants it.

        Args:
            prompt_id: whose wish it is.
            sizes: bytes of each slot; :meth:`fits_ever` of them holds.
            deadline: when the wish expires.
        """
        self._clock += 1
        prompt = self._prompts.setdefault(prompt_id, _Prompt(self._clock))
        prompt.uses += 1
        ticket = Ticket(prompt_id, tuple(sizes), deadline, (prompt.first_seen, self._clock))
        insort(self._queue, ticket, key=lambda waiting: waiting.age)
        return ticket

    def settle(self, now: float) -> list[Ticket]:
        """Expires what is late and grants, oldest first, until one does not fit. Returns what left the queue."""
        late = [ticket for ticket in self._queue if ticket.deadline <= now]
        for ticket in late:
            self._leave(ticket, TicketState.EXPIRED)
            self._expired += 1
        granted = []
        while self._queue and (offsets := self._take(self._queue[0])) is not None:
            ticket = self._queue[0]
            ticket.offsets = offsets
            self._prompts[ticket.prompt_id].uses += len(offsets)
            self._leave(ticket, TicketState.GRANTED)
            self._granted += 1
            granted.append(ticket)
        return late + granted

    def withdraw(self, ticket: Ticket) -> None:
        """Takes a wish back. Does nothing if it has left the queue."""
        if ticket.state is TicketState.WAITING:
            self._leave(ticket, TicketState.WITHDRAWN)

    def give_back(self, offset: int) -> None:
        """Frees the slot that begins at ``offset``."""
        size, prompt_id = self._taken.pop(offset)
        self._used -= size
        insort(self._free, (offset, size))
        self._merge()
        self._forget(prompt_id)

    def next_deadline(self) -> float | None:
        """When the next wish expires."""
        return min((ticket.deadline for ticket in self._queue), default=None)

    def statistics(self) -> PoolStatistics:
        """A snapshot."""
        return PoolStatistics(
            capacity=self.capacity,
            used=self._used,
            peak=self._peak,
            slots=len(self._taken),
            waiting=len(self._queue),
            largest_free=max((size for _, size in self._free), default=0),
            granted=self._granted,
            expired=self._expired,
        )

    def _leave(self, ticket: Ticket, state: TicketState) -> None:
        self._queue.remove(ticket)
        ticket.move(state)
        self._forget(ticket.prompt_id)

    def _forget(self, prompt_id: str) -> None:
        prompt = self._prompts[prompt_id]
        prompt.uses -= 1
        if not prompt.uses:
            del self._prompts[prompt_id]

    def _take(self, ticket: Ticket) -> tuple[int, ...] | None:
        before = list(self._free)
        offsets: dict[int, int] = {}
        # Largest first: best fit then wastes least.
        for index in sorted(range(len(ticket.sizes)), key=lambda i: -ticket.sizes[i]):
            size = _rounded(ticket.sizes[index])
            fitting = [(run, offset) for offset, run in self._free if run >= size]
            if not fitting:
                self._free = before
                return None
            run, offset = min(fitting)
            place = self._free.index((offset, run))
            self._free[place : place + 1] = [(offset + size, run - size)] if run > size else []
            offsets[index] = offset
        for index, offset in offsets.items():
            size = _rounded(ticket.sizes[index])
            self._taken[offset] = (size, ticket.prompt_id)
            self._used += size
        self._peak = max(self._peak, self._used)
        return tuple(offsets[index] for index in range(len(ticket.sizes)))

    def _merge(self) -> None:
        merged: list[tuple[int, int]] = []
        for offset, size in self._free:
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + size)
            else:
                merged.append((offset, size))
        self._free = merged


def _rounded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
