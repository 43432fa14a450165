"""A queue that is fair between prompts by cost, so that 64 images of one do not hold up one image of another.

Start-time fair queueing (Goyal, Vin, Cheng 1996): an item's tag is the later of the queue's virtual time and the end
of the prompt's last item; items leave in the order of their tags. The virtual time is the tag that left last, and at
least what processor sharing gives (Parekh, Gallager 1993): each item that leaves moves it on by its cost over the
number of prompts that wait. Otherwise prompts of one item that keep coming, each at the virtual time, would never let
it move, and starve a prompt of several.
"""

from __future__ import annotations

import heapq
from collections import Counter
from itertools import count
from weakref import WeakKeyDictionary

from encoder_svc.runtime.computations import Computation
from encoder_svc.runtime.requests import Prompt


class FairQueue:
    """Computations that wait for a hand. Larger priorities leave first. Those that have ended are skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, float, Computation]] = []
        self._sequence = count()
        self._virtual_time = 0.0
        self._waiting: Counter[Prompt] = Counter()
        self._last_end: WeakKeyDictionary[Prompt, float] = WeakKeyDictionary()
        self._sweep_at = 256
        self.cost = 0.0
        """Of all that wait; what has ended counts until it is met."""

    def push(self, computation: Computation, cost: float) -> None:
        """Adds one; ``cost`` is in any unit that is the same for the whole queue."""
        prompt = computation.prompt
        tag = max(self._virtual_time, self._last_end.get(prompt, 0.0))
        self._last_end[prompt] = tag + cost
        self._waiting[prompt] += 1
        self.cost += cost
        heapq.heappush(self._heap, (-computation.priority, tag, next(self._sequence), cost, computation))
        if len(self._heap) >= self._sweep_at:
            self._sweep()

    def peek(self) -> Computation | None:
        """The one that leaves next. None: the queue is empty."""
        while self._heap and self._heap[0][-1].ended:
            self._take()
        return self._heap[0][-1] if self._heap else None

    def pop(self) -> Computation | None:
        """Takes the one that leaves next. None: the queue is empty."""
        if self.peek() is None:
            return None
        prompts = len(self._waiting)
        tag, cost, computation = self._take()
        self._virtual_time = max(self._virtual_time + cost / prompts, tag)
        return computation

    def drain(self) -> list[Computation]:
        """Takes all, in no order."""
        waiting = [entry[-1] for entry in self._heap if not entry[-1].ended]
        self._heap.clear()
        self.cost = 0.0
        self._waiting.clear()
        return waiting

    def _take(self) -> tuple[float, float, Computation]:
        """Takes the first entry: tag, cost, computation."""
        _, tag, _, cost, computation = heapq.heappop(self._heap)
        prompt = computation.prompt
        self.cost -= cost
        self._waiting[prompt] -= 1
        if not self._waiting[prompt]:
            del self._waiting[prompt]
        return tag, cost, computation

    def _sweep(self) -> None:
        """Drops those that have ended: cancels must not let the heap grow while the hands are busy."""
        self._heap = [entry for entry in self._heap if not entry[-1].ended]
        heapq.heapify(self._heap)
        self._waiting = Counter(entry[-1].prompt for entry in self._heap)
        self.cost = sum(entry[3] for entry in self._heap)
        self._sweep_at = max(256, 2 * len(self._heap))
