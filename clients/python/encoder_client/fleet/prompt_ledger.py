"""How far the parts of one prompt have come, over several encoders. Pure: time is passed in.

A part has one try at a time. Each ends in READY, or in a failure that lets it wait for another try or ends it. Who asks
for the end of a part is told once for each time that he asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import inf

import grpc

from encoder_client.errors import EncoderError
from encoder_client.fleet.failure_kinds import FailureKind, kind_of

MOST_FAULTS = 2
"""Tries of one part that end in a fault: an item that brings down whatever works on it must not visit all encoders."""


class PartState(Enum):
    """How far a part has come."""

    WAITING = "waiting"
    """For an encoder."""
    SENT = "sent"
    """An encoder has it."""
    READY = "ready"
    """Its embedding can be read."""
    FAILED = "failed"
    """No encoder will be asked again."""
    CANCELLED = "cancelled"
    """Somebody cancelled it."""


ALLOWED = {
    PartState.WAITING: {PartState.SENT, PartState.FAILED},
    PartState.SENT: {PartState.READY, PartState.WAITING, PartState.FAILED, PartState.CANCELLED},
    PartState.READY: {PartState.WAITING, PartState.FAILED},  # its embedding was lost before it was read
    PartState.FAILED: set(),
    PartState.CANCELLED: set(),
}


@dataclass
class _Part:
    deadline: float
    state: PartState = PartState.WAITING
    instance_id: str = ""
    avoided: set[str] = field(default_factory=set)
    faults: int = 0
    losses: int = 0
    error: EncoderError | None = None

    def move(self, state: PartState) -> None:
        assert state in ALLOWED[self.state], f"{self.state} cannot become {state}"
        self.state = state


class PromptLedger:
    """The parts of one prompt.

    Args:
        deadlines: for each ``part_idx`` when nobody wants it any more; ``inf`` for never.
        last_try: no try of a part without a deadline begins later.
        encoders: how many encoders there are: a part may be lost, or not known, at so many.
    """

    def __init__(self, deadlines: Mapping[int, float], last_try: float, encoders: int) -> None:
        self._parts = {part_idx: _Part(deadline) for part_idx, deadline in deadlines.items()}
        self._last_try = last_try
        self._most_losses = max(encoders, 3)

    def state(self, part_idx: int) -> PartState:
        """How far the part has come."""
        return self._parts[part_idx].state

    def deadline(self, part_idx: int) -> float:
        """When nobody wants the part any more."""
        return self._parts[part_idx].deadline

    def avoided(self, part_idx: int) -> frozenset[str]:
        """The instances that failed on the part."""
        return frozenset(self._parts[part_idx].avoided)

    def waiting(self) -> list[int]:
        """The parts that wait for an encoder."""
        return [part_idx for part_idx, part in self._parts.items() if part.state is PartState.WAITING]

    def next_end(self) -> float | None:
        """When the wait of the next part is over."""
        return min((self._end_of_wait(self._parts[part_idx]) for part_idx in self.waiting()), default=None)

    def send(self, parts: Iterable[int], instance_id: str) -> None:
        """An encoder is asked for the parts."""
        for part_idx in parts:
            part = self._parts[part_idx]
            part.move(PartState.SENT)
            part.instance_id = instance_id

    def ready(self, part_idx: int) -> None:
        """The embedding of a part that was sent can be read."""
        self._parts[part_idx].move(PartState.READY)

    def again(self, part_idx: int) -> None:
        """The lease of a READY part was given back unread: it wants another."""
        self._parts[part_idx].move(PartState.WAITING)

    def cancelled(self, part_idx: int) -> None:
        """A part that was sent was cancelled."""
        self._parts[part_idx].move(PartState.CANCELLED)

    def failed(self, part_idx: int, error: EncoderError, now: float) -> bool:
        """The try of a part failed, or its embedding was lost before it was read.

        Returns:
            It is the part's end. Otherwise it waits for another try.
        """
        part = self._parts[part_idx]
        part.error = error
        kind = kind_of(error)
        if kind is not FailureKind.BUSY:
            part.avoided.add(part.instance_id)
        if kind is FailureKind.FAULT:
            part.faults += 1
        elif kind in {FailureKind.LOST, FailureKind.ELSEWHERE}:
            part.losses += 1
        over = (
            kind is FailureKind.FINAL
            or part.faults >= MOST_FAULTS
            or part.losses > self._most_losses
            or now >= self._end_of_wait(part)
        )
        part.move(PartState.FAILED if over else PartState.WAITING)
        return over

    def expire(self, now: float, why: Callable[[], str]) -> dict[int, EncoderError]:
        """Ends the parts that have waited long enough.

        Args:
            now: the time.
            why: tells why they have no encoder, for those that were never sent.

        Returns:
            The error for each.
        """
        over: dict[int, EncoderError] = {}
        for part_idx in self.waiting():
            part = self._parts[part_idx]
            if now >= self._end_of_wait(part):
                part.move(PartState.FAILED)
                over[part_idx] = self._late(part, now, why)
        return over

    def _late(self, part: _Part, now: float, why: Callable[[], str]) -> EncoderError:
        if part.error is not None:
            return part.error
        if now >= part.deadline:
            message = f"the deadline passed before the part was sent: {why()}"
            return EncoderError(grpc.StatusCode.DEADLINE_EXCEEDED, message)
        return EncoderError(grpc.StatusCode.UNAVAILABLE, f"no encoder took the part: {why()}")

    def _end_of_wait(self, part: _Part) -> float:
        return part.deadline if part.deadline < inf else self._last_try
