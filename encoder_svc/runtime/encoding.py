"""From PREPARED to an embedding in a slot: engines, space in their arenas, and batches. Pure; the time is passed in."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.batcher import Batcher
from encoder_svc.runtime.parts import Part, PartState
from encoder_svc.runtime.slots import SlotTable
from encoder_svc.runtime.timers import Timer, Timers
from epd.internal.v1.engine_pb2 import BatchDone, BatchItem, EngineReady, ItemResult

MAX_ATTEMPTS = 2
"""Forwards that may be started for a part: one more after an engine died in the first."""


class EngineHands(Protocol):
    """The engines, by index."""

    def run(self, engine: int, batch: int, items: Sequence[BatchItem]) -> None:
        """Sends ``RunBatch``."""
        ...


@dataclass(frozen=True)
class EncodedPart:
    """How a forward went for one part that succeeded."""

    part: Part
    engine: int
    checksum: int
    forward_seconds: float
    stage_seconds: float
    batch_items: int
    batch_patches: int


class EncodingListener(Protocol):
    """Who is told how encoding goes."""

    def part_encoded(self, result: EncodedPart, now: float) -> None:
        """The embedding is in the part's slot. The listener takes over the slot, unless the part has ended."""
        ...

    def part_failed(self, part: Part, error: ServiceError, now: float) -> None:
        """The part cannot be encoded."""
        ...

    def input_free(self, part: Part) -> None:
        """The part's input will not be read any more."""
        ...


@dataclass(eq=False)
class Batch:
    """Parts that an engine runs together."""

    id: int
    parts: list[Part]
    started: bool = False

    @property
    def patches(self) -> int:
        """What it costs."""
        return sum(part.patches for part in self.parts)


@dataclass(eq=False)
class Engine:
    """One engine, over all its lives."""

    index: int
    device: str
    slots: SlotTable
    batcher: Batcher
    ready: EngineReady | None = None
    """What it said of itself in this life. None: it is starting or dead."""
    lives: int = 0
    batches: dict[int, Batch] = field(default_factory=dict)
    """What was sent to it and has not come back, in order."""
    patches: int = 0
    """What it has been given and has not done."""


