"""A runtime that does what a test tells it, to look at the translation in ``rpc/`` alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from encoder_svc.errors import ServiceError
from encoder_svc.runtime.commands import AcquireCommand, CancelCommand, EncodeCommand, SubscribeCommand
from encoder_svc.runtime.events import Accepted, Event, SubscriptionEvent
from encoder_svc.runtime.service import CancelOutcome, FinishedUpload, LeaseOutcome, LoadFigures, Sink
from encoder_svc.runtime.uploads import Upload
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, EncoderRef
from epd.encoder.v1.encoder_service_pb2 import GetServerInfoResponse, LeaseState, ReadOutcome


class ScriptedCall:
    """A request that ends when the test says so."""

    def __init__(self) -> None:
        self.abandoned = asyncio.Event()
        self.untold: list[Event] = []

    def abandon(self, untold: Sequence[Event]) -> None:
        self.untold.extend(untold)
        self.abandoned.set()


class ScriptedSubscription:
    """A subscription that tells what the test puts into it."""

    def __init__(self) -> None:
        self.events: list[SubscriptionEvent | ServiceError] = []
        self.wake: Callable[[], None] = lambda: None
        self.left = asyncio.Event()

    def tell(self, event: SubscriptionEvent | ServiceError) -> None:
        """There is something to take."""
        self.events.append(event)
        self.wake()

    def take(self) -> SubscriptionEvent | None:
        event = self.events.pop(0) if self.events else None
        if isinstance(event, ServiceError):
            raise event
        return event

    def leave(self) -> None:
        self.left.set()


class ScriptedRuntime:
    """An ``EncoderRuntime`` that keeps what it was given."""

    def __init__(self) -> None:
        self.ready = True
        self.listeners: list[Callable[[bool], None]] = []
        self.commands: list[EncodeCommand] = []
        self.cancels: list[CancelCommand] = []
        self.acquired: list[AcquireCommand] = []
        self.taken_back: list[EmbeddingChunk] = []
        self.subscribed: list[SubscribeCommand] = []
        self.subscription = ScriptedSubscription()
        self.uploads: list[Upload] = []
        self.pieces: list[bytes] = []
        self.abandoned: list[Upload] = []
        self.sinks: list[Sink] = []
        self.call = ScriptedCall()
        self.submitted = asyncio.Event()
        self.fault: Exception | None = None
        self.payload = b""
        self.reads: list[tuple[int, int]] = []
        self.read_faults: dict[int, Exception] = {}

    def on_readiness(self, listener: Callable[[bool], None]) -> None:
        self.listeners.append(listener)
        listener(self.ready)

    def now(self) -> float:
        return 1000.0

    def submit(self, command: EncodeCommand, sink: Sink) -> ScriptedCall:
        self._fail()
        self.commands.append(command)
        self.sinks.append(sink)
        sink(Accepted(command.request_id, command.prompt_id, command.num_parts, EncoderRef(instance_id="me")))
        self.submitted.set()
        return self.call

    def acquire(self, command: AcquireCommand) -> EmbeddingChunk:
        self._fail()
        self.acquired.append(command)
        return EmbeddingChunk(prompt_id=command.prompt_id)

    def take_back(self, chunk: EmbeddingChunk) -> None:
        self.taken_back.append(chunk)

    def subscribe(self, command: SubscribeCommand, wake: Callable[[], None]) -> ScriptedSubscription:
        self._fail()
        self.subscribed.append(command)
        self.subscription.wake = wake
        return self.subscription

    def begin_upload(self, identity: str, total_bytes: int) -> Upload:
        self._fail()
        self.uploads.append(Upload(identity, total_bytes))
        return self.uploads[-1]

    def add_to_upload(self, upload: Upload, piece: bytes) -> None:
        self.pieces.append(piece)

    def finish_upload(self, upload: Upload, sha256: bytes) -> FinishedUpload:
        return FinishedUpload(upload.id, sha256, 60.0)

    def abandon_upload(self, upload: Upload) -> None:
        self.abandoned.append(upload)

    def cancel(self, command: CancelCommand) -> CancelOutcome:
        self.cancels.append(command)
        return CancelOutcome(requests=1, parts=2)

    def release(self, leases: Sequence[tuple[bytes, ReadOutcome]]) -> list[LeaseState]:
        return [LeaseState.LEASE_STATE_HELD if lease else LeaseState.LEASE_STATE_UNKNOWN for lease, _ in leases]

    def renew(self, leases: Sequence[bytes], ttl: float | None) -> list[LeaseOutcome]:
        return [LeaseOutcome(LeaseState.LEASE_STATE_HELD, ttl or 7.5) for _ in leases]

    def slot_nbytes(self, lease: bytes) -> int:
        self._fail()
        return len(self.payload)

    def read_slot(self, lease: bytes, offset: int, length: int) -> memoryview:
        fault = self.read_faults.get(offset)
        if fault is not None:
            raise fault
        self.reads.append((offset, length))
        return memoryview(self.payload)[offset : offset + length]

    def load(self) -> LoadFigures:
        return LoadFigures(utilization=0.5, parts_per_second=2.0)

    def describe(self) -> GetServerInfoResponse:
        self._fail()
        return GetServerInfoResponse(encoder=EncoderRef(instance_id="me"))

    def _fail(self) -> None:
        if self.fault is not None:
            raise self.fault
