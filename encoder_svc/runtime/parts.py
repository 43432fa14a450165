"""A part: one media item of a request, from admission to its one end."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from encoder_svc.runtime.slots import Slot
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.media_pb2 import MediaItem
from epd.internal.v1.media_worker_pb2 import ModelInput

if TYPE_CHECKING:
    from encoder_svc.runtime.requests import Request


class PartState(StrEnum):
    """How far a part has come."""

    QUEUED = "queued"
    """It waits for a media worker."""
    PREPARING = "preparing"
    """A media worker has it."""
    PREPARED = "prepared"
    """Its input is in the input arena; it waits for a slot and a batch. LAYOUT has been told."""
    ENCODING = "encoding"
    """An engine has it."""
    READY = "ready"
    """Its embedding is in a slot, leased. An end."""
    FAILED = "failed"
    """An end."""
    CANCELLED = "cancelled"
    """An end."""


_LIVE_ENDS = frozenset({PartState.FAILED, PartState.CANCELLED})

TRANSITIONS: dict[PartState, frozenset[PartState]] = {
    PartState.QUEUED: _LIVE_ENDS | {PartState.PREPARING},
    # Back: its worker died before it was this part's turn.
    PartState.PREPARING: _LIVE_ENDS | {PartState.PREPARED, PartState.QUEUED},
    PartState.PREPARED: _LIVE_ENDS | {PartState.ENCODING},
    # Back: its engine died before or during the forward; the input is still there.
    PartState.ENCODING: _LIVE_ENDS | {PartState.READY, PartState.PREPARED},
    PartState.READY: frozenset(),
    PartState.FAILED: frozenset(),
    PartState.CANCELLED: frozenset(),
}

ENDS = frozenset(state for state, following in TRANSITIONS.items() if not following)


@dataclass(eq=False, slots=True)
class Part:
    """One media item and what is known of it."""

    key: int
    """Its number in this server; children know it by this, never by an id of a caller."""
    request: Request = field(repr=False)
    item: MediaItem = field(repr=False)
    files: tuple[bytes, ...] = field(repr=False)
    """The media files, until a worker has prepared them."""
    media_bytes: int
    admitted_at: float
    state: PartState = PartState.QUEUED
    layout: EmbeddingChunk | None = field(default=None, repr=False)
    input: ModelInput | None = field(default=None, repr=False)
    input_offset: int | None = None
    """Where its input is in the input arena, while it holds space there."""
    slot: Slot | None = None
    """The slot that it holds until it is READY."""
    engine: int = -1
    """The engine in whose arena its slot is, once it had one."""
    attempts: int = 0
    """Forwards that have been started for it."""
    prepare_started_at: float = 0.0
    prepared_at: float = 0.0
    prepare_seconds: float = 0.0
    encode_started_at: float = 0.0

    @property
    def ended(self) -> bool:
        """It has had its one end."""
        return self.state in ENDS

    @property
    def patches(self) -> int:
        """What its forward costs; 0 before it is measured."""
        return self.input.patches if self.input is not None else 0

    def move(self, state: PartState) -> None:
        """Goes on to a state that may follow."""
        if state not in TRANSITIONS[self.state]:
            raise AssertionError(f"part {self.key} cannot go from {self.state} to {state}")
        self.state = state
