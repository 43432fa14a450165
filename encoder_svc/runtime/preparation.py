"""From QUEUED to PREPARED: media workers, and space in the input arena. Pure; the time is passed in.

A worker holds two items at most: one that it works on and one behind it, so that it never waits for the front. It
answers in the order in which it was asked, so when it dies, the first item is the one that it died of; the others are
given to the next worker.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import Protocol

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.allocator import Allocator
from encoder_svc.runtime.computations import Computation
from encoder_svc.runtime.fair_queue import FairQueue
from encoder_svc.runtime.parts import PartState
from encoder_svc.runtime.timers import Timer, Timers
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.media_pb2 import MediaItem
from epd.internal.v1.media_worker_pb2 import ModelInput

ITEMS_AT_A_WORKER = 2

_SWEEP_SLACK = 64

_ITEM_COST_BYTES = 16_384
"""What an item costs beside its bytes, in bytes, for fairness between prompts."""


class MediaHands(Protocol):
    """The media workers, by index."""

    def prepare(self, worker: int, part: int, item: MediaItem, files: tuple[bytes, ...]) -> None:
        """Sends ``Prepare``."""
        ...

    def grant(self, worker: int, part: int, offset: int) -> None:
        """Sends ``InputGrant``."""
        ...

    def drop(self, worker: int, part: int) -> None:
        """Sends ``DropItem``."""
        ...

    def stop(self, worker: int) -> None:
        """Kills the worker; it will be reported as lost and started again."""
        ...


class PreparationListener(Protocol):
    """Who is told how preparation goes."""

    def measured(self, computation: Computation, now: float) -> None:
        """The shape is known. The listener may end the computation."""
        ...

    def prepared(self, computation: Computation, now: float) -> None:
        """It is PREPARED and holds space in the input arena."""
        ...

    def failed(self, computation: Computation, error: ServiceError, now: float) -> None:
        """It cannot be prepared."""
        ...


@dataclass(eq=False, slots=True)
class _Job:
    """A computation at a worker. It outlives the computation's end until the worker has reported."""

    computation: Computation
    worker: int
    offset: int | None = None
    """Its space in the input arena, once granted."""
    waits_for_space: bool = False
    space_timer: Timer | None = None


