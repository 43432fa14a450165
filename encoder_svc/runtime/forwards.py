"""A forward: what one tower does for a computation. A batch is made of forwards of one tower.

Most items have one; a video with sound has two, of its pictures and of its sound. They write matrices of one slot, so
they run on one engine, each in a batch with its like.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from encoder_svc.runtime.requests import Prompt
from epd.encoder.v1.media_pb2 import Modality
from epd.internal.v1.engine_pb2 import BatchItem
from epd.internal.v1.media_worker_pb2 import ModelInput, Tower

if TYPE_CHECKING:
    from encoder_svc.runtime.computations import Computation
    from encoder_svc.runtime.engine_table import Batch


class ForwardState(StrEnum):
    """Where a forward is."""

    IDLE = "idle"
    """At no engine: its computation has no slot, or it was taken back."""
    WAITING = "waiting"
    """In the batcher of the engine that has the slot."""
    SENT = "sent"
    """In a batch that the engine has."""
    DONE = "done"
    """Its batch has come back."""


@dataclass(eq=False, slots=True)
class Forward:
    """One tower's share of a computation."""

    computation: Computation
    index: int
    """Its place among the computation's forwards."""
    input: ModelInput = field(repr=False)
    state: ForwardState = ForwardState.IDLE
    batch: Batch | None = field(default=None, repr=False)
    """The batch that it was sent in last."""

    @property
    def key(self) -> tuple[int, int]:
        """Its name in queues."""
        return (self.computation.key, self.index)

    @property
    def prompt(self) -> Prompt:
        """Whose turn it is."""
        return self.computation.prompt

    @property
    def priority(self) -> int:
        """Larger ones run first."""
        return self.computation.priority

    @property
    def tower(self) -> Tower:
        """Who runs it."""
        audio = self.input.tower == Tower.TOWER_AUDIO
        return Tower.TOWER_AUDIO if audio else Tower.TOWER_VISION

    @property
    def patches(self) -> int:
        """What it costs, in patches, or in mel frames for sound."""
        return self.input.patches

    @property
    def is_suspect(self) -> bool:
        """An engine died while it ran something of this item: the next time it runs alone, and can harm nobody."""
        return self.computation.attempts > 0

    def batch_item(self) -> BatchItem:
        """What its engine is told. The computation has its slot and its input."""
        computation = self.computation
        assert computation.layout is not None
        assert computation.input_offset is not None
        assert computation.slot is not None
        heard = self.tower == Tower.TOWER_AUDIO
        return BatchItem(
            part=computation.key,
            modality=Modality.MODALITY_AUDIO if heard else computation.item.modality,
            grid_dim=self.input.grid_dim or computation.layout.grid_dim,
            input=self.input,
            input_offset=computation.input_offset,
            tensors=computation.layout.tensors,
            payload_offset=computation.slot.payload_offset,
            nbytes=computation.layout.nbytes,
            first_matrix=sum(earlier.input.matrices for earlier in computation.forwards[: self.index]),
            partial=any(other.state is ForwardState.WAITING for other in computation.forwards if other is not self),
        )
