"""Which places of the arena hold slots, as far as the engine was told to write them."""

from __future__ import annotations

import threading
from bisect import bisect_left

from epd import slot_header


class SlotPlaces:
    """Places of slots that do not overlap. Used by several threads.

    What lies in the arena at any other place is no header, whatever it looks like: so nobody can pass the bytes of an
    embedding off as one, and read on from there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starts: list[int] = []
        self._nbytes: dict[int, int] = {}

    def add(self, offset: int, nbytes: int) -> None:
        """A slot is about to be written; those that it overlaps are history.

        Args:
            offset: of its header.
            nbytes: of its payload.
        """
        end = offset + slot_header.SIZE + nbytes
        with self._lock:
            first = bisect_left(self._starts, offset)
            if first and self._end(self._starts[first - 1]) > offset:
                first -= 1
            last = bisect_left(self._starts, end)
            for start in self._starts[first:last]:
                del self._nbytes[start]
            self._starts[first:last] = [offset]
            self._nbytes[offset] = nbytes

    def nbytes_at(self, offset: int) -> int | None:
        """The payload's bytes of the slot whose header is at ``offset``; None: there is no slot."""
        with self._lock:
            return self._nbytes.get(offset)

    def _end(self, start: int) -> int:
        return start + slot_header.SIZE + self._nbytes[start]
