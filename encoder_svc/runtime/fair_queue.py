"""A queue that is fair between prompts by cost, so that 64 images of one do not hold up one image of another.

Start-time fair queueing (Goyal, Vin, Cheng 1996): a part's tag is the later of the queue's virtual time and the end of
the prompt's last part; parts leave in the order of their tags. The virtual time is the tag that left last, and at least
what processor sharing gives (Parekh, Gallager 1993): each part that leaves moves it on by its cost over the number of
prompts that wait. Otherwise prompts of one part that keep coming, each at the virtual time, would never let it move,
and starve a prompt of several.
"""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import count
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from encoder_svc.runtime.parts import Part

if TYPE_CHECKING:
    from encoder_svc.runtime.requests import Prompt


class FairQueue:
    """Parts that wait for a hand. Larger priorities leave first. Parts that have ended are skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, float, Part]] = []
        self._sequence = count()
        self._virtual_time = 0.0
        self._waiting: Counter[Prompt] = Counter()
        self._last_end: WeakKeyDictionary[Prompt, float] = WeakKeyDictionary()
        self._sweep_at = 256

    def push(self, part: Part, cost: float) -> None:
        """Adds a part; ``cost`` is in any unit that is the same for all parts of the queue."""
        prompt = part.request.prompt
        tag = max(self._virtual_time, self._last_end.get(prompt, 0.0))
        self._last_end[prompt] = tag + cost
        self._waiting[prompt] += 1
        heapq.heappush(self._heap, (-part.request.priority, tag, next(self._sequence), cost, part))
        if len(self._heap) >= self._sweep_at:
            self._sweep()

    def peek(self) -> Part | None:
        """The part that leaves next. None: the queue is empty."""
        while self._heap and self._heap[0][4].ended:
            self._take()
        return self._heap[0][4] if self._heap else None

    def pop(self) -> Part | None:
        """Takes the part that leaves next. None: the queue is empty."""
        if self.peek() is None:
            return None
        prompts = len(self._waiting)
        tag, cost, part = self._take()
        self._virtual_time = max(self._virtual_time + cost / prompts, tag)
        return part

    def drain(self) -> list[Part]:
        """Takes all parts, in no order."""
        parts = [entry[4] for entry in self._heap if not entry[4].ended]
        self._heap.clear()
        self._waiting.clear()
        return parts

    def _take(self) -> tuple[float, float, Part]:
        """Takes the first entry: tag, cost, part."""
        _, tag, _, cost, part = heapq.heappop(self._heap)
        prompt = part.request.prompt
        self._waiting[prompt] -= 1
        if not self._waiting[prompt]:
            del self._waiting[prompt]
        return tag, cost, part

    def _sweep(self) -> None:
        """Drops parts that have ended: cancels must not let the heap grow while the hands are busy."""
        self._heap = [entry for entry in self._heap if not entry[4].ended]
        heapq.heapify(self._heap)
        self._waiting = Counter(entry[4].request.prompt for entry in self._heap)
        self._sweep_at = max(256, 2 * len(self._heap))
