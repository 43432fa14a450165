"""The brain: connects requests, preparation, encoding and leases. Pure; the time is passed in, the hands are ports.

Every method is a thing that happened: a call, a report of a child, a death, a timer. Each ends with
:meth:`Scheduler._pump`, which starts everything that can start now. So there is no state in which work could run and
nobody starts it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.admission import Admission
from encoder_svc.runtime.chunks import ChunkWriter
from encoder_svc.runtime.commands import CancelCommand, EncodeCommand
from encoder_svc.runtime.encoding import EncodedPart, Encoding, Engine, EngineHands
from encoder_svc.runtime.events import ChunkEvent
from encoder_svc.runtime.leases import Lease, LeaseState, LeaseTable
from encoder_svc.runtime.parts import Part, PartState
from encoder_svc.runtime.preparation import MediaHands, Preparation
from encoder_svc.runtime.requests import Request, RequestTable, Sink
from encoder_svc.runtime.slots import Slot, SlotState
from encoder_svc.runtime.timers import Timers
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2 import ReadOutcome
from epd.internal.v1.engine_pb2 import BatchDone, EngineReady
from epd.internal.v1.media_worker_pb2 import ModelInput


class Hands(MediaHands, EngineHands, Protocol):
    """The children, as the scheduler commands them."""

    def verify(self, engine: int, query: int, payload_offset: int, nbytes: int) -> None:
        """Sends ``VerifySlot``."""
        ...


class Observer(Protocol):
    """Who counts what happens, where it happens."""

    def request_admitted(self) -> None:
        """A request came in."""
        ...

    def request_refused(self, reason: Reason) -> None:
        """A request was refused as a whole."""
        ...

    def part_ended(self, state: PartState, reason: Reason | None) -> None:
        """A part had its end."""
        ...


@dataclass(frozen=True)
class Rules:
    """What the scheduler decides by."""

    prepare_seconds: float
    space_seconds: float
    lease_seconds: float
    max_lease_seconds: float
    prompt_bytes: int
    """Payload bytes that the parts of one prompt may take in an arena."""
    max_queued_parts: int
    max_queued_bytes: int
    batches_ahead: int
    input_bytes: int


class Scheduler:
    """All bookkeeping of one server.

    Args:
        rules: what it decides by.
        engines: their tables.
        hands: the children.
        chunks: makes the chunks.
        observer: counts.
    """

    def __init__(
        self, rules: Rules, engines: Sequence[Engine], hands: Hands, chunks: ChunkWriter, observer: Observer
    ) -> None:
        self._rules = rules
        self._hands = hands
        self._chunks = chunks
        self._observer = observer
        self.timers = Timers()
        self.requests = RequestTable(self._part_ended)
        self.admission = Admission(rules.max_queued_parts, rules.max_queued_bytes)
        self.leases = LeaseTable(self.timers, self._slot_unleased)
        self.preparation = Preparation(
            hands, rules.input_bytes, rules.prepare_seconds, rules.space_seconds, self.timers, self
        )
        self.encoding = Encoding(hands, engines, rules.batches_ahead, rules.space_seconds, self.timers, self)
        self.draining = False
        self._model: EngineReady | None = None
        self._queries = count(1)
        self._verifying: dict[int, Slot] = {}

    # What callers ask.

    def submit(self, command: EncodeCommand, sink: Sink, now: float) -> Request:
        """Admits a request and starts it.

        Raises:
            ServiceError: it is refused as a whole.
        """
        try:
            request = self._admit(command, sink, now)
        except ServiceError as error:
            self._observer.request_refused(error.reason)
            raise
        self._observer.request_admitted()
        for part in request.parts:
            self.preparation.enqueue(part)
        if command.deadline is not None:
            request.deadline = self.timers.at(command.deadline, lambda at: self._deadline_passed(request, at))
        self._pump(now)
        return request

    def abandon(self, request: Request, now: float) -> None:
        """The caller is gone: cancels what is not READY and tells nobody."""
        request.sink = None
        self._cancel(request, now)
        self._pump(now)

    def cancel(self, command: CancelCommand, now: float) -> tuple[int, int]:
        """Cancels what is not READY and tells the callers. Returns the live requests that it found, and the parts."""
        if command.kind == "request":
            request = self.requests.request(command.identity, command.id)
            requests = [request] if request is not None else []
        else:
            prompt = self.requests.prompt(command.identity, command.id)
            requests = list(prompt.requests.values()) if prompt is not None else []
        parts = sum(self._cancel(request, now) for request in requests)
        self._pump(now)
        return len(requests), parts

    def release(
        self, leases: Sequence[tuple[bytes, ReadOutcome]], now: float
    ) -> list[tuple[Lease | LeaseState | None, LeaseState | None]]:
        """Gives leases back. For each: what it was before, and what it is now."""
        answers: list[tuple[Lease | LeaseState | None, LeaseState | None]] = []
        for lease_id, outcome in leases:
            found = self.leases.find(lease_id, now)
            if isinstance(found, Lease):
                if outcome == ReadOutcome.READ_OUTCOME_CORRUPT and found.slot.leases > 1:
                    self._verify(found)
                self.leases.release(found)
                answers.append((found, LeaseState.RELEASED))
            else:
                answers.append((found, found))
        self._pump(now)
        return answers

    def renew(self, lease_id: bytes, ttl: float | None, now: float) -> Lease | LeaseState | None:
        """Extends a lease. Returns it, or how it ended."""
        found = self.leases.find(lease_id, now)
        if isinstance(found, Lease):
            self.leases.renew(found, self._lease_ttl(ttl), now)
        return found

    def live_lease(self, lease_id: bytes, now: float) -> Lease:
        """The lease, for a reader.

        Raises:
            ServiceError: it is not alive.
        """
        found = self.leases.find(lease_id, now)
        if isinstance(found, Lease):
            return found
        raise ServiceError(*_DEAD_LEASE[found])

    # What children report.

    def media_worker_ready(self, worker: int, now: float) -> None:
        """A media worker takes items."""
        self.preparation.worker_ready(worker)
        self._pump(now)

    def media_worker_lost(self, worker: int, now: float) -> None:
        """A media worker died."""
        self.preparation.worker_lost(worker, now)
        self._pump(now)

    def measured(self, worker: int, key: int, layout: EmbeddingChunk, model_input: ModelInput, now: float) -> None:
        """A media worker knows an item's shape."""
        self.preparation.measured(worker, key, layout, model_input, now)
        self._pump(now)

    def prepared(self, worker: int, key: int, seconds: float, now: float) -> None:
        """A media worker has written an item's input."""
        self.preparation.prepared(worker, key, seconds, now)
        self._pump(now)

    def prepare_failed(self, worker: int, key: int, error: ServiceError, now: float) -> None:
        """A media worker cannot prepare an item, or has dropped it."""
        self.preparation.failed(worker, key, error, now)
        self._pump(now)

    def engine_ready(self, index: int, ready: EngineReady, now: float) -> None:
        """An engine takes batches."""
        self._model = ready
        self.encoding.engine_ready(index, ready)
        self._pump(now)

    def engine_lost(self, index: int, now: float) -> None:
        """An engine died: the embeddings in its arena are gone for their readers."""
        self.leases.revoke_engine(index)
        # What it was asked about slots that are free now, it will not answer.
        self._verifying = {query: slot for query, slot in self._verifying.items() if slot.state is SlotState.FILLED}
        self.encoding.engine_lost(index, now)
        self._pump(now)

    def batch_started(self, index: int, batch_id: int) -> None:
        """An engine began a forward."""
        self.encoding.batch_started(index, batch_id)

    def batch_done(self, index: int, done: BatchDone, now: float) -> None:
        """An engine has run a batch."""
        self.encoding.batch_done(index, done, now)
        self._pump(now)

    def slot_verified(self, query: int, checksum: int, now: float) -> None:
        """An engine has computed a slot's checksum again. A damaged slot is taken from its readers."""
        slot = self._verifying.pop(query, None)
        # Its memory may have another use by now: that is another slot.
        if slot is not None and slot.state is SlotState.FILLED and checksum != slot.checksum:
            self.leases.revoke_slot(slot)
        self._pump(now)

    def tick(self, now: float) -> None:
        """Runs what is due."""
        self._pump(now)

    # What the two halves of the pipeline tell.

    def part_measured(self, part: Part) -> None:
        """See :class:`PreparationListener`."""
        assert part.layout is not None
        limit = min(self._rules.prompt_bytes, self.encoding.capacity)
        total = part.request.prompt.slot_bytes + part.layout.nbytes
        if total > limit:
            raise ServiceError(
                Reason.PROMPT_TOO_LARGE,
                f"the embeddings of this prompt need {total} bytes and one prompt may take {limit}; ask for fewer "
                "pixels or split the prompt, or let the operator raise arena_bytes or prompt_arena_share",
            )
        part.request.prompt.slot_bytes = total

    def part_prepared(self, part: Part, now: float) -> None:
        """See :class:`PreparationListener`."""
        self._drop_files(part)
        if not part.request.command.skip_layout:
            fingerprint = self._model.model.compatibility_fingerprint if self._model is not None else b""
            part.request.tell(ChunkEvent(self._chunks.layout(part, fingerprint)))
        self.encoding.enqueue(part, now)

    def part_encoded(self, result: EncodedPart, now: float) -> None:
        """See :class:`EncodingListener`."""
        part = result.part
        engine = self.encoding.engines[result.engine]
        assert part.slot is not None
        assert engine.ready is not None
        engine.slots.fill(part.slot, result.checksum)
        command = part.request.command
        ttl = self._lease_ttl(command.lease_ttl)
        leases = [self.leases.grant(part.slot, result.engine, receiver, ttl, now) for receiver in command.receivers]
        chunk = self._chunks.ready(result, engine.ready, leases, now)
        if not leases:
            engine.slots.free(part.slot)
        part.slot = None
        self.requests.end_ready(part, chunk, now)

    def part_failed(self, part: Part, error: ServiceError, now: float) -> None:
        """See :class:`PreparationListener` and :class:`EncodingListener`."""
        self.requests.end_failed(part, error, now)
        self._observer.part_ended(PartState.FAILED, error.reason)

    def input_free(self, part: Part) -> None:
        """See :class:`EncodingListener`."""
        self.preparation.free_input(part)

    # Inside.

    def _admit(self, command: EncodeCommand, sink: Sink, now: float) -> Request:
        if self.draining:
            raise ServiceError(Reason.SHUTTING_DOWN, "the server is stopping; ask another encoder", retry_after=1.0)
        if self._model is None:
            raise ServiceError(
                Reason.NOT_READY, "the model is still loading; wait until health says SERVING", retry_after=1.0
            )
        model = self._model.model
        if command.expected_fingerprint not in (b"", model.compatibility_fingerprint):
            raise ServiceError(
                Reason.FINGERPRINT_MISMATCH,
                "this encoder's embeddings are of other weights, dtype, preprocessing or width than the receiver "
                "expects; GetServerInfo tells its compatibility_fingerprint",
                field="expected_fingerprint",
            )
        for index, item in enumerate(command.items):
            if item.item.modality not in model.modalities:
                raise ServiceError(
                    Reason.MODALITY_UNSUPPORTED,
                    f"{model.model_type} does not encode this modality here; GetServerInfo tells which it does",
                    field=f"items[{index}].modality",
                )
        if command.deadline is not None and command.deadline <= now:
            raise ServiceError(Reason.DEADLINE_EXCEEDED, "the deadline passed before the request was admitted")
        media_bytes = sum(len(file) for item in command.items for file in item.files)
        self.admission.enter(len(command.items), media_bytes)
        try:
            return self.requests.admit(command, sink, self._chunks.encoder(None), now)
        except ServiceError:
            self.admission.leave(len(command.items), media_bytes)
            raise

    def _pump(self, now: float) -> None:
        # What is due comes first, even if the loop was late: nothing is started for a part whose time is over.
        self.timers.run_due(now)
        self.encoding.pump(now)
        self.preparation.pump(now)

    def _cancel(self, request: Request, now: float) -> int:
        parts = [part for part in request.parts if not part.ended]
        for part in parts:
            self.requests.end_cancelled(part, now)
        return len(parts)

    def _deadline_passed(self, request: Request, now: float) -> None:
        for part in request.parts:
            if not part.ended:
                message = "the deadline passed before the embedding was ready"
                self.part_failed(part, ServiceError(Reason.DEADLINE_EXCEEDED, message), now)

    def _part_ended(self, part: Part, previous: PartState, now: float) -> None:
        self._drop_files(part)
        self.admission.part_ended(now)
        if part.state is not PartState.READY and part.layout is not None:
            part.request.prompt.slot_bytes -= part.layout.nbytes
        if part.state is not PartState.FAILED:
            self._observer.part_ended(part.state, None)
        if previous is PartState.PREPARED:
            self.encoding.discard(part)
        if previous in (PartState.QUEUED, PartState.PREPARING, PartState.PREPARED):
            self.preparation.discard(part)

    def _drop_files(self, part: Part) -> None:
        self.admission.media_dropped(sum(map(len, part.files)))
        part.files = ()

    def _slot_unleased(self, lease: Lease) -> None:
        self.encoding.engines[lease.engine].slots.free(lease.slot)

    def _lease_ttl(self, asked: float | None) -> float:
        return min(asked or self._rules.lease_seconds, self._rules.max_lease_seconds)

    def _verify(self, lease: Lease) -> None:
        """A reader saw a wrong checksum while others still read: finds out whether the slot is damaged."""
        query = next(self._queries)
        self._verifying[query] = lease.slot
        self._hands.verify(lease.engine, query, lease.slot.payload_offset, lease.slot.nbytes)


def new_instance_id() -> str:
    """Names one life of a server."""
    return secrets.token_hex(16)


_DEAD_LEASE: dict[LeaseState | None, tuple[Reason, str]] = {
    None: (
        Reason.LEASE_UNKNOWN,
        "no such lease; leases are named in READY chunks and forgotten some time after they end",
    ),
    LeaseState.RELEASED: (Reason.LEASE_RELEASED, "the lease was given back before; ask for the embedding again"),
    LeaseState.EXPIRED: (
        Reason.LEASE_EXPIRED,
        "the lease's time ran out; renew leases in time, or ask for a longer lease_ttl",
    ),
    LeaseState.REVOKED: (
        Reason.LEASE_REVOKED,
        "the encoder took the lease back since its engine died; ask for the embedding again",
    ),
}
