"""What happens to a request, as its caller is told. ``rpc/`` turns them into messages of the contract.

Order: :class:`Accepted`, then for each part :class:`ChunkEvent` (LAYOUT, unless left out or cached) and one of
:class:`ChunkEvent` (READY), :class:`PartFailed`, :class:`PartCancelled`; then :class:`Completed`.
"""

from __future__ import annotations

from dataclasses import dataclass

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


Event = Accepted | ChunkEvent | PartFailed | PartCancelled | Completed
