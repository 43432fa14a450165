"""The brain: connects requests, the store, preparation, encoding and leases.

Pure: the time is passed in, and the hands are ports.

Every method is a thing that happened: a call, a report of a child, a death, a timer. Each ends with
:meth:`Scheduler._pump`, which starts everything that can start now. So there is no state in which work could run and
nobody starts it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.admission import Admission
from encoder_svc.runtime.canary import Canary
from encoder_svc.runtime.chunks import ChunkWriter
from encoder_svc.runtime.commands import AcquireCommand, CancelCommand, EncodeCommand, SubscribeCommand
from encoder_svc.runtime.computations import Computation
from encoder_svc.runtime.contents import Contents, SourceHands
from encoder_svc.runtime.delivery import EmbeddingDelivery, VerifyHands
from encoder_svc.runtime.encoding import EncodedItem, Encoding, EngineHands
from encoder_svc.runtime.engine_table import Batch, Engine
from encoder_svc.runtime.events import ChunkEvent, Event
from encoder_svc.runtime.leases import Lease, LeaseState, LeaseTable
from encoder_svc.runtime.observer import Observer
from encoder_svc.runtime.parts import Part, PartState
from encoder_svc.runtime.preparation import MediaHands, Preparation
from encoder_svc.runtime.prompt_share import PromptShare
from encoder_svc.runtime.requests import Request, RequestTable, Sink
from encoder_svc.runtime.rules import Rules
from encoder_svc.runtime.service import LoadFigures
from encoder_svc.runtime.slots import ContentName, Slot
from encoder_svc.runtime.store import Store
from encoder_svc.runtime.subscriptions import Subscription, Subscriptions, names_receivers
from encoder_svc.runtime.timers import Timers
from encoder_svc.runtime.uploads import Upload, Uploads
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2 import ReadOutcome
from epd.internal.v1.engine_pb2 import BatchDone, EngineReady
from epd.internal.v1.media_worker_pb2 import ModelInput, Tower

_LEAST_UTILIZATION = 1e-3
"""Balancers take 0 for unknown."""


class Hands(MediaHands, EngineHands, VerifyHands, SourceHands, Protocol):
    """Everybody whom the scheduler commands."""


class Scheduler:
    """All bookkeeping of one server.

    Args:
        rules: what it decides by.
        engines: their tables.
        hands: the children, and who brings media.
        chunks: makes the chunks.
        observer: counts.
    """

    def __init__(
        self, rules: Rules, engines: Sequence[Engine], hands: Hands, chunks: ChunkWriter, observer: Observer
    ) -> None:
        self._hands = hands
        self._chunks = chunks
        self._observer = observer
        self.timers = Timers()
        self.requests = RequestTable(self._part_ended)
        self.admission = Admission(rules.max_queued_parts, rules.max_queued_bytes, rules.max_queued_patches)
        self.uploads = Uploads(rules.max_upload_bytes, rules.max_uploads_bytes, rules.upload_seconds, self.timers)
        self.store = Store([engine.slots for engine in engines])
        self.delivery = EmbeddingDelivery(engines, hands, chunks, self.timers, rules)
        self.preparation = Preparation(
            hands, rules.input_bytes, rules.prepare_seconds, rules.space_seconds, self.timers, self
        )
        self.encoding = Encoding(
            hands, engines, rules.batches_ahead, rules.space_seconds, rules.forward_seconds, self.timers, self
        )
        self._contents = Contents(hands, self.store, self.uploads, self.admission, observer, self)
        self._prompt_share = PromptShare(rules.prompt_bytes, self.encoding.capacity)
        self.canary = Canary(self.encoding.engines, self.submit, rules.canary_seconds, self.timers)
        self._batches_ahead = rules.batches_ahead
        self.draining = False
        self._model: EngineReady | None = None

    @property
    def leases(self) -> LeaseTable:
        """All leases."""
        return self.delivery.leases

    @property
    def subscriptions(self) -> Subscriptions:
        """All named receivers."""
        return self.delivery.subscriptions

    @property
    def ready(self) -> bool:
        """Requests are taken: an engine and a media worker are ready, and the server is not stopping."""
        return self.encoding.ready and self.preparation.ready and not self.draining

    def load(self, now: float) -> LoadFigures:
        """How busy the server is."""
        engines = self.encoding.engines
        busy = sum(engine.busy.at(now) for engine in engines) / len(engines)
        budgets = (engine.batcher.budget(Tower.TOWER_VISION) for engine in self.encoding.engines)
        waiting = self.admission.patches / (sum(budgets) * self._batches_ahead)
        utilization = max(busy + waiting, _LEAST_UTILIZATION)
        return LoadFigures(utilization, self.admission.rate(now), self.admission.patches)

    # What callers ask.

    def fail_all(self, now: float) -> None:
        """The server stops: every part that has not ended fails."""
        error = ServiceError(Reason.SHUTTING_DOWN, "the server stopped before the embedding was ready", retry_after=1.0)
        for request in self.requests.live():
            for part in request.parts:
                if not part.ended:
                    self._fail(part, error, now)

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
        if command.deadline is not None:
            request.deadline = self.timers.at(command.deadline, lambda at: self._deadline_passed(request, at))
        try:
            for part, item in zip(list(request.parts), command.items, strict=True):
                # Bringing the first can take long enough for the deadline to pass.
                if not part.ended:
                    self._contents.seek(part, item, self._cache_namespace, now)
        except Exception:
            # Its caller hears of this fault, and then nobody is left to hear of its parts.
            request.sink = None
            self._cancel(request, now)
            raise
        self._pump(now)
        return request

    def abandon(self, request: Request, now: float, untold: Sequence[Event] = ()) -> None:
        """The caller is gone: cancels what is not READY, tells nobody, and takes back what it was not told of."""
        request.sink = None
        self._cancel(request, now)
        for event in untold:
            if isinstance(event, ChunkEvent):
                self.delivery.take_back(event.chunk, now)
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

    def acquire(self, command: AcquireCommand, now: float) -> EmbeddingChunk:
        """Leases a cached embedding by its content key, or looks at it.

        Raises:
            ServiceError: it is not here.
        """
        self._check_not_draining()
        slot = self.store.cached(ContentName(command.identity, command.content_key))
        if slot is None:
            raise ServiceError(Reason.CONTENT_UNKNOWN, "no embedding of this content is here; send its media in Encode")
        return self.delivery.acquire(command, slot, now)

    def take_back(self, chunk: EmbeddingChunk, now: float) -> None:
        """The caller was not told of a chunk that it acquired: ends its own lease."""
        self.delivery.take_back(chunk, now)
        self._pump(now)

    def subscribe(self, command: SubscribeCommand, wake: Callable[[], None], now: float) -> Subscription:
        """Begins to tell a named receiver; ``wake`` is called when there is something to take.

        Raises:
            ServiceError: a newer life of it has subscribed, or there are too many receivers.
        """
        subscription = self.delivery.subscribe(command, wake, now)
        self._pump(now)
        return subscription

    def begin_upload(self, identity: str, total_bytes: int, now: float) -> Upload:
        """Reserves room for a file that is sent ahead.

        Raises:
            ServiceError: it is too large, or there is no room now.
        """
        self._check_not_draining()
        return self.uploads.begin(identity, total_bytes, now)

    def release(
        self, leases: Sequence[tuple[bytes, ReadOutcome]], now: float
    ) -> list[tuple[Lease | LeaseState | None, LeaseState | None]]:
        """Gives leases back. For each: what it was before, and what it is now."""
        answers = self.delivery.release(leases, now)
        self._pump(now)
        return answers

    def renew(self, lease_id: bytes, ttl: float | None, now: float) -> Lease | LeaseState | None:
        """Extends a lease. Returns it, or how it ended."""
        return self.delivery.renew(lease_id, ttl, now)

    def live_lease(self, lease_id: bytes, now: float) -> Lease:
        """The lease, for a reader.

        Raises:
            ServiceError: it is not alive.
        """
        return self.delivery.live_lease(lease_id, now)

    # What those who bring media report.

    def sourced(self, key: int, files: tuple[bytes, ...], digest: bytes, seconds: float, now: float) -> None:
        """A part's media are here, and hashed."""
        part = self.requests.part(key)
        if part is None:
            return
        self._contents.sourced(part, files, digest, self._cache_namespace, seconds, now)
        self._pump(now)

    def source_failed(self, key: int, error: ServiceError, now: float) -> None:
        """A part's media cannot be had."""
        part = self.requests.part(key)
        if part is not None:
            self._fail(part, error, now)
        self._pump(now)

    # What children report.

    def media_worker_ready(self, worker: int, now: float) -> None:
        """A media worker takes items."""
        self.preparation.worker_ready(worker)
        self._pump(now)

    def media_worker_lost(self, worker: int, now: float) -> None:
        """A media worker died."""
        self.preparation.worker_lost(worker, now)
        self._pump(now)

    def item_measured(
        self, worker: int, key: int, layout: EmbeddingChunk, inputs: Sequence[ModelInput], now: float
    ) -> None:
        """A media worker knows an item's shape."""
        self.preparation.measured(worker, key, layout, inputs, now)
        self._pump(now)

    def item_prepared(self, worker: int, key: int, seconds: float, now: float) -> None:
        """A media worker has written an item's input."""
        self.preparation.prepared(worker, key, seconds, now)
        self._pump(now)

    def item_dropped(self, worker: int, key: int, now: float) -> None:
        """A media worker gives an item back unprepared, as it was told."""
        self.preparation.dropped(worker, key, now)
        self._pump(now)

    def item_failed(self, worker: int, key: int, error: ServiceError, now: float) -> None:
        """A media worker cannot prepare an item."""
        self.preparation.failed(worker, key, error, now)
        self._pump(now)

    def engine_starting(self, index: int) -> None:
        """The process of an engine runs; it will be ready, or lost."""
        self.encoding.engine_starting(index)

    def engine_ready(self, index: int, ready: EngineReady, now: float) -> None:
        """An engine takes batches."""
        self._model = ready
        self.encoding.engine_ready(index, ready, now)
        self._pump(now)

    def engine_lost(self, index: int, now: float) -> None:
        """An engine died: the embeddings in its arena are gone."""
        self.delivery.engine_lost(index, now)
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
        """An engine has computed a slot's checksum again. A damaged slot is taken from its readers and forgotten."""
        self.delivery.slot_verified(query, checksum, now)
        self._pump(now)

    def tick(self, now: float) -> None:
        """Runs what is due."""
        self._pump(now)

    # What the rooms of the pipeline tell (ContentListener, PreparationListener, EncodingListener).

    def found(self, part: Part, slot: Slot, now: float) -> None:
        """See :class:`ContentListener`."""
        if self._fits_prompt(part, slot.nbytes, now):
            self._deliver(part, slot, None, now)
            self.encoding.engines[slot.engine].slots.settle(slot)

    def joined(self, part: Part, computation: Computation, now: float) -> None:
        """See :class:`ContentListener`."""
        if not computation.files:
            self.admission.media_dropped(part)
        if computation.layout is not None:
            self._tell_layout(part, computation, now)

    def begun(self, computation: Computation) -> None:
        """See :class:`ContentListener`."""
        self.preparation.enqueue(computation)

    def lacking(self, part: Part, error: ServiceError, now: float) -> None:
        """See :class:`ContentListener`."""
        self._fail(part, error, now)

    def measured(self, computation: Computation, now: float) -> None:
        """See :class:`PreparationListener`."""
        for part in list(computation.parts):
            self._tell_layout(part, computation, now)

    def prepared(self, computation: Computation, now: float) -> None:
        """See :class:`PreparationListener`."""
        computation.files = ()
        self._observer.stage_took("queue", computation.prepare_started_at - computation.begun_at)
        self._observer.stage_took("prepare", computation.prepare_seconds)
        for part in computation.parts:
            self.admission.media_dropped(part)
        self.encoding.enqueue(computation, now)

    def encoded(self, result: EncodedItem, now: float) -> None:
        """See :class:`EncodingListener`."""
        computation = result.computation
        slot, layout = computation.slot, computation.layout
        assert slot is not None
        assert layout is not None
        layout.modality = computation.item.modality
        computation.slot = None
        self._observer.stage_took("batch_wait", computation.encode_started_at - computation.prepared_at)
        if computation.name is not None:
            self.store.replace(computation.name)
        slots = self.encoding.engines[result.engine].slots
        slots.fill(slot, layout, result.checksum, computation.name)
        self.store.end(computation)
        for part in list(computation.parts):
            self._deliver(part, slot, result, now)
        slots.settle(slot)

    def failed(self, computation: Computation, error: ServiceError, now: float) -> None:
        """See :class:`PreparationListener` and :class:`EncodingListener`."""
        self._end_computation(computation)
        for part in list(computation.parts):
            self._fail(part, error, now)

    def input_free(self, computation: Computation) -> None:
        """See :class:`EncodingListener`."""
        self.preparation.free_input(computation)

    def batch_ran(self, batch: Batch, forward_seconds: float, stage_seconds: float) -> None:
        """See :class:`EncodingListener`."""
        self._observer.batch_ran(len(batch.items), batch.patches, forward_seconds, stage_seconds)

    # Inside: how a request comes in.

    def _admit(self, command: EncodeCommand, sink: Sink, now: float) -> Request:
        self._check_not_draining()
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
        self.subscriptions.check_room(command.identity, command.receivers, len(command.items))
        media_bytes = sum(item.media_bytes for item in command.items)
        patches = [self.admission.estimate(item.item.modality) for item in command.items]
        self.admission.enter(media_bytes, patches, now)
        try:
            request = self.requests.admit(command, sink, self._chunks.encoder, patches, now)
        except ServiceError:
            self.admission.leave(media_bytes, patches)
            raise
        for part in request.parts:
            self.subscriptions.expect(part)
        return request

    @property
    def _cache_namespace(self) -> bytes:
        assert self._model is not None
        return self._model.model.cache_namespace

    def _check_not_draining(self) -> None:
        if self.draining:
            raise ServiceError(Reason.SHUTTING_DOWN, "the server is stopping; ask another encoder", retry_after=1.0)

    # Inside: how a part ends.

    def _deliver(self, part: Part, slot: Slot, encoded: EncodedItem | None, now: float) -> None:
        chunk = self.delivery.deliver(part, slot, encoded, now)
        self.requests.end_ready(part, chunk, now)
        self._observer.part_ended(PartState.READY, None, now - part.admitted_at)

    def _fail(self, part: Part, error: ServiceError, now: float) -> None:
        self.subscriptions.ended(part, self.requests.end_failed(part, error, now), now)
        self._observer.part_ended(PartState.FAILED, error.reason, now - part.admitted_at)

    def _cancel(self, request: Request, now: float) -> int:
        parts = [part for part in request.parts if not part.ended]
        for part in parts:
            self.subscriptions.ended(part, self.requests.end_cancelled(part, now), now)
            self._observer.part_ended(PartState.CANCELLED, None, now - part.admitted_at)
        return len(parts)

    def _deadline_passed(self, request: Request, now: float) -> None:
        message = "the deadline passed before the embedding was ready"
        for part in request.parts:
            if not part.ended:
                self._fail(part, ServiceError(Reason.DEADLINE_EXCEEDED, message), now)

    def _part_ended(self, part: Part, previous: PartState, now: float) -> None:
        self.admission.ended(part, now)
        if part.end is not PartState.READY:
            self._prompt_share.refund(part)
        computation = part.computation
        if computation is None:
            if previous is PartState.FETCHING:
                self._hands.stop_bringing(part.key)
            return
        computation.parts.remove(part)
        if not computation.parts and not computation.ended:
            # Nobody wants it any more.
            self._end_computation(computation)

    def _end_computation(self, computation: Computation) -> None:
        """It will not make its embedding. What a child still holds of it comes back when the child reports."""
        self.store.end(computation)
        if computation.stage in (PartState.PREPARED, PartState.ENCODING):
            self.encoding.discard(computation)
        if not computation.at_engine:
            self.preparation.discard(computation)

    # Inside: the rest.

    def _pump(self, now: float) -> None:
        # What is due comes first, even if the loop was late: nothing is started for a part whose time is over.
        self.timers.run_due(now)
        self.encoding.pump(now)
        self.preparation.pump(now)

    def _tell_layout(self, part: Part, computation: Computation, now: float) -> None:
        """A part's embedding is measured: charges for it, and tells its LAYOUT if it fits."""
        assert computation.layout is not None
        self.admission.measured(part, self.encoding.cost(computation))
        if not self._fits_prompt(part, computation.layout.nbytes, now):
            return
        command = part.request.command
        if command.skip_layout and not names_receivers(command):
            return
        assert self._model is not None
        chunk = self._chunks.layout(computation.layout, part, self._model.model.compatibility_fingerprint)
        if not command.skip_layout:
            part.request.tell(ChunkEvent(chunk))
        self.subscriptions.laid_out(part, chunk)

    def _fits_prompt(self, part: Part, nbytes: int, now: float) -> bool:
        """Charges a part's prompt for an embedding; fails the part if that is more than a prompt may take."""
        try:
            self._prompt_share.charge(part, nbytes)
        except ServiceError as error:
            self._fail(part, error, now)
            return False
        return True
