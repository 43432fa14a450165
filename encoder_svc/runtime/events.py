"""What happens to a request, as its caller and its receivers are told. ``rpc/`` makes messages of the contract of it.

Order: :class:`Accepted`, then for each part :class:`ChunkEvent` (LAYOUT, unless left out or cached) and one of
:class:`ChunkEvent` (READY), :class:`PartFailed`, :class:`PartCancelled`; then :class:`Completed`.

A receiver is told the newest of these of each part that is addressed to it; and :class:`LeaseRevoked` if its lease ends
before it was released.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from encoder_svc.errors import ServiceError
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, EncoderRef


@dataclass(frozen=True)
class Accepted:
    """The request is admitted."""

    request_id: str
    prompt_id: str
    num_parts: int
    encoder: EncoderRef


@dataclass(frozen=True)
class ChunkEvent:
    """A part's LAYOUT or READY."""

    chunk: EmbeddingChunk


@dataclass(frozen=True)
class PartFailed:
    """A part failed. Terminal."""

    prompt_id: str
    request_id: str
    part_idx: int
    error: ServiceError


@dataclass(frozen=True)
class PartCancelled:
    """A part was cancelled before it was READY. Terminal."""

    prompt_id: str
    request_id: str
    part_idx: int


@dataclass(frozen=True)
class Completed:
    """Every part has ended. The last event."""

    ready: int
    failed: int
    cancelled: int
    from_cache: int
    total_seconds: float


@dataclass(frozen=True)
class LeaseRevoked:
    """A lease of a named receiver ended before it was released."""

    lease_id: bytes = field(repr=False)
    prompt_id: str
    request_id: str
    part_idx: int
    error: ServiceError


@dataclass(frozen=True)
class Synced:
    """A subscription has told all that was there when it began."""

    events: int


Event = Accepted | ChunkEvent | PartFailed | PartCancelled | Completed
SubscriptionEvent = ChunkEvent | PartFailed | PartCancelled | LeaseRevoked | Synced
