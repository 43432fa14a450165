"""Things that are due at a time: a heap, with the time passed in."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count


class Timer:
    """One thing that is due. Cancelling is idempotent."""

    __slots__ = ("action", "at")

    def __init__(self, at: float, action: Callable[[float], None]) -> None:
        self.at = at
        self.action: Callable[[float], None] | None = action

    def cancel(self) -> None:
        """It will not happen."""
        self.action = None


class Timers:
    """All timers of the runtime.

    Example:
        >>> timers, seen = Timers(), []
        >>> late, early = timers.at(2.0, seen.append), timers.at(1.0, seen.append)
        >>> late.cancel()
        >>> timers.run_due(5.0), seen
        (1, [5.0])
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Timer]] = []
        self._sequence = count()
        self._sweep_at = 1024

    def at(self, when: float, action: Callable[[float], None]) -> Timer:
        """Calls ``action`` with the time at the first :meth:`run_due` that is not before ``when``."""
        timer = Timer(when, action)
        heapq.heappush(self._heap, (when, next(self._sequence), timer))
        if len(self._heap) >= self._sweep_at:
            self._sweep()
        return timer

    def next_due(self) -> float | None:
        """When the first timer is due. None: there is none."""
        while self._heap and self._heap[0][2].action is None:
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def run_due(self, now: float) -> int:
        """Calls what is due, in order, and returns how many that were."""
        called = 0
        while self._heap and self._heap[0][0] <= now:
            timer = heapq.heappop(self._heap)[2]
            if timer.action is not None:
                action, timer.action = timer.action, None
                action(now)
                called += 1
        return called

    def _sweep(self) -> None:
        """Drops cancelled timers: a lease of a minute is released after milliseconds, so they are nearly all."""
        self._heap = [entry for entry in self._heap if entry[2].action is not None]
        heapq.heapify(self._heap)
        self._sweep_at = max(1024, 2 * len(self._heap))
