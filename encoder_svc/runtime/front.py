"""The front: the scheduler with real time, real children and real memory. It is what ``rpc/`` talks to."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from encoder_svc.errors import Reason, ServiceError, SetupError
from encoder_svc.runtime import leases as lease_table
from encoder_svc.runtime.arena_sockets import ArenaSockets
from encoder_svc.runtime.batcher import Batcher
from encoder_svc.runtime.chunks import ChunkWriter
from encoder_svc.runtime.commands import AcquireCommand, CancelCommand, EncodeCommand, SubscribeCommand
from encoder_svc.runtime.configuration import Serving, batch_budgets, configure_engine, configure_media, rules
from encoder_svc.runtime.engine_table import Engine
from encoder_svc.runtime.engines import EngineProcess
from encoder_svc.runtime.events import Event, SubscriptionEvent
from encoder_svc.runtime.leases import Lease
from encoder_svc.runtime.media_sources import MediaSources, UriFetcher
from encoder_svc.runtime.media_workers import MediaWorker
from encoder_svc.runtime.memory_limit import check_memory
from encoder_svc.runtime.observer import Observer
from encoder_svc.runtime.requests import Request, Sink
from encoder_svc.runtime.scheduler import Scheduler
from encoder_svc.runtime.server_info import describe
from encoder_svc.runtime.service import CancelOutcome, FinishedUpload, LeaseOutcome, LoadFigures
from encoder_svc.runtime.slots import SlotTable
from encoder_svc.runtime.subscriptions import Subscription
from encoder_svc.runtime.supervisor import ChildProgram, Supervisor
from encoder_svc.runtime.uploads import Upload
from encoder_svc.settings import Settings
from encoder_svc.shared_memory import SharedMemory
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2 import GetServerInfoResponse, LeaseState, ReadOutcome
from epd.encoder.v1.media_pb2 import MediaItem
from epd.internal.v1.engine_pb2 import BatchItem, EngineCommand, RunBatch, VerifySlot
from epd.internal.v1.media_worker_pb2 import DropItem, InputGrant, MediaCommand, Prepare

logger = logging.getLogger(__name__)


class FrontCall:
    """One admitted request, as ``rpc/`` holds it."""

    def __init__(self, front: Front, request: Request) -> None:
        self._front = front
        self._request = request

    def abandon(self, untold: Sequence[Event]) -> None:
        """See :class:`EncodeCall`."""
        if self._request.open_parts or untold:
            self._front.scheduler.abandon(self._request, self._front.now(), untold)
            self._front.changed()


class FrontSubscription:
    """One ``Subscribe`` call, as ``rpc/`` holds it."""

    def __init__(self, front: Front, subscription: Subscription) -> None:
        self._front = front
        self._subscription = subscription

    def take(self) -> SubscriptionEvent | None:
        """See :class:`ReceiverSubscription`."""
        return self._subscription.take(self._front.now())

    def leave(self) -> None:
        """See :class:`ReceiverSubscription`."""
        self._front.scheduler.subscriptions.leave(self._subscription)


class Front:
    """Starts the children, keeps them running, and answers ``rpc/`` (an :class:`EncoderRuntime`).

    Args:
        settings: everything that can be set.
        serving: what was decided from them.
        fetcher: gets files from URIs.
        observer: counts what happens.
        loop_lag: the greatest delay of the event loop in the last seconds, in seconds.

    Example:
        >>> async with Front(settings, serving, fetcher, observer, loop_lag) as front:  # doctest: +SKIP
        ...     await front.wait_ready()
    """

    def __init__(
        self,
        settings: Settings,
        serving: Serving,
        fetcher: UriFetcher,
        observer: Observer,
        loop_lag: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._serving = serving
        self._loop_lag = loop_lag
        self._started_at = self.now()
        self._listeners: list[Callable[[bool], None]] = []
        self._was_ready = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due: float | None = None
        self._changed = asyncio.Event()
        self._failure: SetupError | None = None
        self._tasks: list[asyncio.Task[None]] = []
        check_memory(settings.arena_bytes * len(serving.devices) + settings.input_arena_bytes)
        self._input_arena = SharedMemory.create("input", settings.input_arena_bytes)
        self._arenas = [
            SharedMemory.create(f"arena-{index}", settings.arena_bytes) for index in range(len(serving.devices))
        ]
        tables = [
            Engine(
                index,
                device,
                SlotTable(index, arena.view),
                Batcher(batch_budgets(settings, device), settings.batch_window_seconds),
            )
            for index, (device, arena) in enumerate(zip(serving.devices, self._arenas, strict=True))
        ]
        self._sources = MediaSources(fetcher, self.now, self.changed)
        self.instance_id = secrets.token_hex(16)
        self._sockets = ArenaSockets(settings.shared_memory_folder, self.instance_id)
        chunks = ChunkWriter(self.instance_id, serving.grpc_target)
        self.scheduler = Scheduler(rules(settings), tables, self, chunks, observer)
        media_configuration = configure_media(settings, serving, self._input_arena)
        self._media_workers = [
            MediaWorker(index, media_configuration, self.scheduler, self.now, self.changed, self._fail)
            for index in range(settings.media_workers)
        ]
        self._engines = [
            EngineProcess(
                index,
                configure_engine(settings, serving, index, self._input_arena, arena, self._sockets.path(index)),
                self.scheduler,
                self.now,
                self.changed,
                self._fail,
            )
            for index, arena in enumerate(self._arenas)
        ]

    async def __aenter__(self) -> Self:
        self._sockets.remove_leftovers()
        shared = self._input_arena.descriptor
        for worker in self._media_workers:
            name = f"media worker {worker.index}"
            worker.supervisor = self._start(name, "encoder_svc.media.worker", (shared,), worker)
        for engine, arena in zip(self._engines, self._arenas, strict=True):
            name = f"engine {engine.index}"
            descriptors = (shared, arena.descriptor)
            engine.supervisor = self._start(name, "encoder_svc.engine.process", descriptors, engine)
        self.scheduler.canary.start(self.now())
        self.changed()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._sources.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._timer is not None:
            self._timer.cancel()
        self._sockets.remove()
        for block in (self._input_arena, *self._arenas):
            block.close()

    async def wait_ready(self) -> None:
        """Waits until requests are taken.

        Raises:
            SetupError: a child says that it can never start.
        """
        while not self.ready:
            if self._failure is not None:
                raise self._failure
            await self._changed.wait()

    async def drain(self, seconds: float) -> None:
        """Takes no more requests, and waits until those that are admitted have ended and what is READY has been read.

        Parts that have not ended by then fail. Then all subscriptions end.

        Args:
            seconds: how long at most.
        """
        self.scheduler.draining = True
        self.changed()
        requests, leases = self.scheduler.requests, self.scheduler.leases
        try:
            async with asyncio.timeout(seconds):
                while len(requests) or len(leases):
                    await self._changed.wait()
        except TimeoutError:
            logger.warning("stopping with %d requests and %d leases", len(requests), len(leases))
            self.scheduler.fail_all(self.now())
        self.scheduler.subscriptions.end(ServiceError(Reason.SHUTTING_DOWN, "the server has stopped", retry_after=1.0))

    # What rpc/ asks (EncoderRuntime).

    @property
    def ready(self) -> bool:
        """See :class:`EncoderRuntime`."""
        return self.scheduler.ready

    def on_readiness(self, listener: Callable[[bool], None]) -> None:
        """See :class:`EncoderRuntime`."""
        self._listeners.append(listener)
        listener(self._was_ready)

    def now(self) -> float:
        """See :class:`EncoderRuntime`."""
        return time.monotonic()

    def submit(self, command: EncodeCommand, sink: Sink) -> FrontCall:
        """See :class:`EncoderRuntime`."""
        request = self.scheduler.submit(command, sink, self.now())
        self.changed()
        return FrontCall(self, request)

    def acquire(self, command: AcquireCommand) -> EmbeddingChunk:
        """See :class:`EncoderRuntime`."""
        chunk = self.scheduler.acquire(command, self.now())
        self.changed()
        return chunk

    def take_back(self, chunk: EmbeddingChunk) -> None:
        """See :class:`EncoderRuntime`."""
        self.scheduler.take_back(chunk, self.now())
        self.changed()

    def subscribe(self, command: SubscribeCommand, wake: Callable[[], None]) -> FrontSubscription:
        """See :class:`EncoderRuntime`."""
        subscription = self.scheduler.subscribe(command, wake, self.now())
        self.changed()
        return FrontSubscription(self, subscription)

    def begin_upload(self, identity: str, total_bytes: int) -> Upload:
        """See :class:`EncoderRuntime`."""
        upload = self.scheduler.begin_upload(identity, total_bytes, self.now())
        self.changed()
        return upload

    def add_to_upload(self, upload: Upload, piece: bytes) -> None:
        """See :class:`EncoderRuntime`."""
        self.scheduler.uploads.add(upload, piece)

    def finish_upload(self, upload: Upload, sha256: bytes) -> FinishedUpload:
        """See :class:`EncoderRuntime`."""
        digest = self.scheduler.uploads.finish(upload, sha256, self.now())
        self.changed()
        return FinishedUpload(upload.id, digest, self._settings.upload_seconds)

    def abandon_upload(self, upload: Upload) -> None:
        """See :class:`EncoderRuntime`."""
        self.scheduler.uploads.abandon(upload)

    def cancel(self, command: CancelCommand) -> CancelOutcome:
        """See :class:`EncoderRuntime`."""
        requests, parts = self.scheduler.cancel(command, self.now())
        self.changed()
        return CancelOutcome(requests, parts)

    def release(self, leases: Sequence[tuple[bytes, ReadOutcome]]) -> list[LeaseState]:
        """See :class:`EncoderRuntime`."""
        answers = self.scheduler.release(leases, self.now())
        self.changed()
        return [
            LeaseState.LEASE_STATE_HELD if isinstance(before, Lease) else _LEASE_STATES[before] for before, _ in answers
        ]

    def renew(self, leases: Sequence[bytes], ttl: float | None) -> list[LeaseOutcome]:
        """See :class:`EncoderRuntime`."""
        now = self.now()
        outcomes = []
        for lease_id in leases:
            found = self.scheduler.renew(lease_id, ttl, now)
            if isinstance(found, Lease):
                outcomes.append(LeaseOutcome(LeaseState.LEASE_STATE_HELD, found.expires_at - now))
            else:
                outcomes.append(LeaseOutcome(_LEASE_STATES[found], 0.0))
        self.changed()
        return outcomes

    def slot_nbytes(self, lease: bytes) -> int:
        """See :class:`EncoderRuntime`."""
        return self.scheduler.live_lease(lease, self.now()).slot.nbytes

    def read_slot(self, lease: bytes, offset: int, length: int) -> memoryview:
        """See :class:`EncoderRuntime`."""
        slot = self.scheduler.live_lease(lease, self.now()).slot
        if offset + length > slot.nbytes:
            raise ServiceError(Reason.RANGE_INVALID, f"the slot has {slot.nbytes} bytes", field="offset")
        start = slot.payload_offset + offset
        return self._arenas[slot.engine].view[start : start + length]

    def load(self) -> LoadFigures:
        """See :class:`EncoderRuntime`."""
        return self.scheduler.load(self.now())

    def describe(self) -> GetServerInfoResponse:
        """See :class:`EncoderRuntime`."""
        info = describe(self.scheduler, self._settings, self._serving.model_name)
        info.encoder.instance_id = self.instance_id
        info.encoder.grpc_target = self._serving.grpc_target
        for engine, process in zip(info.engines, self._engines, strict=True):
            engine.restarts = process.supervisor.restarts if process.supervisor is not None else 0
        for worker in self._media_workers:
            info.load.media_worker_restarts += worker.supervisor.restarts if worker.supervisor is not None else 0
        info.load.loop_lag.FromNanoseconds(int(self._loop_lag() * 1e9))
        info.load.uptime.FromNanoseconds(int((self.now() - self._started_at) * 1e9))
        return info

    # What the scheduler commands (Hands).

    def bring(self, part: int, item: MediaItem, files: tuple[bytes, ...]) -> None:
        """See :class:`SourceHands`."""
        self._sources.bring(self.scheduler, part, item, files)

    def stop_bringing(self, part: int) -> None:
        """See :class:`SourceHands`."""
        self._sources.stop_bringing(part)

    def prepare(self, worker: int, part: int, item: MediaItem, files: tuple[bytes, ...], measure_only: bool) -> None:
        """See :class:`MediaHands`."""
        command = Prepare(part=part, item=item, measure_only=measure_only)
        self._media(worker).send(MediaCommand(prepare=command), files)

    def grant(self, worker: int, part: int, offset: int) -> None:
        """See :class:`MediaHands`."""
        self._media(worker).send(MediaCommand(grant=InputGrant(part=part, offset=offset)))

    def drop(self, worker: int, part: int) -> None:
        """See :class:`MediaHands`."""
        self._media(worker).send(MediaCommand(drop=DropItem(part=part)))

    def stop(self, worker: int) -> None:
        """See :class:`MediaHands`."""
        self._media(worker).kill()

    def run(self, engine: int, batch: int, items: Sequence[BatchItem]) -> None:
        """See :class:`EngineHands`."""
        self._engine(engine).send(EngineCommand(run=RunBatch(batch=batch, items=items)))

    def stop_engine(self, engine: int) -> None:
        """See :class:`EngineHands`."""
        limit = self._settings.forward_seconds
        logger.error("engine %d has run one batch for more than %g s; it is stopped", engine, limit)
        self._engine(engine).kill()

    def verify(self, engine: int, query: int, payload_offset: int, nbytes: int) -> None:
        """See :class:`VerifyHands`."""
        command = VerifySlot(query=query, payload_offset=payload_offset, nbytes=nbytes)
        self._engine(engine).send(EngineCommand(verify=command))

    # Inside.

    def changed(self) -> None:
        """Something happened: sets the timer anew, and tells who waits."""
        due = self.scheduler.timers.next_due()
        # Nearly all timers are cancelled long before they are due: one that is set too early only ticks in vain.
        if due is not None and (self._timer_due is None or due < self._timer_due):
            self._timer_due = due
            if self._timer is not None:
                self._timer.cancel()
            self._timer = asyncio.get_running_loop().call_later(due - self.now(), self._tick)
        ready = self.ready
        if ready != self._was_ready:
            self._was_ready = ready
            for listener in self._listeners:
                listener(ready)
        self._changed.set()
        self._changed.clear()

    def _tick(self) -> None:
        self._timer = self._timer_due = None
        try:
            self.scheduler.tick(self.now())
        finally:
            # Whatever one thing that was due stumbled over: the next one has its time, too.
            self.changed()

    def _start(
        self, name: str, module: str, descriptors: tuple[int, ...], owner: MediaWorker | EngineProcess
    ) -> Supervisor:
        program = ChildProgram(name, module, descriptors, self._settings.start_seconds)
        supervisor = Supervisor(program, owner, self._settings.restart_seconds)
        self._tasks.append(asyncio.create_task(supervisor.run(), name=name))
        return supervisor

    def _fail(self, error: SetupError) -> None:
        logger.error("%s", error)
        self._failure = error

    def _media(self, worker: int) -> Supervisor:
        supervisor = self._media_workers[worker].supervisor
        assert supervisor is not None
        return supervisor

    def _engine(self, engine: int) -> Supervisor:
        supervisor = self._engines[engine].supervisor
        assert supervisor is not None
        return supervisor


_LEASE_STATES: dict[lease_table.LeaseState | None, LeaseState] = {
    lease_table.LeaseState.RELEASED: LeaseState.LEASE_STATE_ALREADY_RELEASED,
    lease_table.LeaseState.EXPIRED: LeaseState.LEASE_STATE_EXPIRED,
    lease_table.LeaseState.REVOKED: LeaseState.LEASE_STATE_REVOKED,
    None: LeaseState.LEASE_STATE_UNKNOWN,
}
