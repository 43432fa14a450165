"""All policy of batching: which prepared parts run together."""

from __future__ import annotations

from encoder_svc.runtime.fair_queue import FairQueue
from encoder_svc.runtime.parts import Part
from epd.encoder.v1.media_pb2 import Modality


class Batcher:
    """The parts that wait for one engine.

    A batch is filled up to a budget of patches, not a count: small images gain from company, large ones do not. A part
    that exceeds the budget alone runs alone. All parts of a batch are for one tower. Nothing waits for company: a batch
    is taken when the engine has a place for it.

    Args:
        budget: patches of a batch (mel frames for audio).
    """

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._queue = FairQueue()

    def push(self, part: Part) -> None:
        """Adds a PREPARED part that has a slot."""
        self._queue.push(part, part.patches)

    def next_batch(self) -> list[Part]:
        """Takes the parts that run next. Empty: there are none."""
        batch: list[Part] = []
        patches = 0
        while (part := self._queue.peek()) is not None:
            if batch and (patches + part.patches > self._budget or _tower(part) != _tower(batch[0]) or _suspect(part)):
                break
            self._queue.pop()
            batch.append(part)
            patches += part.patches
            if _suspect(part):
                break
        return batch

    def drain(self) -> list[Part]:
        """Takes all parts, in no order."""
        return self._queue.drain()


def _tower(part: Part) -> str:
    return "audio" if part.item.modality == Modality.MODALITY_AUDIO else "vision"


def _suspect(part: Part) -> bool:
    """An engine died while it ran this part: the next time it runs alone, so that it can harm nobody."""
    return part.attempts > 0
