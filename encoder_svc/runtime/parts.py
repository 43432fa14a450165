"""A part: one media item of a request, from admission to its one end.

What happens to its content is told by its :class:`~encoder_svc.runtime.computations.Computation`, which parts of equal
content share. A part only knows which one that is, and its own end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from epd.encoder.v1.media_pb2 import MediaItem

if TYPE_CHECKING:
    from encoder_svc.runtime.computations import Computation
    from encoder_svc.runtime.requests import Request


class PartState(StrEnum):
    """How far a part has come."""

    FETCHING = "fetching"
    """Its media are being fetched and hashed."""
    QUEUED = "queued"
    """It waits for a media worker; or it is measured, and waits for space for its input."""
    PREPARING = "preparing"
    """A media worker has it, which measures it first: then LAYOUT is told."""
    PREPARED = "prepared"
    """Its input is in the input arena; it waits for a slot and a batch."""
    ENCODING = "encoding"
    """An engine has it."""
    READY = "ready"
    """Its embedding is in a slot. An end."""
    FAILED = "failed"
    """An end."""
    CANCELLED = "cancelled"
    """An end."""


_ALWAYS = frozenset({PartState.FAILED, PartState.CANCELLED})

TRANSITIONS: dict[PartState, frozenset[PartState]] = {
    # READY at once: the content was in the cache.
    PartState.FETCHING: _ALWAYS | {PartState.QUEUED, PartState.READY},
    PartState.QUEUED: _ALWAYS | {PartState.PREPARING},
    # Back: its worker died before it was this part's turn, or there is no space for its input now.
    PartState.PREPARING: _ALWAYS | {PartState.PREPARED, PartState.QUEUED},
    PartState.PREPARED: _ALWAYS | {PartState.ENCODING},
    # Back: its engine died before or during the forward; the input is still there.
    PartState.ENCODING: _ALWAYS | {PartState.READY, PartState.PREPARED},
    PartState.READY: frozenset(),
    PartState.FAILED: frozenset(),
    PartState.CANCELLED: frozenset(),
}

ENDS = frozenset(state for state, following in TRANSITIONS.items() if not following)


@dataclass(eq=False, slots=True)
class Part:
    """One media item of a request."""

    key: int
    """Its number in this server."""
    request: Request = field(repr=False)
    item: MediaItem = field(repr=False)
    """The item without its bytes."""
    media_bytes: int
    """What admission is charged for its media. 0 once they are not needed any more."""
    patches: int
    """What admission is charged for its forward: an estimate until it is measured."""
    admitted_at: float
    fetch_seconds: float = 0.0
    """How long fetching and hashing its media took."""
    computation: Computation | None = field(default=None, repr=False)
    """What makes its embedding, together with other parts of equal content. None: FETCHING, or from the cache."""
    slot_bytes: int = 0
    """What its prompt is charged for its embedding, beyond an earlier one of the same ``part_idx``."""
    end: PartState | None = None

    @property
    def state(self) -> PartState:
        """How far it has come."""
        if self.end is not None:
            return self.end
        return self.computation.stage if self.computation is not None else PartState.FETCHING

    @property
    def ended(self) -> bool:
        """It has had its one end."""
        return self.end is not None

    def finish(self, end: PartState) -> None:
        """Has its one end."""
        if end not in ENDS or end not in TRANSITIONS[self.state]:
            raise AssertionError(f"part {self.key} cannot go from {self.state} to {end}")
        self.end = end
