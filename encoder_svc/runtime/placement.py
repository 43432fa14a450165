"""Which engine an item goes to, and when: slots, oldest prompt first, and away from late engines. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from encoder_svc.runtime.computations import Computation
from encoder_svc.runtime.engine_table import Batch, Engine
from encoder_svc.runtime.parts import PartState
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
        """It has ended while it was PREPARED: it is in no batch."""
        if computation.slot is not None:
            engine = self._engines[computation.engine]
            engine.batcher.discard(computation)
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
        if self._place(computation, [engine for engine in ready if not engine.late] or ready):
            self._stop_clock(computation)
            return True
        return False

    def _place(self, computation: Computation, engines: Sequence[Engine]) -> bool:
        """Gives an item a slot of the engine with the least to do, and queues it there."""
        assert computation.layout is not None
        for engine in sorted(engines, key=lambda engine: (engine.failing, engine.load)):
            slot = engine.slots.reserve(computation.layout.nbytes)
            if slot is not None:
                computation.slot, computation.engine = slot, engine.index
                engine.patches[computation.tower] += computation.patches
                engine.batcher.push(computation)
                return True
        return False

    def _relieve_late_engines(self) -> None:
        """What waits behind a batch that takes far longer than usual goes to other engines that have room for it."""
        if not any(engine.late for engine in self._engines):
            return
        others = [engine for engine in self._engines if engine.ready and not engine.late and not engine.failing]
        for engine in self._engines:
            if engine.late and others:
                for item in engine.batcher.waiting():
                    self._move_waiting(engine, item, others)
                for batch in list(engine.batches.values())[1:]:
                    for item in list(batch.items):
                        self._move_sent(engine, batch, item, others)

    def _move_waiting(self, engine: Engine, item: Computation, others: Sequence[Engine]) -> None:
        slot = item.slot
        assert slot is not None
        if item.pinned_engine is None and self._place(item, others):
            engine.batcher.discard(item)
            engine.patches[item.tower] -= item.patches
            engine.slots.free(slot)

    def _move_sent(self, engine: Engine, batch: Batch, item: Computation, others: Sequence[Engine]) -> None:
        """Moves an item whose batch the engine has, but has not begun.

        The engine will run it all the same. Nobody will look at what it makes of it, so it may even find another input
        there by then; but it will write the slot.
        """
        slot = item.slot
        assert slot is not None
        if item.ended or item.pinned_engine is not None:
            return
        item.move(PartState.PREPARED)
        if self._place(item, others):
            batch.items.remove(item)
            batch.given_up.append(slot)
            engine.patches[item.tower] -= item.patches
        else:
            item.move(PartState.ENCODING)

    def _stop_clock(self, computation: Computation) -> None:
        clock = self._clocks.pop(computation.key, None)
        if clock is not None:
            clock.cancel()
