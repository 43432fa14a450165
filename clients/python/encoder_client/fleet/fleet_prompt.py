"""What a prompt asks of a fleet, and who is told what becomes of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict

from encoder_client.errors import EncoderError
from encoder_client.events import Accepted
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2 import CachePolicy, Delivery
from epd.encoder.v1.media_pb2 import MediaItem


class EncodeOptions(TypedDict):
    """What all calls of a prompt have in common; as in :meth:`EncoderClient.encode`."""

    receivers: Sequence[str]
    delivery: Delivery
    priority: int
    cache_policy: CachePolicy
    cache_salt: bytes
    lease_ttl: float | None
    skip_layout: bool


@dataclass(frozen=True)
class Prompt:
    """What is asked for."""

    prompt_id: str
    request_id: str
    """Its calls are named so, with a number behind it."""
    num_parts: int
    items: Mapping[int, MediaItem]
    """By ``part_idx``."""
    deadlines: Mapping[int, float]
    """By ``part_idx``, in the time of the event loop; ``inf`` for none."""
    options: EncodeOptions
    holders: Mapping[int, str]
    """By ``part_idx``: the instance that the caller knows to have the content."""


class Sink(Protocol):
    """Who is told what becomes of the parts."""

    def accepted(self, accepted: Accepted) -> None:
        """An encoder took some parts."""

    def check(self, chunk: EmbeddingChunk) -> None:
        """Looks at a LAYOUT or READY chunk before it counts.

        Raises:
            ChunkError: it contradicts what was told of the part before.
        """

    def layout(self, chunk: EmbeddingChunk) -> None:
        """The shape of a part is known, maybe not for the first time."""

    def ready(self, chunk: EmbeddingChunk) -> None:
        """A part is READY."""

    def failed(self, part_idx: int, error: EncoderError) -> None:
        """A part has failed for good."""

    def cancelled(self, part_idx: int) -> None:
        """A part was cancelled at its encoder."""

    def refused(self, error: EncoderError) -> None:
        """Nothing can be asked of this fleet."""
