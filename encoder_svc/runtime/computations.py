"""A computation: the making of one embedding, for all parts that want it.

It belongs to nobody of them: the first caller's cancel does not hurt the others. It ends when it has made the
embedding, when it failed, or when the last of its parts has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from encoder_svc.runtime.forwards import Forward, ForwardState
from encoder_svc.runtime.parts import TRANSITIONS, Part, PartState
from encoder_svc.runtime.requests import Prompt
from encoder_svc.runtime.slots import ContentName, Slot
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.media_pb2 import MediaItem
from epd.internal.v1.media_worker_pb2 import ModelInput


@dataclass(eq=False, slots=True)
class Computation:
    """One item on its way through the pipeline."""

    key: int
    """Its number in this server; children know it by this, never by an id of a caller."""
    item: MediaItem = field(repr=False)
    files: tuple[bytes, ...] = field(repr=False)
    """The media files, until a worker has prepared them."""
    name: ContentName | None
    """What the embedding will be kept under. None: it is not kept, and no other part may join (any more)."""
    prompt: Prompt = field(repr=False)
    """The prompt of its first part: its place in every order is that of this prompt."""
    priority: int
    begun_at: float
    pinned_engine: int | None = None
    """The only engine that may run it. None: any."""
    stage: PartState = PartState.QUEUED
    ended: bool = False
    parts: list[Part] = field(default_factory=list, repr=False)
    """Who waits for it."""
    layout: EmbeddingChunk | None = field(default=None, repr=False)
    forwards: tuple[Forward, ...] = field(default=(), repr=False)
    """What each tower does for it, in the order of the slot's matrices; empty before it is measured."""
    input_offset: int | None = None
    """Where its input is or will be in the input arena, while it holds space there."""
    slot: Slot | None = None
    """The slot that it holds until it has filled it."""
    engine: int = -1
    """The engine in whose arena its slot is, once it had one."""
    attempts: int = 0
    """How often an engine died while it ran something of it."""
    prepare_started_at: float = 0.0
    prepared_at: float = 0.0
    prepare_seconds: float = 0.0
    encode_started_at: float = 0.0

    @property
    def place(self) -> tuple[int, int, int]:
        """Its place among those that wait for space: oldest prompt first, then in the order of the prompt's parts."""
        return (self.prompt.order, self.item.part_idx, self.key)

    @property
    def media_bytes(self) -> int:
        """Bytes of its media files."""
        return sum(map(len, self.files))

    @property
    def input_bytes(self) -> int:
        """Bytes of its input; 0 before it is measured."""
        return self.forwards[-1].input.nbytes if self.forwards else 0

    @property
    def at_engine(self) -> bool:
        """An engine has something of it in a batch, and may read its input and write its slot."""
        return any(forward.state is ForwardState.SENT for forward in self.forwards)

    @property
    def encoded(self) -> bool:
        """All its forwards have come back."""
        return all(forward.state is ForwardState.DONE for forward in self.forwards)

    def measure(self, layout: EmbeddingChunk, inputs: Iterable[ModelInput]) -> None:
        """A media worker knows its shape."""
        self.layout = layout
        self.forwards = tuple(Forward(self, index, taken) for index, taken in enumerate(inputs))

    def move(self, stage: PartState) -> None:
        """Goes on to a stage that may follow."""
        if self.ended or stage not in TRANSITIONS[self.stage]:
            raise AssertionError(f"computation {self.key} cannot go from {self.stage} to {stage}")
        self.stage = stage