class Encoding:
    """The second half of the pipeline.

    Args:
        hands: the engines.
        engines: their tables, in the order of their indexes.
        batches_ahead: batches that an engine holds at most.
        space_seconds: how long a part may wait for a slot.
        timers: where limits of time are set.
        listener: who is told.
    """

    def __init__(
        self,
        hands: EngineHands,
        engines: Sequence[Engine],
        batches_ahead: int,
        space_seconds: float,
        timers: Timers,
        listener: EncodingListener,
    ) -> None:
        self.engines = list(engines)
        self._hands = hands
        self._batches_ahead = batches_ahead
        self._space_seconds = space_seconds
        self._timers = timers
        self._listener = listener
        self._batch_ids = count(1)
        self._waiting: list[tuple[int, int, int, Part]] = []
        self._ended_waiting = 0
        self._clocks: dict[int, Timer] = {}

    @property
    def ready(self) -> bool:
        """At least one engine takes batches."""
        return any(engine.ready for engine in self.engines)

    @property
    def capacity(self) -> int:
        """The largest payload that any engine can hold, in bytes."""
        return max(engine.slots.capacity for engine in self.engines)

    def enqueue(self, part: Part, now: float) -> None:
        """Takes a PREPARED part; it waits for a slot, oldest prompt first."""
        heapq.heappush(self._waiting, (part.request.prompt.order, part.item.part_idx, part.key, part))
        self._clocks[part.key] = self._timers.at(now + self._space_seconds, lambda at: self._overdue(part, at))

    def pump(self, now: float) -> None:
        """Starts what can start: gives slots, and batches to engines with a free place."""
        self._grant_slots()
        for engine in self.engines:
            while engine.ready and len(engine.batches) < self._batches_ahead:
                parts = engine.batcher.next_batch()
                if not parts:
                    break
                batch = Batch(next(self._batch_ids), parts)
                engine.batches[batch.id] = batch
                for part in parts:
                    part.move(PartState.ENCODING)
                    part.encode_started_at = now
                self._hands.run(engine.index, batch.id, [_batch_item(part) for part in parts])

    def discard(self, part: Part) -> None:
        """The part has ended while it was PREPARED: it is in no batch."""
        self._stop_clock(part)
        if part.slot is not None:
            engine = self.engines[part.engine]
            engine.patches -= part.patches
            self._leave_slot(engine, part)
        else:
            self._ended_waiting += 1
            if self._ended_waiting > max(256, len(self._waiting) // 2):
                # Cancels must not let the heap grow while its oldest part waits for space.
                self._waiting = [entry for entry in self._waiting if not entry[-1].ended]
                heapq.heapify(self._waiting)
                self._ended_waiting = 0

    def engine_ready(self, index: int, ready: EngineReady) -> None:
        """An engine takes batches."""
        engine = self.engines[index]
        engine.ready = ready
        engine.lives += 1

    def engine_lost(self, index: int, now: float) -> None:
        """An engine died. Parts whose forward had not started wait again; the others are tried once more, alone."""
        engine = self.engines[index]
        engine.ready = None
        waiting = engine.batcher.drain()
        batches, engine.batches = list(engine.batches.values()), {}
        engine.patches = 0
        for part in waiting:
            self._leave_slot(engine, part)
            self.enqueue(part, now)
        for batch in batches:
            for part in batch.parts:
                self._leave_slot(engine, part)
                if part.ended:
                    self._listener.input_free(part)
                    continue
                if batch.started:
                    part.attempts += 1
                part.move(PartState.PREPARED)
                if part.attempts >= MAX_ATTEMPTS:
                    message = "the engine died twice while it encoded this item"
                    self._listener.part_failed(part, ServiceError(Reason.ENGINE_LOST, message), now)
                else:
                    self.enqueue(part, now)

    def batch_started(self, index: int, batch_id: int) -> None:
        """An engine began the forward of a batch."""
        batch = self.engines[index].batches.get(batch_id)
        if batch is not None:
            batch.started = True

    def batch_done(self, index: int, done: BatchDone, now: float) -> None:
        """An engine has run a batch."""
        engine = self.engines[index]
        batch = engine.batches.pop(done.batch, None)
        if batch is None:
            return
        engine.patches -= batch.patches
        results = {result.part: result for result in done.items}
        for part in batch.parts:
            self._listener.input_free(part)
            result = results.get(part.key, ItemResult())
            error = _fault(result)
            if part.ended or error is not None:
                self._leave_slot(engine, part)
            if part.ended:
                continue
            if error is not None:
                self._listener.part_failed(part, error, now)
            else:
                self._tell_encoded(engine, batch, part, result, done, now)

    def _tell_encoded(
        self, engine: Engine, batch: Batch, part: Part, result: ItemResult, done: BatchDone, now: float
    ) -> None:
        encoded = EncodedPart(
            part=part,
            engine=engine.index,
            checksum=result.checksum.value,
            forward_seconds=done.forward_nanoseconds / 1e9,
            stage_seconds=done.stage_nanoseconds / 1e9,
            batch_items=len(batch.parts),
            batch_patches=batch.patches,
        )
        self._listener.part_encoded(encoded, now)

    def _grant_slots(self) -> None:
        """Gives slots to the oldest prompt first; nobody younger may take while it waits."""
        while self._waiting:
            part = self._waiting[0][-1]
            if not part.ended and not self._grant_slot(part):
                return
            heapq.heappop(self._waiting)

    def _grant_slot(self, part: Part) -> bool:
        assert part.layout is not None
        candidates = sorted((engine for engine in self.engines if engine.ready), key=lambda engine: engine.patches)
        for engine in candidates:
            slot = engine.slots.reserve(part.layout.nbytes)
            if slot is not None:
                part.slot, part.engine = slot, engine.index
                engine.patches += part.patches
                engine.batcher.push(part)
                self._stop_clock(part)
                return True
        return False

    def _leave_slot(self, engine: Engine, part: Part) -> None:
        if part.slot is not None:
            engine.slots.free(part.slot)
            part.slot = None

    def _stop_clock(self, part: Part) -> None:
        clock = self._clocks.pop(part.key, None)
        if clock is not None:
            clock.cancel()

    def _overdue(self, part: Part, now: float) -> None:
        if part.ended:
            return
        if self.ready:
            message = (
                f"no space for the embedding came free in {self._space_seconds:g} s; release leases sooner or try again"
            )
            error = ServiceError(Reason.SPACE_TIMEOUT, message, retry_after=1.0)
        else:
            message = f"no engine was ready in {self._space_seconds:g} s; the server is starting one again"
            error = ServiceError(Reason.NOT_READY, message, retry_after=5.0)
        self._listener.part_failed(part, error, now)


def _fault(result: ItemResult) -> ServiceError | None:
    """Why an item failed. None: it did not, and there is a checksum to prove it."""
    if result.reason:
        return ServiceError(Reason(result.reason), result.message)
    if not result.HasField("checksum"):
        return ServiceError(Reason.INTERNAL, "the engine did not say what became of this item; try again")
    return None


def _batch_item(part: Part) -> BatchItem:
    assert part.layout is not None
    assert part.input is not None
    assert part.input_offset is not None
    assert part.slot is not None
    return BatchItem(
        part=part.key,
        modality=part.item.modality,
        grid_dim=part.layout.grid_dim,
        input=part.input,
        input_offset=part.input_offset,
        tensors=part.layout.tensors,
        payload_offset=part.slot.payload_offset,
        nbytes=part.layout.nbytes,
    )
