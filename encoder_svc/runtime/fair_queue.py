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
from collections.abc import Hashable
from itertools import count
from typing import Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakKeyDictionary

from encoder_svc.runtime.requests import Prompt


class Queued(Protocol):
    """What can wait: a computation, or a forward."""

    @property
    def key(self) -> Hashable:
        """Its name, unique in the queue."""
        ...

    @property
    def prompt(self) -> Prompt:
        """Whose turn it is."""
        ...

    @property
    def priority(self) -> int:
        """Larger ones leave first."""
        ...


Item = TypeVar("Item", bound=Queued)


class _Entry(NamedTuple, Generic[Item]):
    """One item; smaller ones leave first."""

    falling_priority: int
    tag: float
    sequence: int
    cost: int
    item: Item


class FairQueue(Generic[Item]):
    """Items that wait for a hand. Larger priorities leave first."""

    def __init__(self) -> None:
        self._heap: list[_Entry[Item]] = []
        self._live: dict[Hashable, _Entry[Item]] = {}
        """By the item's key. Entries of the heap that are not here were discarded."""
        self._sequence = count()
        self._virtual_time = 0.0
        self._waiting: Counter[Prompt] = Counter()
        self._last_end: WeakKeyDictionary[Prompt, float] = WeakKeyDictionary()
        self.cost = 0
        """Of all that wait."""

    def __len__(self) -> int:
        return len(self._live)

    def push(self, item: Item, cost: int) -> None:
        """Adds one that is not in it; ``cost`` is in any unit that is the same for the whole queue."""
        prompt = item.prompt
        tag = max(self._virtual_time, self._last_end.get(prompt, 0.0))
        self._last_end[prompt] = tag + cost
        self._waiting[prompt] += 1
        self.cost += cost
        entry = _Entry(-item.priority, tag, next(self._sequence), cost, item)
        self._live[item.key] = entry
        heapq.heappush(self._heap, entry)

    def discard(self, item: Item) -> bool:
        """Takes one out, wherever it stands. Returns whether it was there."""
        entry = self._live.get(item.key)
        if entry is None:
            return False
        self._leave(entry)
        if len(self._heap) > 2 * len(self._live) + 256:
            # Cancels must not let the heap grow while the hands are busy.
            self._heap = list(self._live.values())
            heapq.heapify(self._heap)
        return True

    def peek(self) -> Item | None:
        """The one that leaves next. None: the queue is empty."""
        while self._heap and self._live.get(self._heap[0].item.key) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0].item if self._heap else None

    def pop(self) -> Item | None:
        """Takes the one that leaves next. None: the queue is empty."""
        if self.peek() is None:
            return None
        prompts = len(self._waiting)
        entry = heapq.heappop(self._heap)
        self._leave(entry)
        self._virtual_time = max(self._virtual_time + entry.cost / prompts, entry.tag)
        return entry.item

    def waiting(self) -> list[Item]:
        """All that wait, in the order in which they would leave if none came."""
        return [entry.item for entry in sorted(self._live.values())]

    def drain(self) -> list[Item]:
        """Takes all, in that order."""
        found = self.waiting()
        self._heap.clear()
        self._live.clear()
        self._waiting.clear()
        self.cost = 0
        return found

    def _leave(self, entry: _Entry[Item]) -> None:
        del self._live[entry.item.key]
        prompt = entry.item.prompt
        self.cost -= entry.cost
        self._waiting[prompt] -= 1
        if not self._waiting[prompt]:
            del self._waiting[prompt]
