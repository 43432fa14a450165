"""Packs grids of any sizes into one forward: the order of the patches and who attends to whom.

A segment is a run of patches that attend to each other and to nobody else: a frame, or a window of a frame. One call of
attention takes all segments of one length, so the number of calls grows with the number of distinct lengths and not
with images or windows. To need no copy for windows, the whole batch is ordered by the length of its windows, and
windows of one length by the length of their frames: if all windows are as long, which whole windows are, no frame needs
one either.

Where a kernel takes segments of any lengths, they only have to stand one after another: windows and frames of an item
both do if the items stay in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, groupby

import torch

Grid = tuple[int, int, int]
"""Frames, rows and columns of a grid, in patches."""


@dataclass(frozen=True)
class SegmentGroup:
    """All segments of one length."""

    count: int
    length: int
    """Patches of each segment."""
    start: int
    """Where the first begins, if they stand one after another in the packed order."""
    index: torch.Tensor | None
    """The places of their patches in the packed order, shape (count · length,); None: they stand one after another."""


@dataclass(frozen=True)
class SegmentBounds:
    """Segments of any lengths that stand one after another."""

    bounds: torch.Tensor
    """Where each begins in the packed order, and where the last ends; int32, shape (segments + 1,)."""
    longest: int
    """Patches of the longest."""


Segments = tuple[SegmentGroup, ...] | SegmentBounds
"""Who attends to whom."""


@dataclass(frozen=True)
class GridWindows:
    """The windows of one grid. Cached: a grid comes again and again."""

    order: torch.Tensor
    """Merge blocks, window after window; int32, shape (blocks,)."""
    lengths: torch.Tensor
    """Merge blocks of each window that is not empty; int32, shape (windows,)."""
    positions: torch.Tensor
    """Row and column of each patch of the grid in merge-block order; int32, shape (patches, 2)."""


@dataclass(frozen=True)
class PackedBatch:
    """How the patches of a batch stand in the forward."""

    order: torch.Tensor
    """The place among all items' patches of each patch of the packed order; int64, shape (patches,)."""
    block_order_inverse: torch.Tensor
    """The place in the packed order of each merge block; int64, shape (blocks,)."""
    positions: torch.Tensor
    """Row and column of each patch, in packed order; int64, shape (patches, 2)."""
    windows: Segments
    """Who attends to whom within windows."""
    frames: Segments
    """Who attends to whom within whole frames."""

    def to(self, device: torch.device) -> PackedBatch:
        """The same on a device."""
        if device.type == "cpu":
            return self
        return PackedBatch(
            _send(self.order, device),
            _send(self.block_order_inverse, device),
            _send(self.positions, device),
            _send_segments(self.windows, device),
            _send_segments(self.frames, device),
        )


def _send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    # A copy out of memory that is not pinned would wait until the batch before has run.
    return tensor.pin_memory().to(device, non_blocking=True)


def _send_segments(segments: Segments, device: torch.device) -> Segments:
    if isinstance(segments, SegmentBounds):
        return replace(segments, bounds=_send(segments.bounds, device))
    return tuple(
        group if group.index is None else replace(group, index=_send(group.index, device)) for group in segments
    )


@lru_cache(maxsize=64)
def cut_windows(grid: Grid, merge_size: int, window_blocks: int) -> GridWindows:
    """Cuts the frames of a grid into square windows; those at the right and lower edge are smaller.

    Args:
        grid: in patches, both sides whole merge blocks.
        merge_size: the side of a merge block in patches.
        window_blocks: the side of a window in merge blocks.
    """
    frames, rows, columns = grid[0], grid[1] // merge_size, grid[2] // merge_size
    blocks = torch.arange(frames * rows * columns, dtype=torch.int32).view(frames, rows, columns)
    windows = [
        blocks[frame, top : top + window_blocks, left : left + window_blocks].reshape(-1)
        for frame in range(frames)
        for top in range(0, rows, window_blocks)
        for left in range(0, columns, window_blocks)
    ]
    row, column = torch.meshgrid(
        torch.arange(grid[1], dtype=torch.int32), torch.arange(grid[2], dtype=torch.int32), indexing="ij"
    )
    positions = torch.stack(
        [
            axis.reshape(rows, merge_size, columns, merge_size).transpose(1, 2).reshape(-1).repeat(frames)
            for axis in (row, column)
        ],
        dim=-1,
    )
    lengths = torch.tensor([window.numel() for window in windows], dtype=torch.int32)
    return GridWindows(torch.cat(windows), lengths, positions)


