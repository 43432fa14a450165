"""Places in a block of memory: pure bookkeeping over offsets."""

from __future__ import annotations

from bisect import bisect_left, insort

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
        if self.size:
            self._add_free(0, self.size)

    def allocate(self, nbytes: int) -> int | None:
        """Takes ``nbytes`` (at least 1) and returns their offset; None if no gap is large enough."""
        wanted = -(-nbytes // ALIGNMENT) * ALIGNMENT
        index = bisect_left(self._by_size, (wanted, 0))
        if index == len(self._by_size):
            return None
        gap, offset = self._by_size[index]
        self._remove_free(offset, gap)
        if gap > wanted:
            self._add_free(offset + wanted, gap - wanted)
        self._taken[offset] = wanted
        self.free_bytes -= wanted
        return offset

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

    def gap_before(self, offset: int) -> int:
        """Free bytes that end at ``offset``."""
        start = self._free_ends.get(offset)
        return 0 if start is None else offset - start

    def gap_after(self, offset: int) -> int:
        """Free bytes that begin at ``offset``."""
        return self._free_starts.get(offset, 0)

    def _add_free(self, offset: int, length: int) -> None:
        self._free_starts[offset] = length
        self._free_ends[offset + length] = offset
        insort(self._by_size, (length, offset))

    def _remove_free(self, offset: int, length: int) -> None:
        del self._free_starts[offset]
        del self._free_ends[offset + length]
        del self._by_size[bisect_left(self._by_size, (length, offset))]
