"""Places in a block of memory: pure bookkeeping over offsets."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

ALIGNMENT = 64
"""Every place begins at a multiple of this: a cache line, and enough for any vector load."""


class Allocator:
    """Best fit, and among equals the lowest address; neighbours that are free are merged at once.

    Args:
        size: the bytes of the block.

    Example:
        >>> allocator = Allocator(256)
        >>> allocator.allocate(100), allocator.allocate(100), allocator.allocate(1)
        (0, 128, None)
        >>> allocator.free(0)
        >>> allocator.free_bytes
        128
    """

    def __init__(self, size: int) -> None:
        self.size = size - size % ALIGNMENT
        self.free_bytes = self.size
        self._taken: dict[int, int] = {}
        self._free_starts: dict[int, int] = {}
        self._free_ends: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        self._by_start: list[int] = []
        if self.size:
            self._add_free(0, self.size)

    def allocate(self, nbytes: int) -> int | None:
        """Takes ``nbytes`` (at least 1) and returns their offset; None if no gap is large enough."""
        wanted = -(-nbytes // ALIGNMENT) * ALIGNMENT
        index = bisect_left(self._by_size, (wanted, 0))
        if index == len(self._by_size):
            return None
        offset = self._by_size[index][1]
        self.take(offset, nbytes)
        return offset

    def take(self, offset: int, nbytes: int) -> None:
        """Takes ``nbytes`` (at least 1) at a place that is free and begins at a multiple of :data:`ALIGNMENT`."""
        wanted = -(-nbytes // ALIGNMENT) * ALIGNMENT
        start = self._gap_start(offset)
        before, after = offset - start, self._free_starts[start] - (offset - start) - wanted
        assert after >= 0, "the place is not free"
        self._remove_free(start, before + wanted + after)
        if before:
            self._add_free(start, before)
        if after:
            self._add_free(offset + wanted, after)
        self._taken[offset] = wanted
        self.free_bytes -= wanted

    def free(self, offset: int) -> None:
        """Gives back what ``allocate`` returned.

        Raises:
            KeyError: nothing is allocated there.
        """
        length = self._taken.pop(offset)
        self.free_bytes += length
        before = self._free_ends.get(offset)
        if before is not None:
            self._remove_free(before, offset - before)
            length += offset - before
            offset = before
        after = self._free_starts.get(offset + length)
        if after is not None:
            self._remove_free(offset + length, after)
            length += after
        self._add_free(offset, length)

    @property
    def largest_gap(self) -> int:
        """The most bytes that :meth:`allocate` can give."""
        return self._by_size[-1][0] if self._by_size else 0

    def best_gap(self, nbytes: int) -> int:
        """Where :meth:`allocate` would begin. There must be such a gap."""
        return self._by_size[bisect_left(self._by_size, (nbytes, 0))][1]

    def gap_around(self, offset: int) -> int:
        """Bytes of the gap that ``offset`` is in. It must be in one."""
        return self._free_starts[self._gap_start(offset)]

    def gap_before(self, offset: int) -> int:
        """Free bytes that end at ``offset``."""
        start = self._free_ends.get(offset)
        return 0 if start is None else offset - start

    def gap_after(self, offset: int) -> int:
        """Free bytes that begin at ``offset``."""
        return self._free_starts.get(offset, 0)

    def _gap_start(self, offset: int) -> int:
        return self._by_start[bisect_right(self._by_start, offset) - 1]

    def _add_free(self, offset: int, length: int) -> None:
        self._free_starts[offset] = length
        self._free_ends[offset + length] = offset
        insort(self._by_size, (length, offset))
        insort(self._by_start, offset)

    def _remove_free(self, offset: int, length: int) -> None:
        del self._free_starts[offset]
        del self._free_ends[offset + length]
        del self._by_size[bisect_left(self._by_size, (length, offset))]
        del self._by_start[bisect_left(self._by_start, offset)]