class Preparation:
    """The first half of the pipeline.

    Args:
        hands: the media workers.
        input_bytes: the size of the input arena.
        prepare_seconds: how long a worker may take for one item.
        space_seconds: how long an item may wait for space in the input arena.
        timers: where limits of time are set.
        listener: who is told.
    """

    def __init__(
        self,
        hands: MediaHands,
        input_bytes: int,
        prepare_seconds: float,
        space_seconds: float,
        timers: Timers,
        listener: PreparationListener,
    ) -> None:
        self._hands = hands
        self._allocator = Allocator(input_bytes)
        self._prepare_seconds = prepare_seconds
        self._space_seconds = space_seconds
        self._timers = timers
        self._listener = listener
        self._queue = FairQueue()
        self._workers: dict[int, deque[_Job]] = {}
        self._clocks: dict[int, Timer] = {}
        self._stopping: set[int] = set()
        self._alone: Timer | None = None
        self._waiting: list[tuple[tuple[int, int, int], _Job]] = []
        self._jobs: dict[int, _Job] = {}

    @property
    def ready(self) -> bool:
        """At least one worker takes items."""
        return bool(self._workers)

    @property
    def input_bytes_taken(self) -> int:
        """Bytes of the input arena that are taken."""
        return self._allocator.size - self._allocator.free_bytes

    def enqueue(self, computation: Computation) -> None:
        """Takes a QUEUED computation."""
        self._queue.push(computation, computation.media_bytes + _ITEM_COST_BYTES)

    def pump(self, now: float) -> None:
        """Starts what can start: grants space, and gives items to workers with a free place."""
        self._grant_space(now)
        if not self._workers and self._alone is None and self._queue.peek() is not None:
            self._alone = self._timers.at(now + self._space_seconds, self._workers_overdue)
        for worker, jobs in self._workers.items():
            if worker in self._stopping:
                continue
            while len(jobs) < ITEMS_AT_A_WORKER and (computation := self._queue.pop()) is not None:
                computation.move(PartState.PREPARING)
                computation.prepare_started_at = now
                job = _Job(computation, worker)
                jobs.append(job)
                self._jobs[computation.key] = job
                if len(jobs) == 1:
                    self._start_clock(worker, now)
                self._hands.prepare(worker, computation.key, computation.item, computation.files)

    def discard(self, computation: Computation) -> None:
        """It has ended while it was QUEUED, PREPARING or PREPARED."""
        if computation.input_offset is not None:
            self.free_input(computation)
        job = self._jobs.get(computation.key)
        if job is not None:
            job.waits_for_space = False
            self._hands.drop(job.worker, computation.key)

    def free_input(self, computation: Computation) -> None:
        """Its input is not needed any more."""
        assert computation.input_offset is not None
        self._allocator.free(computation.input_offset)
        computation.input_offset = None

    def worker_ready(self, worker: int) -> None:
        """A worker takes items."""
        self._workers[worker] = deque()
        if self._alone is not None:
            self._alone.cancel()
            self._alone = None

    def worker_lost(self, worker: int, now: float) -> None:
        """A worker died. The item that it worked on fails; those behind it go to the next worker."""
        jobs = self._workers.pop(worker, None)
        if jobs is None:
            return
        self._stop_clock(worker)
        # One that we stopped died of an item that has failed already, even if its answer crossed with the kill.
        stopped = worker in self._stopping
        self._stopping.discard(worker)
        for index, job in enumerate(list(jobs)):
            self._forget(job)
            if job.offset is not None:
                self._allocator.free(job.offset)
            computation = job.computation
            if computation.ended:
                continue
            if index == 0 and not stopped:
                message = "the process that decoded this item died; the file may be built to crash a decoder"
                self._listener.failed(computation, ServiceError(Reason.MEDIA_WORKER_LOST, message), now)
            else:
                computation.move(PartState.QUEUED)
                self.enqueue(computation)

    def measured(self, worker: int, key: int, layout: EmbeddingChunk, model_input: ModelInput, now: float) -> None:
        """A worker knows the shape of an item and waits for space."""
        job = self._job(worker, key)
        if job is None or job.computation.ended:
            return
        computation = job.computation
        measured_before = computation.layout is not None
        computation.layout, computation.input = layout, model_input
        if model_input.nbytes > self._allocator.size:
            message = (
                f"the item needs {model_input.nbytes} bytes of model input and the server has room for "
                f"{self._allocator.size}; ask for fewer pixels"
            )
            self._listener.failed(computation, ServiceError(Reason.MEDIA_TOO_LARGE, message), now)
        elif not measured_before:
            self._listener.measured(computation, now)
        if computation.ended:
            return
        job.waits_for_space = True
        job.space_timer = self._timers.at(now + self._space_seconds, lambda at: self._space_overdue(job, at))
        heapq.heappush(self._waiting, (computation.place, job))
        if len(self._waiting) > 2 * ITEMS_AT_A_WORKER * len(self._workers) + _SWEEP_SLACK:
            # Cancels must not let the heap grow while its oldest item waits for space.
            self._waiting = [entry for entry in self._waiting if entry[-1].waits_for_space]
            heapq.heapify(self._waiting)

    def prepared(self, worker: int, key: int, prepare_seconds: float, now: float) -> None:
        """A worker has written an item's input."""
        job = self._take(worker, key, now)
        if job is None:
            return
        computation = job.computation
        assert job.offset is not None
        if computation.ended:
            self._allocator.free(job.offset)
            return
        computation.input_offset = job.offset
        computation.prepare_seconds = prepare_seconds
        computation.prepared_at = now
        computation.move(PartState.PREPARED)
        self._listener.prepared(computation, now)

    def failed(self, worker: int, key: int, error: ServiceError, now: float) -> None:
        """A worker cannot prepare an item, or has dropped it."""
        job = self._take(worker, key, now)
        if job is None:
            return
        if job.offset is not None:
            self._allocator.free(job.offset)
        if not job.computation.ended:
            self._listener.failed(job.computation, error, now)

    def _grant_space(self, now: float) -> None:
        """Gives space to the oldest prompt first; nobody younger may take while it waits."""
        while self._waiting:
            job = self._waiting[0][-1]
            if job.waits_for_space:
                assert job.computation.input is not None
                offset = self._allocator.allocate(max(job.computation.input.nbytes, 1))
                if offset is None:
                    return
                job.offset = offset
                job.waits_for_space = False
                self._hands.grant(job.worker, job.computation.key, offset)
                if self._workers[job.worker][0] is job:
                    # The time that it waited for us is not its own.
                    self._stop_clock(job.worker)
                    self._start_clock(job.worker, now)
            heapq.heappop(self._waiting)
            if job.space_timer is not None:
                job.space_timer.cancel()

    def _job(self, worker: int, key: int) -> _Job | None:
        job = self._jobs.get(key)
        return job if job is not None and job.worker == worker else None

    def _take(self, worker: int, key: int, now: float) -> _Job | None:
        """The worker has done with an item: its place is free."""
        job = self._job(worker, key)
        if job is None:
            return None
        self._forget(job)
        jobs = self._workers[worker]
        jobs.remove(job)
        self._stop_clock(worker)
        if jobs:
            self._start_clock(worker, now)
        return job

    def _forget(self, job: _Job) -> None:
        del self._jobs[job.computation.key]
        job.waits_for_space = False
        if job.space_timer is not None:
            job.space_timer.cancel()

    def _start_clock(self, worker: int, now: float) -> None:
        self._clocks[worker] = self._timers.at(now + self._prepare_seconds, lambda at: self._overdue(worker, at))

    def _stop_clock(self, worker: int) -> None:
        clock = self._clocks.pop(worker, None)
        if clock is not None:
            clock.cancel()

    def _overdue(self, worker: int, now: float) -> None:
        jobs = self._workers.get(worker)
        if not jobs:
            return
        job = jobs[0]
        if job.waits_for_space:
            # The worker is not slow, it waits for the front; that has its own limit.
            self._start_clock(worker, now)
            return
        if not job.computation.ended:
            message = f"the item was not decoded in {self._prepare_seconds:g} s; send a smaller or simpler file"
            self._listener.failed(job.computation, ServiceError(Reason.MEDIA_TIMEOUT, message), now)
        self._stopping.add(worker)
        self._hands.stop(worker)

    def _workers_overdue(self, now: float) -> None:
        """No worker has come: what waits for one fails."""
        self._alone = None
        message = f"no media worker was ready in {self._space_seconds:g} s; the server is starting one again"
        for computation in self._queue.drain():
            self._listener.failed(computation, ServiceError(Reason.NOT_READY, message, retry_after=5.0), now)

    def _space_overdue(self, job: _Job, now: float) -> None:
        if not job.waits_for_space:
            return
        message = f"no space for the item's input came free in {self._space_seconds:g} s; try again later"
        error = ServiceError(Reason.SPACE_TIMEOUT, message, retry_after=1.0)
        self._listener.failed(job.computation, error, now)
