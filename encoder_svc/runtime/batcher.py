"""All policy of batching: which prepared items run together."""

from __future__ import annotations

from encoder_svc.runtime.computations import Computation
from encoder_svc.runtime.fair_queue import FairQueue
from epd.encoder.v1.media_pb2 import Modality

LEAD_SECONDS = 0.005
"""A batch is sent so long before the engine needs it: the way to the engine, on a machine that is busy with it."""


class Batcher:
    """The items that wait for one engine.

    A batch is filled up to a budget of patches, not a count: small images gain from company, large ones do not. An item
    that exceeds the budget alone runs alone. All items of a batch are for one tower.

    Nothing waits for company while the engine is idle, unless a window is set. While it runs a batch, the next one is
    taken when it is full, or just before the running one is expected to end: early enough that the engine never waits,
    and late enough that what comes in the meantime is in it.

    Args:
        budget: patches of a batch (mel frames for audio).
        window: seconds that an item may wait for company while the engine is idle.
    """

    def __init__(self, budget: int, window: float = 0.0) -> None:
        self.budget = budget
        self._window = window
        self._queue = FairQueue()
        self._first_at: float | None = None

    def due(self, now: float, running_until: float | None) -> float | None:
        """When the next batch is to be taken, perhaps in the past. None: nothing waits.

        Args:
            now: the time.
            running_until: when the engine is expected to have done what it holds. None: it is idle.
        """
        first = self._queue.peek()
        if first is None:
            self._first_at = None
            return None
        if self._first_at is None:
            self._first_at = now
        if self._queue.cost >= self.budget or _suspect(first):
            return now
        if running_until is None:
            return self._first_at + self._window
        return running_until - LEAD_SECONDS

    def push(self, computation: Computation) -> None:
        """Adds a PREPARED item that has a slot."""
        self._queue.push(computation, computation.patches)

    def next_batch(self) -> list[Computation]:
        """Takes the items that run next. Empty: there are none."""
        self._first_at = None
        batch: list[Computation] = []
        patches = 0
        while (following := self._queue.peek()) is not None:
            if batch and (
                patches + following.patches > self.budget
                or _tower(following) != _tower(batch[0])
                or _suspect(following)
            ):
                break
            self._queue.pop()
            batch.append(following)
            patches += following.patches
            if _suspect(following):
                break
        return batch

    def drain(self) -> list[Computation]:
        """Takes all items, in no order."""
        return self._queue.drain()


def _tower(computation: Computation) -> str:
    return "audio" if computation.item.modality == Modality.MODALITY_AUDIO else "vision"


def _suspect(computation: Computation) -> bool:
    """An engine died while it ran this item: the next time it runs alone, so that it can harm nobody."""
    return computation.attempts > 0
