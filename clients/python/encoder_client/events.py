"""What happens to a call, in the order in which the encoder tells it.

Of a call: :class:`Accepted`, then for each part a :class:`Layout` (unless left out) and exactly one of :class:`Ready`,
:class:`PartFailed`, :class:`PartCancelled`; then :class:`Complete`.

Of a subscription: for each part the same, then maybe :class:`LeaseRevoked`; and :class:`Synced`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from encoder_client.errors import ChunkError, EncoderError, from_status
from epd.encoder.v1 import encoder_service_pb2 as service
from epd.encoder.v1.embedding_pb2 import CHUNK_STATE_LAYOUT, CHUNK_STATE_READY, EmbeddingChunk, EncoderRef


@dataclass(frozen=True)
class Accepted:
    """The call is admitted: every one of its parts will end."""

    request_id: str
    prompt_id: str
    num_parts: int
    encoder: EncoderRef


@dataclass(frozen=True)
class Layout:
    """A part's shape is known: enough to expand placeholders and to reserve memory."""

    chunk: EmbeddingChunk

    def __repr__(self) -> str:
        return _shown("Layout", self.chunk)


@dataclass(frozen=True)
class Ready:
    """A part's embedding can be read. Terminal."""

    chunk: EmbeddingChunk

    def __repr__(self) -> str:
        return _shown("Ready", self.chunk)


@dataclass(frozen=True)
class PartFailed:
    """A part failed. Terminal."""

    prompt_id: str
    request_id: str
    part_idx: int
    error: EncoderError


@dataclass(frozen=True)
class PartCancelled:
    """A part was cancelled before it was READY. Terminal."""

    prompt_id: str
    request_id: str
    part_idx: int


@dataclass(frozen=True)
class Complete:
    """Every part has ended. The last event."""

    ready: int
    failed: int
    cancelled: int
    from_cache: int
    total_seconds: float


@dataclass(frozen=True)
class LeaseRevoked:
    """A lease of this receiver ended before it was released: the embedding is gone."""

    prompt_id: str
    request_id: str
    """Empty for a lease that ``Acquire`` granted."""
    part_idx: int
    error: EncoderError


@dataclass(frozen=True)
class Synced:
    """A subscription has told all that waited when its connection was made."""

    events: int


Event = Accepted | Layout | Ready | PartFailed | PartCancelled | Complete
SubscriptionEvent = Layout | Ready | PartFailed | PartCancelled | LeaseRevoked | Synced


def _shown(kind: str, chunk: EmbeddingChunk) -> str:
    # A chunk's own text holds its leases and slot key, which are secrets and end up in logs.
    return (
        f"{kind}(part {chunk.part_idx} of prompt {chunk.prompt_id!r}: {chunk.token_count} rows, {chunk.nbytes} bytes)"
    )


def events_of(response: service.EncodeResponse) -> Iterator[Event]:
    """Takes a message apart. Kinds of events that this library does not know are left out.

    Raises:
        ChunkError: a chunk is neither LAYOUT nor READY.
    """
    for event in response.events:
        match event.WhichOneof("event"):
            case "accepted":
                told = event.accepted
                yield Accepted(told.request_id, told.prompt_id, told.num_parts, told.encoder)
            case "chunk" if event.chunk.state == CHUNK_STATE_LAYOUT:
                yield Layout(event.chunk)
            case "chunk" if event.chunk.state == CHUNK_STATE_READY:
                yield Ready(event.chunk)
            case "chunk":
                raise ChunkError("state", f"{event.chunk.state} is neither LAYOUT nor READY")
            case "part_failed":
                failed = event.part_failed
                yield PartFailed(failed.prompt_id, failed.request_id, failed.part_idx, from_status(failed.status))
            case "part_cancelled":
                gone = event.part_cancelled
                yield PartCancelled(gone.prompt_id, gone.request_id, gone.part_idx)
            case "complete":
                done = event.complete
                total = done.total.ToNanoseconds() / 1e9
                yield Complete(done.ready, done.failed, done.cancelled, done.from_cache, total)


def layout_of(ready: EmbeddingChunk) -> EmbeddingChunk:
    """The LAYOUT chunk that a READY chunk would have followed."""
    layout = EmbeddingChunk()
    layout.CopyFrom(ready)
    layout.state = CHUNK_STATE_LAYOUT
    for name in ("checksum", "generation", "slot_key", "leases", "locators", "from_cache", "timings"):
        layout.ClearField(name)
    layout.encoder.ClearField("engine_boot_id")
    return layout
