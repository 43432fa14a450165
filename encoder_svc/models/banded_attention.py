"""Attention of a packed batch in a band: every position sees so many to both sides within its segment, and no others.

Queries are cut into blocks, and each block looks at the stretch of keys that its band covers, so the work grows with a
segment's length and not with its square. Blocks of one shape and one place of the band in it, of all segments, are one
call. Keys and values of groups of heads are read once: the queries of a group's heads stand one after another in one
attention of the group.

A head's *sink* takes weight from what a query sees. It is either added to the score of the segment's first key, or is a
score more in the softmax with nothing behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch.nn import functional

from encoder_svc.models.mimo_v2_config import SinkForm

BLOCK = 128
"""Queries of a block."""


@dataclass(frozen=True)
class Band:
    """How far a position sees."""

    back: int | None
    """Positions before it. None: to the segment's beginning."""
    ahead: int | None
    """Positions behind it. None: to the segment's end."""


@dataclass(frozen=True)
class BlockGroup:
    """Blocks of queries that see keys in the same way."""

    count: int
    queries: torch.Tensor
    """The places of their queries; int64, shape (count · rows,)."""
    keys: torch.Tensor
    """The places of the keys that each looks at; int64, shape (count · width,)."""
    seen: torch.Tensor | None
    """Which query sees which key; bool, shape (rows, width). None: all see all."""
    at_start: bool
    """The first key is the first of its segment."""

    @property
    def rows(self) -> int:
        """Queries of a block."""
        return len(self.queries) // self.count

    @property
    def width(self) -> int:
        """Keys of a block."""
        return len(self.keys) // self.count


@dataclass(frozen=True)
class Sinks:
    """The sinks of a layer."""

    values: torch.Tensor
    """Of each head, shape (heads,)."""
    form: SinkForm


def plan_band(lengths: Sequence[int], band: Band, device: torch.device) -> tuple[BlockGroup, ...]:
    """Cuts segments that stand one after another into blocks.

    Args:
        lengths: of the segments, each at least 1.
        band: how far positions see.
        device: where the plan goes.
    """
    blocks: dict[tuple[int, int, int, bool], list[tuple[int, int]]] = {}
    for length, start in zip(lengths, accumulate(lengths, initial=0), strict=False):
        for first, rows, key, width in _cut(length, band):
            shape = (rows, width, first - key, key == 0)
            blocks.setdefault(shape, []).append((start + first, start + key))
    groups = []
    for (rows, width, offset, at_start), places in sorted(blocks.items()):
        firsts, keys = torch.tensor(places).unbind(1)
        group = BlockGroup(
            count=len(places),
            queries=(firsts[:, None] + torch.arange(rows)).reshape(-1),
            keys=(keys[:, None] + torch.arange(width)).reshape(-1),
            seen=_seen(rows, width, offset, band),
            at_start=at_start,
        )
        groups.append(_send(group, device))
    return tuple(groups)


def _cut(length: int, band: Band) -> list[tuple[int, int, int, int]]:
    """The blocks of a segment: first query, queries, first key, keys."""
    if band.back is None or band.ahead is None or length <= BLOCK + band.back + band.ahead:
        return [(0, length, 0, length)]
    # The stretch of keys keeps its length at the segment's ends, so that few shapes of blocks come of it.
    width = BLOCK + band.back + band.ahead
    return [
        (first, min(BLOCK, length - first), min(max(0, first - band.back), length - width), width)
        for first in range(0, length, BLOCK)
    ]


def _seen(rows: int, width: int, offset: int, band: Band) -> torch.Tensor | None:
    distance = torch.arange(width) - (torch.arange(rows)[:, None] + offset)
    seen = torch.ones(rows, width, dtype=torch.bool)
    if band.back is not None:
        seen &= distance >= -band.back
    if band.ahead is not None:
        seen &= distance <= band.ahead
    return None if seen.all() else seen


def _send(group: BlockGroup, device: torch.device) -> BlockGroup:
    if device.type == "cpu":
        return group
    # A copy out of memory that is not pinned would wait until the batch before has run.
    queries, keys = (index.pin_memory().to(device, non_blocking=True) for index in (group.queries, group.keys))
    seen = None if group.seen is None else group.seen.pin_memory().to(device, non_blocking=True)
    return replace(group, queries=queries, keys=keys, seen=seen)


def attend_in_band(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    groups: Sequence[BlockGroup],
    sinks: Sinks | None = None,
) -> torch.Tensor:
    """Softmax attention of every position over what it sees.

    Args:
        query: shape (positions, heads, head size).
        key: shape (positions, key heads, head size); neighbouring query heads share one.
        value: as ``key``.
        groups: that hold every position once.
        sinks: of the heads.

    Returns:
        Shape (positions, heads · head size).
    """
    positions, heads, size = query.shape
    key_heads = key.shape[1]
    share = heads // key_heads
    has_column = sinks is not None and sinks.form is SinkForm.SOFTMAX
    if has_column:
        # What a sink looks at: nothing.
        key, value = (functional.pad(tensor, (0, 0, 0, 0, 0, 1)) for tensor in (key, value))
    out = query.new_empty(positions, heads * size)
    for group in groups:
        chosen = query.index_select(0, group.queries).view(group.count, group.rows, key_heads, share, size)
        chosen = chosen.permute(0, 2, 3, 1, 4).reshape(group.count, key_heads, share * group.rows, size)
        places = group.keys
        if has_column:
            places = functional.pad(places.view(group.count, -1), (0, 1), value=positions).view(-1)
        keys, values = (
            tensor.index_select(0, places).view(group.count, -1, key_heads, size).transpose(1, 2)
            for tensor in (key, value)
        )
        mask = _mask(group, sinks, share, query)
        attended = functional.scaled_dot_product_attention(chosen, keys, values, attn_mask=mask)
        attended = attended.view(group.count, key_heads, share, group.rows, size).permute(0, 3, 1, 2, 4)
        out.index_copy_(0, group.queries, attended.reshape(-1, heads * size))
    return out


def _mask(group: BlockGroup, sinks: Sinks | None, share: int, like: torch.Tensor) -> torch.Tensor | None:
    """What is added to the scores; shape (1, key heads or 1, share · rows, width)."""
    touches = sinks is not None and (sinks.form is SinkForm.SOFTMAX or group.at_start)
    if group.seen is None and not touches:
        return None
    mask = like.new_zeros(group.rows, group.width)
    if group.seen is not None:
        mask.masked_fill_(~group.seen, float("-inf"))
    if sinks is None or not touches:
        return mask.repeat(share, 1)[None, None]
    column = sinks.values.to(like.dtype).view(-1, 1, 1).expand(-1, group.rows, 1)
    of_heads = mask.expand(len(column), -1, -1)
    if sinks.form is SinkForm.SOFTMAX:
        of_heads = torch.cat([of_heads, column], dim=2)
    else:
        of_heads = torch.cat([of_heads[:, :, :1] + column, of_heads[:, :, 1:]], dim=2)
    return of_heads.reshape(1, len(column) // share, share * group.rows, -1)