def pack(grids: Sequence[Grid], merge_size: int, window_blocks: int, any_lengths: bool = False) -> PackedBatch:
    """Plans the forward of a batch.

    Args:
        grids: of the items, in the order in which their patches follow each other.
        merge_size: the side of a merge block in patches.
        window_blocks: the side of a window in merge blocks.
        any_lengths: one call of attention takes segments of any lengths; else it takes those of one length.
    """
    unit = merge_size**2
    cut = [cut_windows(grid, merge_size, window_blocks) for grid in grids]
    block_starts = list(accumulate((part.order.numel() for part in cut), initial=0))
    blocks = torch.cat([part.order.long() + start for part, start in zip(cut, block_starts, strict=False)])
    lengths = torch.cat([part.lengths for part in cut]).long()
    frames = [rows * columns for count, rows, columns in grids for _ in range(count)]

    if any_lengths:
        block_order = blocks
    else:
        frame_of_window = torch.cat(
            [torch.full_like(part.lengths, rows * columns) for (_, rows, columns), part in zip(grids, cut, strict=True)]
        )
        by_length = torch.argsort(frame_of_window, stable=True)
        by_length = by_length[torch.argsort(lengths[by_length], stable=True)]
        starts = (lengths.cumsum(0) - lengths)[by_length]
        lengths = lengths[by_length]
        new_starts = lengths.cumsum(0) - lengths
        # For each window, sorted, its blocks: start, start + 1, ...
        within = torch.arange(blocks.numel()) - new_starts.repeat_interleave(lengths)
        block_order = blocks[starts.repeat_interleave(lengths) + within]
    order = (block_order[:, None] * unit + torch.arange(unit)).reshape(-1)
    inverse = torch.empty_like(block_order)
    inverse[block_order] = torch.arange(block_order.numel())
    windows = (lengths * unit).tolist()
    return PackedBatch(
        order=order,
        block_order_inverse=inverse,
        positions=torch.cat([part.positions for part in cut]).long()[order],
        windows=_bound(windows) if any_lengths else _group_windows(windows),
        frames=_bound(frames) if any_lengths else _group_frames(frames, inverse, unit),
    )


def _bound(lengths: Sequence[int]) -> SegmentBounds:
    return SegmentBounds(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), max(lengths))


def _group_windows(lengths: Sequence[int]) -> tuple[SegmentGroup, ...]:
    groups, start = [], 0
    for length, run in groupby(lengths):
        count = len(list(run))
        groups.append(SegmentGroup(count, length, start, None))
        start += length * count
    return tuple(groups)


def _group_frames(lengths: Sequence[int], inverse: torch.Tensor, unit: int) -> tuple[SegmentGroup, ...]:
    by_length: dict[int, list[int]] = {}
    for length, start in zip(lengths, accumulate(lengths, initial=0), strict=False):
        by_length.setdefault(length, []).append(start)
    places = (inverse[:, None] * unit + torch.arange(unit)).reshape(-1)
    groups = []
    for length, starts in sorted(by_length.items()):
        # Attention does not ask in which order the patches of a segment stand.
        rows = torch.stack([places[start : start + length] for start in starts]).sort(dim=1).values
        rows = rows[rows[:, 0].argsort()]
        first, index = int(rows[0, 0]), rows.reshape(-1)
        in_place = torch.equal(index, torch.arange(first, first + index.numel()))
        groups.append(SegmentGroup(len(starts), length, first if in_place else 0, None if in_place else index))
    return tuple(groups)
