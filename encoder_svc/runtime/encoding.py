"""From PREPARED to an embedding in a slot: engines, space in their arenas, and batches. Pure; the time is passed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.computations import Computation
from encoder_svc.runtime.engine_table import Batch, Engine
from encoder_svc.runtime.forwards import Forward, ForwardState
from encoder_svc.runtime.parts import PartState
from encoder_svc.runtime.placement import Placement
from encoder_svc.runtime.timers import Timers
from epd.internal.v1.engine_pb2 import BatchDone, BatchItem, EngineReady, ItemResult
from epd.internal.v1.media_worker_pb2 import Tower

_LATE_FACTOR = 4.0
_LATE_SECONDS = 1.0
"""An engine is late when its batch takes so many times as long as usual, and at least so long."""

MAX_ATTEMPTS = 2
"""How often an item may be tried: once more after an engine died of what may have been it."""


class EngineHands(Protocol):
    """The engines, by index."""

    def run(self, engine: int, batch: int, items: Sequence[BatchItem]) -> None:
        """Sends ``RunBatch``."""
        ...

    def stop_engine(self, engine: int) -> None:
        """Kills the engine; it will be reported as lost and started again."""
        ...


@dataclass(frozen=True)
class EncodedItem:
    """How encoding went for one item that succeeded."""

    computation: Computation
    engine: int
    checksum: int
    forward_seconds: float
    """Of all batches that the item was in."""
    stage_seconds: float
    batch_items: int
    """Of the first tower's batch."""
    batch_patches: int


class EncodingListener(Protocol):
    """Who is told how encoding goes."""

    def encoded(self, result: EncodedItem, now: float) -> None:
        """The embedding is in the computation's slot, which the listener takes over."""
        ...

    def failed(self, computation: Computation, error: ServiceError, now: float) -> None:
        """It cannot be encoded."""
        ...

    def input_free(self, computation: Computation) -> None:
        """Nothing of it will run any more."""
        ...

    def batch_ran(self, batch: Batch, forward_seconds: float, stage_seconds: float) -> None:
        """A batch came back."""
        ...


