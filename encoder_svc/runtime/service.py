"""What ``rpc/`` may ask of the runtime. Every call returns at once and belongs to the event loop's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from encoder_svc.runtime.commands import AcquireCommand, CancelCommand, EncodeCommand, SubscribeCommand
from encoder_svc.runtime.events import Event, SubscriptionEvent
from encoder_svc.runtime.uploads import Upload
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2 import GetServerInfoResponse, LeaseState, ReadOutcome

Sink = Callable[[Event], None]
"""Takes the events of one request, in order, called on the event loop. It must not block or raise."""


@dataclass(frozen=True)
class CancelOutcome:
    """What a cancel did."""

    requests: int
    parts: int


@dataclass(frozen=True)
class LeaseOutcome:
    """What became of one lease."""

    state: LeaseState
    ttl: float
    """Seconds that it lives from now. 0 if it is not alive."""


@dataclass(frozen=True)
class LoadFigures:
    """How busy a server is."""

    utilization: float
    """The share of the last seconds in which the engines were busy, plus the patches of parts that have not ended over
    those that the engines can hold at once. Above 1: parts wait. Never 0."""
    parts_per_second: float
    """Parts that end, as a mean over the last seconds."""
    patches: int = 0
    """The cost of all parts that have not ended; a mel frame counts by the share of a batch that it fills."""


@dataclass(frozen=True)
class FinishedUpload:
    """A file that was sent ahead and is here."""

    id: str
    sha256: bytes
    seconds: float
    """How long it is kept."""


class EncodeCall(Protocol):
    """One admitted request."""

    def abandon(self, untold: Sequence[Event]) -> None:
        """The caller is gone: cancels the parts that are not READY and tells nobody. Idempotent.

        Args:
            untold: events that the caller was not told of, and never will be. Its own leases in them end.
        """
        ...


class ReceiverSubscription(Protocol):
    """One ``Subscribe`` call."""

    def take(self) -> SubscriptionEvent | None:
        """The next thing to tell the receiver. None: nothing at present.

        Raises:
            ServiceError: the subscription has ended, and all that it had to tell has been taken.
        """
        ...

    def leave(self) -> None:
        """The call is over. Idempotent."""
        ...


class EncoderRuntime(Protocol):
    """The brain, as ``rpc/`` sees it."""

    @property
    def ready(self) -> bool:
        """Requests are taken: at least one engine and one media worker are ready, and the server is not stopping."""
        ...

    def on_readiness(self, listener: Callable[[bool], None]) -> None:
        """Calls ``listener`` with :attr:`ready` now and whenever it changes."""
        ...

    def now(self) -> float:
        """The runtime's clock, in seconds (monotonic)."""
        ...

    def submit(self, command: EncodeCommand, sink: Sink) -> EncodeCall:
        """Admits a request; ``sink`` gets ``Accepted`` before this returns, and what is known by then.

        Raises:
            ServiceError: it is refused as a whole; ``sink`` was not called.
        """
        ...

    def acquire(self, command: AcquireCommand) -> EmbeddingChunk:
        """Leases a cached embedding by its content key, or looks at it.

        Raises:
            ServiceError: it is not here.
        """
        ...

    def take_back(self, chunk: EmbeddingChunk) -> None:
        """The caller was not told of a chunk that it acquired: ends its own lease."""
        ...

    def subscribe(self, command: SubscribeCommand, wake: Callable[[], None]) -> ReceiverSubscription:
        """Begins to tell a named receiver; ``wake`` is called when there is something to take.

        Raises:
            ServiceError: a newer life of the receiver has subscribed, or there are too many receivers.
        """
        ...

    def begin_upload(self, identity: str, total_bytes: int) -> Upload:
        """Reserves room for a file that is sent ahead.

        Raises:
            ServiceError: it is too large, or there is no room now.
        """
        ...

    def add_to_upload(self, upload: Upload, piece: bytes) -> None:
        """Takes the next bytes.

        Raises:
            ServiceError: they are more than announced, or the upload's time is over.
        """
        ...

    def finish_upload(self, upload: Upload, sha256: bytes) -> FinishedUpload:
        """The last piece has come.

        Raises:
            ServiceError: bytes are missing, or are not those that ``sha256`` names, or the upload's time is over.
        """
        ...

    def abandon_upload(self, upload: Upload) -> None:
        """Its sender is gone. Of no effect on one that is finished."""
        ...

    def cancel(self, command: CancelCommand) -> CancelOutcome:
        """Cancels the parts of the target that are not READY; their requests are told."""
        ...

    def release(self, leases: Sequence[tuple[bytes, ReadOutcome]]) -> list[LeaseState]:
        """Gives leases back; HELD means that it was alive until now."""
        ...

    def renew(self, leases: Sequence[bytes], ttl: float | None) -> list[LeaseOutcome]:
        """Extends leases. ``ttl`` in seconds; None is the default."""
        ...

    def slot_nbytes(self, lease: bytes) -> int:
        """The payload bytes of a leased slot.

        Raises:
            ServiceError: the lease is not alive.
        """
        ...

    def read_slot(self, lease: bytes, offset: int, length: int) -> memoryview:
        """A view of a leased slot's payload. It is valid only until the event loop runs on: copy it at once.

        Raises:
            ServiceError: the lease is not alive, or the range is not in the payload.
        """
        ...

    def load(self) -> LoadFigures:
        """How busy the server is."""
        ...

    def describe(self) -> GetServerInfoResponse:
        """What the server is, can do, and is doing."""
        ...
