"""The slot table of one arena: FREE → RESERVED → FILLED → FREE, each time with a new generation."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import StrEnum

from encoder_svc.runtime import slot_header
from encoder_svc.runtime.allocator import Allocator


class SlotState(StrEnum):
    """What a slot is used for."""

    RESERVED = "reserved"
    """A part will be encoded into it; nobody may read."""
    FILLED = "filled"
    """It holds an embedding. It stays while a lease on it lives."""
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
    offset: int
    """Of the header, in bytes from the start of the arena."""
    nbytes: int
    """Of the payload."""
    key: bytes = field(default_factory=lambda: secrets.token_bytes(16), repr=False)
    state: SlotState = SlotState.RESERVED
    checksum: int = 0
    """XXH3-64 of the payload, once FILLED."""
    leases: int = 0
    """How many leases on it live."""

    @property
    def payload_offset(self) -> int:
        """Where the payload begins, in bytes from the start of the arena."""
        return self.offset + slot_header.SIZE


class SlotTable:
    """All slots of one arena.

    Args:
        arena: the memory, writable; only headers are touched here.
    """

    def __init__(self, arena: memoryview) -> None:
        self._arena = arena
        self._allocator = Allocator(len(arena))
        self._generation = 0
        self._live: dict[int, Slot] = {}
        self.reserved_bytes = 0
        self.leased_bytes = 0

    @property
    def capacity(self) -> int:
        """The largest payload that fits into an empty arena, in bytes."""
        return self._allocator.size - slot_header.SIZE

    @property
    def live(self) -> tuple[Slot, ...]:
        """All slots that are RESERVED or FILLED."""
        return tuple(self._live.values())

    def reserve(self, nbytes: int) -> Slot | None:
        """Takes a slot for a payload of ``nbytes``; None if there is no gap for it."""
        offset = self._allocator.allocate(nbytes + slot_header.SIZE)
        if offset is None:
            return None
        self._generation += 1
        slot = Slot(self._generation, offset, nbytes)
        slot_header.close_slot(self._arena, offset)
        self._live[slot.generation] = slot
        self.reserved_bytes += nbytes
        return slot

    def fill(self, slot: Slot, checksum: int) -> None:
        """The payload is written: marks the slot as readable."""
        self._move(slot, SlotState.FILLED)
        slot.checksum = checksum
        self.reserved_bytes -= slot.nbytes
        self.leased_bytes += slot.nbytes
        slot_header.open_slot(self._arena, slot.offset, slot.generation, slot.nbytes, checksum, slot.key)

    def free(self, slot: Slot) -> None:
        """Gives the slot's memory back. The caller has made sure that no lease on it lives."""
        assert slot.leases == 0, "a slot with a live lease must not be reused"
        was_filled = slot.state is SlotState.FILLED
        self._move(slot, SlotState.FREE)
        if was_filled:
            self.leased_bytes -= slot.nbytes
        else:
            self.reserved_bytes -= slot.nbytes
        slot_header.close_slot(self._arena, slot.offset)
        self._allocator.free(slot.offset)
        del self._live[slot.generation]

    def _move(self, slot: Slot, state: SlotState) -> None:
        if state not in TRANSITIONS[slot.state]:
            raise AssertionError(f"slot {slot.generation} cannot go from {slot.state} to {state}")
        slot.state = state
