"""All policy of batching: which prepared items run together."""

from __future__ import annotations

from encoder_svc.runtime.computations import Computation
from encoder_svc.runtime.fair_queue import FairQueue
from epd.encoder.v1.media_pb2 import Modality


class Batcher:
    """The items that wait for one engine.

    A batch is filled up to a budget of patches, not a count: small images gain from company, large ones do not. An item
    that exceeds the budget alone runs alone. All items of a batch are for one tower. Nothing waits for company while
    the engine is idle.

    Args:
        budget: patches of a batch (mel frames for audio).
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._queue = FairQueue()

    def push(self, computation: Computation) -> None:
        """Adds a PREPARED item that has a slot."""
        self._queue.push(computation, computation.patches)

    def next_batch(self) -> list[Computation]:
        """Takes the items that run next. Empty: there are none."""
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
