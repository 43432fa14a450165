"""All policy of batching: which forwards run together, and when."""

from __future__ import annotations

from collections.abc import Mapping

from encoder_svc.runtime.fair_queue import FairQueue
from encoder_svc.runtime.forwards import Forward
from epd.internal.v1.media_worker_pb2 import Tower

LEAD_SECONDS = 0.005
"""A batch is sent so long before the engine needs it: the way to the engine, on a machine that is busy with it."""


class Batcher:
    """The forwards that wait for one engine; an item here is one of them.

    A batch is for one tower, and is filled up to that tower's budget of cost, not up to a count: small images gain from
    company, large ones do not. An item that exceeds the budget alone runs alone.

    Nothing waits for company while the engine is idle, unless a window is set. While it runs a batch, the next one is
    taken when it is full, or just before the running one is expected to end: early enough that the engine never waits,
    and late enough that what comes in the meantime is in it.

    Args:
        budgets: what a batch may cost, for each tower: in patches, or in mel frames for audio.
        window: seconds that an item may wait for company while the engine is idle.
    """

    def __init__(self, budgets: Mapping[Tower, int], window: float = 0.0) -> None:
        self._lanes = [_Lane(budget, window) for budget in budgets.values()]
        self._lane_of = dict(zip(budgets, self._lanes, strict=True))

    def budget(self, tower: Tower) -> int:
        """What a batch of a tower may cost."""
        return self._lane_of[tower].budget

    def set_budget(self, tower: Tower, cost: int) -> None:
        """The engine has measured what a batch of a tower may cost."""
        self._lane_of[tower].budget = cost

    def due(self, now: float, running_until: float | None) -> float | None:
        """When the next batch is to be taken, perhaps in the past. None: nothing waits.

        Args:
            now: the time.
            running_until: when the engine is expected to have done what it holds. None: it is idle.
        """
        return min((due for lane in self._lanes if (due := lane.due(now, running_until)) is not None), default=None)

    def push(self, forward: Forward) -> None:
        """Adds a forward whose computation has a slot."""
        self._lane_of[forward.tower].queue.push(forward, forward.patches)

    def discard(self, forward: Forward) -> bool:
        """Takes a forward out. Returns whether it was there."""
        return self._lane_of[forward.tower].queue.discard(forward)

    def next_batch(self, now: float, running_until: float | None) -> list[Forward]:
        """Takes what runs next. Empty: nothing is due.

        Of several towers whose items are due the one goes first whose first item has the largest priority, and among
        equals the one that has waited longest.

        Args:
            now: the time.
            running_until: as for :meth:`due`.
        """
        due = [lane for lane in self._lanes if (at := lane.due(now, running_until)) is not None and at <= now]
        return min(due, key=_Lane.place).take() if due else []

    def waiting(self) -> list[Forward]:
        """All forwards, tower by tower, those first that would run first."""
        return [forward for lane in self._lanes for forward in lane.queue.waiting()]

    def drain(self) -> list[Forward]:
        """Takes all forwards, in that order."""
        return [forward for lane in self._lanes for forward in lane.queue.drain()]


class _Lane:
    """The forwards of one tower."""

    def __init__(self, budget: int, window: float) -> None:
        self.queue: FairQueue[Forward] = FairQueue()
        self.budget = budget
        self._window = window
        self._first_at: float | None = None
        """Since when there is something that was not there when the last batch was taken."""

    def due(self, now: float, running_until: float | None) -> float | None:
        """As :meth:`Batcher.due`."""
        first = self.queue.peek()
        if first is None:
            self._first_at = None
            return None
        if self._first_at is None:
            self._first_at = now
        if self.queue.cost >= self.budget or first.is_suspect:
            return self._first_at
        if running_until is None:
            return self._first_at + self._window
        return running_until - LEAD_SECONDS

    def place(self) -> tuple[int, float]:
        """Smaller ones run first."""
        first = self.queue.peek()
        assert first is not None
        assert self._first_at is not None
        return (-first.priority, self._first_at)

    def take(self) -> list[Forward]:
        """Takes the forwards of one batch, at least one."""
        self._first_at = None
        batch: list[Forward] = []
        cost = 0
        while (following := self.queue.peek()) is not None:
            if batch and (cost + following.patches > self.budget or following.is_suspect):
                break
            self.queue.pop()
            batch.append(following)
            cost += following.patches
            if following.is_suspect:
                break
        return batch
