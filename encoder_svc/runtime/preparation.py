"""From QUEUED to PREPARED: media workers, and space in the input arena. Pure; the time is passed in.

A worker holds two items at most: one that it works on and one behind it, so that it never waits for the front. It
answers in the order in which it was asked, so when it dies, the first item is the one that it died of; the others are
given to the next worker.

Nor does a worker ever wait for space. When it has measured an item there is either space for it, or the item is taken
back and given out again, to any worker, when it has its space. So every item is measured soon, whatever else waits: its
LAYOUT depends on no reader (docs/architecture.md, "Why nothing waits in a circle").
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
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

    def prepare(self, worker: int, part: int, item: MediaItem, files: tuple[bytes, ...], measure_only: bool) -> None:
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
    taken_back: bool
    """It comes back unprepared: the worker was told to measure it only, or to drop it."""


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
        self._queue: FairQueue[Computation] = FairQueue()
        """What waits for a worker: items that nobody has measured, and items that were measured and have space."""
        self._waiting: list[tuple[tuple[int, int, int], Computation]] = []
        """What was measured and waits for space. Those without a clock do not wait any more."""
        self._space_clocks: dict[int, Timer] = {}
        self._measured: list[_Job] = []
        """What was measured since the last pump: its worker goes on with it unless it is told otherwise."""
        self._workers: dict[int, deque[_Job]] = {}
        self._worker_clocks: dict[int, Timer] = {}
        self._stopping: set[int] = set()
        self._alone: Timer | None = None
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
        self._grant_space()
        self._take_back_what_has_no_space()
        if not self._workers and self._alone is None and self._queue.peek() is not None:
            self._alone = self._timers.at(now + self._space_seconds, self._workers_overdue)
        for worker, jobs in self._workers.items():
            if worker in self._stopping:
                continue
            while len(jobs) < ITEMS_AT_A_WORKER and (computation := self._queue.pop()) is not None:
                self._give(worker, computation, now)

    def discard(self, computation: Computation) -> None:
        """It has ended, and no engine has anything of it."""
        self._stop_waiting(computation)
        self._queue.discard(computation)
        job = self._jobs.get(computation.key)
        if job is not None:
            # The worker may be writing its input: the space comes back with the answer.
            self._hands.drop(job.worker, computation.key)
        else:
            self.free_input(computation)

    def free_input(self, computation: Computation) -> None:
        """Nothing of it will run any more: its input is not needed, if it has one."""
        if computation.input_offset is not None:
            self._allocator.free(computation.input_offset)
            computation.input_offset = None
        # They refer to it: it would live, with its prompt, until the collector comes.
        computation.forwards = ()

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
        for index, job in enumerate(jobs):
            computation = job.computation
            del self._jobs[computation.key]
            if computation.ended:
                self.free_input(computation)
            elif index == 0 and not stopped:
                message = "the process that decoded this item died; the file may be built to crash a decoder"
                self._listener.failed(computation, ServiceError(Reason.MEDIA_WORKER_LOST, message), now)
            else:
                self._take_back(computation)

    def measured(self, worker: int, key: int, layout: EmbeddingChunk, inputs: Sequence[ModelInput], now: float) -> None:
        """A worker knows the shape of an item. It goes on with it until it is told to drop it."""
        job = self._job(worker, key)
        if job is None or job.computation.ended or job.computation.forwards:
            return
        computation = job.computation
        computation.measure(layout, inputs)
        if computation.input_bytes > self._allocator.size:
            message = (
                f"the item needs {computation.input_bytes} bytes of model input and the server has room for "
                f"{self._allocator.size}; ask for fewer pixels"
            )
            self._listener.failed(computation, ServiceError(Reason.MEDIA_TOO_LARGE, message), now)
        else:
            self._listener.measured(computation, now)
        if computation.ended:
            return
        self._wait_for_space(computation, now)
        self._measured.append(job)

    def prepared(self, worker: int, key: int, prepare_seconds: float, now: float) -> None:
        """A worker has written an item's input."""
        job = self._take(worker, key, now)
        if job is None:
            return
        computation = job.computation
        if computation.ended:
            self.free_input(computation)
            return
        assert computation.input_offset is not None
        computation.prepare_seconds = prepare_seconds
        computation.prepared_at = now
        computation.move(PartState.PREPARED)
        self._listener.prepared(computation, now)

    def dropped(self, worker: int, key: int, now: float) -> None:
        """A worker gives an item back unprepared, as it was told."""
        job = self._take(worker, key, now)
        if job is None:
            return
        if job.computation.ended:
            self.free_input(job.computation)
        else:
            self._take_back(job.computation)

    def failed(self, worker: int, key: int, error: ServiceError, now: float) -> None:
        """A worker cannot prepare an item."""
        job = self._take(worker, key, now)
        if job is None:
            return
        if job.computation.ended:
            self.free_input(job.computation)
        else:
            self._listener.failed(job.computation, error, now)

    def _give(self, worker: int, computation: Computation, now: float) -> None:
        """Gives an item to a worker with a free place."""
        computation.move(PartState.PREPARING)
        computation.prepare_started_at = now
        # While others wait for space there is none for this one: it is only measured, lest it be decoded in vain.
        measure_only = computation.input_offset is None and bool(self._waiting)
        job = _Job(computation, worker, taken_back=measure_only)
        jobs = self._workers[worker]
        jobs.append(job)
        self._jobs[computation.key] = job
        if len(jobs) == 1:
            self._start_clock(worker, now)
        self._hands.prepare(worker, computation.key, computation.item, computation.files, measure_only)
        if computation.input_offset is not None:
            self._hands.grant(worker, computation.key, computation.input_offset)

    def _take_back_what_has_no_space(self) -> None:
        for job in self._measured:
            if job.computation.key in self._space_clocks and not job.taken_back:
                job.taken_back = True
                self._hands.drop(job.worker, job.computation.key)
        self._measured.clear()

    def _take_back(self, computation: Computation) -> None:
        """No worker has it any more, and it is not prepared."""
        computation.move(PartState.QUEUED)
        if computation.key not in self._space_clocks:
            self.enqueue(computation)

    def _wait_for_space(self, computation: Computation, now: float) -> None:
        heapq.heappush(self._waiting, (computation.place, computation))
        self._space_clocks[computation.key] = self._timers.at(
            now + self._space_seconds, lambda at: self._space_overdue(computation, at)
        )
        if len(self._waiting) > 2 * len(self._space_clocks) + _SWEEP_SLACK:
            # Cancels must not let the heap grow while its oldest item waits for space.
            self._waiting = [entry for entry in self._waiting if entry[-1].key in self._space_clocks]
            heapq.heapify(self._waiting)

    def _stop_waiting(self, computation: Computation) -> None:
        clock = self._space_clocks.pop(computation.key, None)
        if clock is not None:
            clock.cancel()

    def _grant_space(self) -> None:
        """Gives space to the oldest prompt first; nobody younger may take while it waits."""
        while self._waiting:
            computation = self._waiting[0][-1]
            if computation.key in self._space_clocks:
                computation.input_offset = self._allocator.allocate(max(computation.input_bytes, 1))
                if computation.input_offset is None:
                    return
                self._stop_waiting(computation)
                job = self._jobs.get(computation.key)
                if job is None:
                    self.enqueue(computation)
                elif not job.taken_back:
                    self._hands.grant(job.worker, computation.key, computation.input_offset)
            heapq.heappop(self._waiting)

    def _job(self, worker: int, key: int) -> _Job | None:
        job = self._jobs.get(key)
        return job if job is not None and job.worker == worker else None

    def _take(self, worker: int, key: int, now: float) -> _Job | None:
        """The worker has done with an item: its place is free."""
        job = self._job(worker, key)
        if job is None:
            return None
        del self._jobs[key]
        jobs = self._workers[worker]
        jobs.remove(job)
        self._stop_clock(worker)
        if jobs:
            self._start_clock(worker, now)
        return job

    def _start_clock(self, worker: int, now: float) -> None:
        self._worker_clocks[worker] = self._timers.at(now + self._prepare_seconds, lambda at: self._overdue(worker, at))

    def _stop_clock(self, worker: int) -> None:
        clock = self._worker_clocks.pop(worker, None)
        if clock is not None:
            clock.cancel()

    def _overdue(self, worker: int, now: float) -> None:
        jobs = self._workers.get(worker)
        if not jobs:
            return
        computation = jobs[0].computation
        if not computation.ended:
            message = f"the item was not decoded in {self._prepare_seconds:g} s; send a smaller or simpler file"
            self._listener.failed(computation, ServiceError(Reason.MEDIA_TIMEOUT, message), now)
        self._stopping.add(worker)
        self._hands.stop(worker)

    def _workers_overdue(self, now: float) -> None:
        """No worker has come: what waits for one fails."""
        self._alone = None
        message = f"no media worker was ready in {self._space_seconds:g} s; the server is starting one again"
        for computation in self._queue.drain():
            self._listener.failed(computation, ServiceError(Reason.NOT_READY, message, retry_after=5.0), now)

    def _space_overdue(self, computation: Computation, now: float) -> None:
        message = f"no space for the item's input came free in {self._space_seconds:g} s; try again later"
        error = ServiceError(Reason.SPACE_TIMEOUT, message, retry_after=1.0)
        self._listener.failed(computation, error, now)
