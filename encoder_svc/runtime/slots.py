"""The slot table of one arena: FREE → RESERVED → FILLED → FREE, each time with a new generation.

A FILLED slot stays while a lease on it lives, or while it is cached: kept under the name of its content. Cached slots
that nobody leases are evicted when space is needed: the cheapest contiguous run around one of those that were used
least recently, so that one large embedding does not cost many small ones far apart.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import islice
from typing import NamedTuple

from encoder_svc.runtime.allocator import ALIGNMENT, Allocator
from epd import slot_header
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk

_EVICTION_CANDIDATES = 8
_EVICTION_LOOKS = 64
"""So many runs are compared before one is evicted, around so many of the slots that were used least recently."""


class ContentName(NamedTuple):
    """What an embedding is kept under."""

    identity: str
    """Whose it is: others do not find it."""
    content_key: bytes
    """32 bytes over media, options, salt, model and code."""


class SlotState(StrEnum):
    """What a slot is used for."""

    RESERVED = "reserved"
    """An embedding will be written into it; nobody may read."""
    FILLED = "filled"
    """It holds an embedding, leased or cached or both."""
    FREE = "free"
    """Its memory belongs to nobody. A slot object in this state is only history."""


TRANSITIONS: dict[SlotState, frozenset[SlotState]] = {
    SlotState.RESERVED: frozenset({SlotState.FILLED, SlotState.FREE}),
    SlotState.FILLED: frozenset({SlotState.FREE}),
    SlotState.FREE: frozenset(),
}


@dataclass(eq=False, slots=True)
class Slot:
    """One use of a place in the arena. A new use is a new object with a new generation."""

    generation: int
    """Unique in the life of the arena, from 1."""
    engine: int
    """Whose arena it is in."""
    offset: int
    """Of the header, in bytes from the start of the arena."""
    nbytes: int
    """Of the payload."""
    key: bytes = field(default_factory=lambda: secrets.token_bytes(16), repr=False)
    state: SlotState = SlotState.RESERVED
    checksum: int = 0
    """XXH3-64 of the payload, once FILLED."""
    layout: EmbeddingChunk | None = field(default=None, repr=False)
    """What a media worker told of the embedding, once FILLED."""
    chunk: bytes = field(default=b"", repr=False)
    """What is the same in all READY chunks of it, serialised. Empty before the first."""
    name: ContentName | None = None
    """What it is cached under. None: it is not cached."""
    leases: int = 0
    """How many leases on it live."""

    @property
    def payload_offset(self) -> int:
        """Where the payload begins, in bytes from the start of the arena."""
        return self.offset + slot_header.SIZE

    @property
    def end(self) -> int:
        """Where the next place begins, in bytes from the start of the arena."""
        return self.offset + footprint(self.nbytes)


def footprint(nbytes: int) -> int:
    """Bytes of an arena that a payload of ``nbytes`` takes, with its header."""
    return -(-(nbytes + slot_header.SIZE) // ALIGNMENT) * ALIGNMENT


class SlotTable:
    """All slots of one arena.

    Args:
        engine: whose arena it is.
        arena: the memory, writable; only headers are touched here.
    """

    def __init__(self, engine: int, arena: memoryview) -> None:
        self._engine = engine
        self._arena = arena
        self._allocator = Allocator(len(arena))
        self._generation = 0
        self._live: dict[int, Slot] = {}
        self._by_name: dict[ContentName, Slot] = {}
        self._idle: OrderedDict[int, Slot] = OrderedDict()
        self._idle_ends: dict[int, Slot] = {}
        self._held = Allocator(len(arena))
        """What is reserved or leased: all else is free or can be evicted, and what lies together is one gap here."""
        self.reserved_bytes = 0
        self.leased_bytes = 0
        self.cached_bytes = 0
        self.evictions = 0

    @property
    def size(self) -> int:
        """The size of the arena in bytes."""
        return len(self._arena)

    @property
    def capacity(self) -> int:
        """The largest :func:`footprint` that fits into an empty arena, in bytes."""
        return self._allocator.size

    @property
    def live(self) -> tuple[Slot, ...]:
        """All slots that are RESERVED or FILLED, in no order."""
        return tuple(self._live.values())

    def find(self, name: ContentName) -> Slot | None:
        """The FILLED slot that is cached under a name."""
        return self._by_name.get(name)

    def reserve(self, nbytes: int) -> Slot | None:
        """Takes a slot for a payload of ``nbytes``, evicting cached ones if need be; None: there is no space."""
        wanted = nbytes + slot_header.SIZE
        if wanted > self._held.largest_gap:
            return None
        offset = self._allocator.allocate(wanted)
        if offset is None:
            self._evict_run(wanted)
            offset = self._allocator.allocate(wanted)
            assert offset is not None, "what can be evicted makes room"
        self._held.take(offset, wanted)
        self._generation += 1
        slot = Slot(self._generation, self._engine, offset, nbytes)
        slot_header.close_slot(self._arena, offset)
        self._live[offset] = slot
        self.reserved_bytes += nbytes
        return slot

    def fill(self, slot: Slot, layout: EmbeddingChunk, checksum: int, name: ContentName | None) -> None:
        """The payload is written: marks the slot as readable, and caches it under ``name``.

        Another slot that was cached under the same name is not any more. Until :meth:`lease` or :meth:`settle` is
        called the slot has nobody, and must not stay so.
        """
        self._move(slot, SlotState.FILLED)
        slot.checksum, slot.layout = checksum, layout
        if name is not None:
            previous = self._by_name.get(name)
            if previous is not None:
                self.forget(previous)
            slot.name = name
            self._by_name[name] = slot
        self.reserved_bytes -= slot.nbytes
        slot_header.open_slot(self._arena, slot.offset, slot.generation, slot.nbytes, checksum, slot.key)

    def lease(self, slot: Slot) -> None:
        """A lease on a FILLED slot begins."""
        assert slot.state is SlotState.FILLED
        if slot.leases == 0:
            self.leased_bytes += slot.nbytes
            if self._leave_idle(slot):
                self._held.take(slot.offset, slot.end - slot.offset)
        slot.leases += 1

    def unlease(self, slot: Slot) -> None:
        """A lease on a FILLED slot ended."""
        slot.leases -= 1
        if slot.leases == 0:
            self.leased_bytes -= slot.nbytes
            self.settle(slot)

    def settle(self, slot: Slot) -> None:
        """Keeps a FILLED slot without leases if it is cached, as the one that was used last; else gives it back."""
        if slot.leases:
            return
        if slot.name is None:
            self.free(slot)
            return
        if slot.offset in self._idle:
            self._idle.move_to_end(slot.offset)
        else:
            self._held.free(slot.offset)
            self._idle[slot.offset] = slot
            self._idle_ends[slot.end] = slot
            self.cached_bytes += slot.nbytes

    def forget(self, slot: Slot) -> None:
        """Caches a slot no more, whether or not it is leased. Of no effect on one that is not cached."""
        if slot.name is None:
            return
        # Only this generation: a newer slot may have taken the name.
        if self._by_name.get(slot.name) is slot:
            del self._by_name[slot.name]
        slot.name = None
        if self._idle.get(slot.offset) is slot:
            self.free(slot)

    def forget_all(self) -> None:
        """Caches nothing any more."""
        for slot in list(self._by_name.values()):
            self.forget(slot)

    def free(self, slot: Slot) -> None:
        """Gives the memory of a slot back that nobody leases."""
        assert slot.leases == 0, "a slot with a live lease must not be reused"
        was_reserved = slot.state is SlotState.RESERVED
        self._move(slot, SlotState.FREE)
        if was_reserved:
            self.reserved_bytes -= slot.nbytes
        if not self._leave_idle(slot):
            self._held.free(slot.offset)
        if slot.name is not None and self._by_name.get(slot.name) is slot:
            del self._by_name[slot.name]
        slot.name = None
        slot_header.close_slot(self._arena, slot.offset)
        self._allocator.free(slot.offset)
        del self._live[slot.offset]

    def _leave_idle(self, slot: Slot) -> bool:
        """Returns whether it was idle."""
        if self._idle.get(slot.offset) is not slot:
            return False
        del self._idle[slot.offset]
        del self._idle_ends[slot.end]
        self.cached_bytes -= slot.nbytes
        return True

    def _evict_run(self, wanted: int) -> None:
        """Frees the cheapest run of idle slots that makes a gap of ``wanted`` bytes. There must be one."""
        runs: list[deque[Slot]] = []
        for slot in islice(self._idle.values(), _EVICTION_LOOKS):
            if self._held.gap_around(slot.offset) >= wanted:
                runs.append(self._run_around(slot, wanted))
                if len(runs) == _EVICTION_CANDIDATES:
                    break
        if not runs:
            # Those that were used least recently lie apart.
            start = self._held.best_gap(wanted)
            runs.append(self._run_around(self._idle[start + self._allocator.gap_after(start)], wanted))
        for slot in min(runs, key=lambda run: sum(member.nbytes for member in run)):
            self.evictions += 1
            self.free(slot)

    def _run_around(self, slot: Slot, wanted: int) -> deque[Slot]:
        """``slot`` and those idle neighbours of it that it takes, with the gaps between them, to make room."""
        run = deque([slot])
        start, end = self._gap_start(slot), self._gap_end(slot)
        while end - start < wanted:
            before, after = self._idle_ends.get(start), self._idle.get(end)
            if after is not None and (before is None or after.nbytes <= before.nbytes):
                run.append(after)
                end = self._gap_end(after)
            else:
                assert before is not None, "there is room"
                run.appendleft(before)
                start = self._gap_start(before)
        # One that came late may be so large that those which came early are not needed.
        while len(run) > 1 and self._gap_end(run[-1]) - self._gap_start(run[1]) >= wanted:
            run.popleft()
        while len(run) > 1 and self._gap_end(run[-2]) - self._gap_start(run[0]) >= wanted:
            run.pop()
        return run

    def _gap_start(self, slot: Slot) -> int:
        """Where the free memory before a slot begins."""
        return slot.offset - self._allocator.gap_before(slot.offset)

    def _gap_end(self, slot: Slot) -> int:
        """Where the free memory behind a slot ends."""
        return slot.end + self._allocator.gap_after(slot.end)

    def _move(self, slot: Slot, state: SlotState) -> None:
        if state not in TRANSITIONS[slot.state]:
            raise AssertionError(f"slot {slot.generation} cannot go from {slot.state} to {state}")
        slot.state = state
