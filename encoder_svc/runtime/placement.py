"""Which engine an item goes to, and when: slots, oldest prompt first, and away from late engines. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from encoder_svc.runtime.computations import Computation
from encoder_svc.runtime.engine_table import Batch, Engine
from encoder_svc.runtime.forwards import ForwardState
from encoder_svc.runtime.parts import PartState
from encoder_svc.runtime.slots import Slot
from encoder_svc.runtime.timers import Timer, Timers

_SWEEP_SLACK = 64


class Placement:
    """Gives PREPARED items to engines.

    Args:
        engines: their tables, in the order of their indexes.
        space_seconds: how long an item may wait for a slot.
        timers: where that limit is set.
        overdue: called with an item that has waited so long, and the time.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        space_seconds: float,
        timers: Timers,
        overdue: Callable[[Computation, float], None],
    ) -> None:
        self._engines = engines
        self._space_seconds = space_seconds
        self._timers = timers
        self._overdue = overdue
        self._waiting: list[tuple[tuple[int, int, int], Computation]] = []
        """What has no slot. Those without a clock do not wait any more."""
        self._clocks: dict[int, Timer] = {}

    def enqueue(self, computation: Computation, now: float) -> None:
        """Takes a PREPARED item; it waits for a slot, oldest prompt first."""
        heapq.heappush(self._waiting, (computation.place, computation))
        self._clocks[computation.key] = self._timers.at(
            now + self._space_seconds, lambda at: self._overdue(computation, at)
        )

    def discard(self, computation: Computation) -> None:
        """It has ended. What a batch has of it stays there, and with it the slot, until the batch has come back."""
        if computation.slot is not None:
            engine = self._engines[computation.engine]
            for forward in computation.forwards:
                if forward.state is ForwardState.WAITING:
                    engine.let_go(forward, ForwardState.IDLE)
            if not computation.at_engine:
                engine.leave_slot(computation)
            return
        self._stop_clock(computation)
        if len(self._waiting) > 2 * len(self._clocks) + _SWEEP_SLACK:
            # Cancels must not let the heap grow while its oldest item waits for space.
            self._waiting = [entry for entry in self._waiting if entry[-1].key in self._clocks]
            heapq.heapify(self._waiting)

    def pump(self) -> None:
        """Gives slots, and relieves engines that are late while nobody waits for a slot of another."""
        if self._grant_slots():
            self._relieve_late_engines()

    def _grant_slots(self) -> bool:
        """Gives slots to the oldest prompt first; nobody younger may take while it waits.

        Returns:
            Whether all have one now but those that wait for one engine only.
        """
        aside = []
        while self._waiting:
            computation = self._waiting[0][-1]
            if computation.key in self._clocks and not self._grant_slot(computation):
                if computation.pinned_engine is None:
                    break
                # It waits for one engine, which may be dead: that must not hold up what others can do.
                aside.append(self._waiting[0])
            heapq.heappop(self._waiting)
        all_have = not self._waiting
        for entry in aside:
            heapq.heappush(self._waiting, entry)
        return all_have

    def _grant_slot(self, computation: Computation) -> bool:
        pinned = computation.pinned_engine
        ready = [engine for engine in self._engines if engine.ready and pinned in (None, engine.index)]
        found = self._reserve(computation, [engine for engine in ready if not engine.late] or ready)
        if found is None:
            return False
        engine, slot = found
        engine.take(computation, slot)
        self._stop_clock(computation)
        return True

    def _reserve(self, computation: Computation, engines: Sequence[Engine]) -> tuple[Engine, Slot] | None:
        """A slot of the engine with the least to do. None: nobody has space."""
        assert computation.layout is not None
        for engine in sorted(engines, key=lambda engine: (engine.failing, engine.load)):
            slot = engine.slots.reserve(computation.layout.nbytes)
            if slot is not None:
                return engine, slot
        return None

    def _relieve_late_engines(self) -> None:
        """What waits behind a batch that takes far longer than usual goes to other engines that have room for it."""
        if not any(engine.late for engine in self._engines):
            return
        others = [engine for engine in self._engines if engine.ready and not engine.late and not engine.failing]
        for engine in self._engines:
            if engine.late and others:
                begun, *sent = engine.batches.values()
                unstarted = [*engine.batcher.waiting(), *(forward for batch in sent for forward in batch.items)]
                for computation in {forward.computation: None for forward in unstarted}:
                    if not self._is_bound(computation, begun):
                        self._move(engine, computation, others)

    def _is_bound(self, computation: Computation, begun: Batch) -> bool:
        """It cannot go elsewhere: it has ended, or a part of its embedding is in its slot or on the way there."""
        return (
            computation.ended
            or computation.pinned_engine is not None
            or any(forward.state is ForwardState.DONE or forward.batch is begun for forward in computation.forwards)
        )

    def _move(self, engine: Engine, computation: Computation, others: Sequence[Engine]) -> None:
        """Moves an item of which the engine has begun nothing.

        What is in batches that it has, it will run all the same. Nobody will look at what it makes of that, so it may
        even find another input there by then; but it will write the slot.
        """
        slot = computation.slot
        assert slot is not None
        found = self._reserve(computation, others)
        if found is None:
            return
        sent = [forward.batch for forward in computation.forwards if forward.batch is not None]
        for forward in computation.forwards:
            if forward.batch is not None:
                forward.batch.items.remove(forward)
            engine.let_go(forward, ForwardState.IDLE)
        if sent:
            # Batches run in the order of their numbers: after the last of them nobody writes the slot any more.
            max(sent, key=lambda batch: batch.id).given_up.append(slot)
            computation.move(PartState.PREPARED)
        else:
            engine.slots.free(slot)
        other, its_slot = found
        other.take(computation, its_slot)

    def _stop_clock(self, computation: Computation) -> None:
        clock = self._clocks.pop(computation.key, None)
        if clock is not None:
            clock.cancel()
