"""What the runtime is asked to do, already validated and free of gRPC."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from epd.encoder.v1.encoder_service_pb2 import CachePolicy, Delivery
from epd.encoder.v1.media_pb2 import MediaItem


@dataclass(frozen=True)
class ItemCommand:
    """One media item to encode."""

    item: MediaItem
    """The item without its bytes: ``data`` and ``frames`` are cleared."""
    files: tuple[bytes, ...]
    """The media files: one, or the frames of a frame sequence. None for other sources."""
    digest: bytes | None = None
    """The media digest of the files (docs/contract.md), where it was cheap to compute; None: it is still to be."""

    @property
    def media_bytes(self) -> int:
        """Bytes of the files."""
        return sum(map(len, self.files))


@dataclass(frozen=True)
class EncodeCommand:
    """One ``Encode`` call."""

    identity: str
    """Who calls, as authenticated; scopes all ids. Empty: nobody in particular."""
    request_id: str
    prompt_id: str
    num_parts: int
    items: tuple[ItemCommand, ...]
    delivery: Delivery
    receivers: tuple[str, ...]
    """For RECEIVERS their names; for CALLER one empty name; for CACHE_ONLY none."""
    priority: int
    cache_policy: CachePolicy
    cache_salt: bytes
    expected_fingerprint: bytes
    lease_ttl: float | None
    """Seconds. None: the default."""
    deadline: float | None
    """When the caller stops waiting, on the clock of the runtime. None: never."""
    skip_layout: bool
    engine: int | None = None
    """The only engine that may run it. None: any. For the canary."""


@dataclass(frozen=True)
class AcquireCommand:
    """One ``Acquire`` call."""

    identity: str
    content_key: bytes
    receivers: tuple[str, ...]
    """Who gets a lease. None: the caller only looks."""
    prompt_id: str
    part_idx: int
    num_parts: int
    lease_ttl: float | None
    """Seconds. None: the default."""


@dataclass(frozen=True)
class SubscribeCommand:
    """One ``Subscribe`` call."""

    identity: str
    receiver: str
    incarnation: int
    """Grows with every life of the receiver."""


@dataclass(frozen=True)
class CancelCommand:
    """What to cancel."""

    identity: str
    kind: Literal["request", "prompt"]
    id: str