class Encoding:
    """The second half of the pipeline.

    Args:
        hands: the engines.
        engines: their tables, in the order of their indexes.
        batches_ahead: batches that an engine holds at most.
        space_seconds: how long an item may wait for a slot.
        forward_seconds: how long a forward may take before its engine is killed.
        timers: where limits of time are set.
        listener: who is told.
    """

    def __init__(
        self,
        hands: EngineHands,
        engines: Sequence[Engine],
        batches_ahead: int,
        space_seconds: float,
        forward_seconds: float,
        timers: Timers,
        listener: EncodingListener,
    ) -> None:
        self.engines = list(engines)
        self._hands = hands
        self._batches_ahead = batches_ahead
        self._space_seconds = space_seconds
        self._forward_seconds = forward_seconds
        self._timers = timers
        self._listener = listener
        self._batch_ids = count(1)
        self._placement = Placement(self.engines, space_seconds, timers, self._space_overdue)

    @property
    def ready(self) -> bool:
        """At least one engine takes batches and encodes them well."""
        return any(engine.ready and not engine.failing for engine in self.engines)

    @property
    def capacity(self) -> int:
        """The largest footprint of a payload that any engine can hold, in bytes."""
        return max(engine.slots.capacity for engine in self.engines)

    def cost(self, computation: Computation) -> int:
        """What all forwards of a measured computation cost, in patches.

        A mel frame counts as so much of a patch as fills the same share of a batch.
        """
        budget = self.engines[0].batcher.budget
        vision = budget(Tower.TOWER_VISION)
        return sum(-(-forward.patches * vision // budget(forward.tower)) for forward in computation.forwards)

    def enqueue(self, computation: Computation, now: float) -> None:
        """Takes a PREPARED computation; it waits for a slot."""
        self._placement.enqueue(computation, now)

    def discard(self, computation: Computation) -> None:
        """It has ended while it was PREPARED or ENCODING."""
        self._placement.discard(computation)

    def pump(self, now: float) -> None:
        """Starts what can start: gives slots, and batches to engines with a free place."""
        self._placement.pump()
        for engine in self.engines:
            while engine.ready and not engine.late and len(engine.batches) < self._batches_ahead:
                running_until = engine.running_until()
                due = engine.batcher.due(now, running_until)
                if due is None:
                    break
                if due > now:
                    self._wake(engine, due)
                    break
                self._run(engine, engine.batcher.next_batch(now, running_until), now)

    def _run(self, engine: Engine, forwards: list[Forward], now: float) -> None:
        batch = Batch(next(self._batch_ids), forwards[0].tower, forwards, sum(forward.patches for forward in forwards))
        engine.batches[batch.id] = batch
        self._first_batch_runs(engine, now)
        for forward in forwards:
            forward.state, forward.batch = ForwardState.SENT, batch
            if forward.computation.stage is PartState.PREPARED:
                forward.computation.move(PartState.ENCODING)
                forward.computation.encode_started_at = now
        self._hands.run(engine.index, batch.id, [forward.batch_item() for forward in forwards])

    def _wake(self, engine: Engine, due: float) -> None:
        """Pumps again when the engine's next batch is due; :meth:`Timers.run_due` is followed by a pump."""
        if engine.alarm is not None:
            if engine.alarm.at == due:
                return
            engine.alarm.cancel()
        engine.alarm = self._timers.at(due, lambda _: None)

    def engine_starting(self, index: int) -> None:
        """The process of an engine runs."""
        self.engines[index].starting = True

    def engine_ready(self, index: int, ready: EngineReady, now: float) -> None:
        """An engine takes batches."""
        engine = self.engines[index]
        engine.ready = ready
        engine.starting = engine.failing = False
        engine.last_good = now
        engine.speeds.clear()
        for budget in ready.budgets:
            engine.batcher.set_budget(budget.tower, budget.cost)

    def engine_lost(self, index: int, now: float) -> None:
        """An engine died. Items whose forward had not started wait again; the others are tried once more, alone."""
        engine = self.engines[index]
        engine.ready = None
        engine.starting = engine.late = False
        engine.busy.tell(False, now)
        ran: dict[Computation, bool] = {forward.computation: False for forward in engine.batcher.drain()}
        batches, engine.batches = list(engine.batches.values()), {}
        for place, batch in enumerate(batches):
            self._end_batch(engine, batch)
            for forward in batch.items:
                # The first was running even if its death was faster than the word that it had started.
                ran[forward.computation] = ran.get(forward.computation, False) or batch.started or place == 0
        for item, was_running in ran.items():
            engine.leave_slot(item)
            if item.ended:
                self._listener.input_free(item)
            else:
                self._try_again(item, was_running, now)

    def _try_again(self, item: Computation, was_running: bool, now: float) -> None:
        """The engine died that had an item. What it had made of it is gone, too."""
        if item.stage is PartState.ENCODING:
            item.move(PartState.PREPARED)
        item.attempts += was_running
        if item.attempts >= MAX_ATTEMPTS:
            message = "the engine died twice while it encoded this item"
            self._listener.failed(item, ServiceError(Reason.ENGINE_LOST, message), now)
        else:
            self.enqueue(item, now)

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
        engine.learn(batch, now)
        self._end_batch(engine, batch)
        self._first_batch_runs(engine, now)
        batch.forward_seconds, batch.stage_seconds = done.forward_nanoseconds / 1e9, done.stage_nanoseconds / 1e9
        if batch.items:
            self._listener.batch_ran(batch, batch.forward_seconds, batch.stage_seconds)
        results = {result.part: result for result in done.items}
        for forward in batch.items:
            engine.let_go(forward, ForwardState.DONE)
            self._came_back(engine, forward.computation, results.get(forward.computation.key), now)

    def _came_back(self, engine: Engine, item: Computation, result: ItemResult | None, now: float) -> None:
        """A forward of an item is done, well or not."""
        error = _fault(item, result)
        if error is None:
            engine.last_good = now
            engine.failing = False
        if item.ended:
            if not item.at_engine:
                engine.leave_slot(item)
                self._listener.input_free(item)
        elif error is not None:
            self._listener.failed(item, error, now)
        elif item.encoded:
            assert result is not None
            encoded = _encoded_item(engine, item, result)
            self._listener.input_free(item)
            self._listener.encoded(encoded, now)

    def _first_batch_runs(self, engine: Engine, now: float) -> None:
        """The first batch of an engine has so long from now, or from when it became the first."""
        batch = next(iter(engine.batches.values()), None)
        engine.busy.tell(batch is not None, now)
        if batch is None or batch.clocks:
            return
        batch.first_at = now

        def hangs(_: float) -> None:
            self._hands.stop_engine(engine.index)

        def is_late(_: float) -> None:
            engine.late = True

        batch.clocks.append(self._timers.at(now + self._forward_seconds, hangs))
        speed = engine.speeds.get(batch.tower)
        if speed is not None:
            usual = speed * batch.patches
            batch.clocks.append(self._timers.at(now + max(_LATE_FACTOR * usual, _LATE_SECONDS), is_late))

    def _end_batch(self, engine: Engine, batch: Batch) -> None:
        """An engine has done with a batch, or is dead."""
        batch.stop_clocks()
        engine.late = False
        for slot in batch.given_up:
            engine.slots.free(slot)

    def _space_overdue(self, computation: Computation, now: float) -> None:
        waited = f"{self._space_seconds:g} s"
        if self.ready:
            message = f"no space for the embedding came free in {waited}; release leases sooner, or try again later"
            error = ServiceError(Reason.SPACE_TIMEOUT, message, retry_after=1.0)
        else:
            message = f"no engine was ready in {waited}; the server is starting one again"
            error = ServiceError(Reason.NOT_READY, message, retry_after=5.0)
        self._listener.failed(computation, error, now)


def _fault(item: Computation, result: ItemResult | None) -> ServiceError | None:
    """Why an item failed. None: it did not, and if all of it is encoded there is a checksum to prove it."""
    if result is not None and result.reason:
        return ServiceError(Reason(result.reason), result.message)
    if result is None or (item.encoded and not result.HasField("checksum")):
        return ServiceError(Reason.INTERNAL, "the engine did not say what became of this item; try again")
    return None


def _encoded_item(engine: Engine, item: Computation, result: ItemResult) -> EncodedItem:
    batches = [forward.batch for forward in item.forwards if forward.batch is not None]
    return EncodedItem(
        computation=item,
        engine=engine.index,
        checksum=result.checksum.value,
        forward_seconds=sum(batch.forward_seconds for batch in batches),
        stage_seconds=sum(batch.stage_seconds for batch in batches),
        batch_items=len(batches[0].items),
        batch_patches=batches[0].patches,
    )
