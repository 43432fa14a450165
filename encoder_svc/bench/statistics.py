"""The arithmetic of the figures. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile: the least of the values that at least this share of them do not exceed.

    It is a value that was measured, never one between two of them.

    Args:
        values: in any order; at least one.
        share: from 0 (the least value) to 1 (the greatest).

    Raises:
        ValueError: there are no values, or the share is out of range.
    """
    if not values:
        raise ValueError("there is no percentile of nothing")
    if not 0 <= share <= 1:
        raise ValueError(f"a share is from 0 to 1, not {share}")
    ordered = sorted(values)
    # Rounded first: 0.07 * 100 is a little more than 7 in floating point, and would be rank 8.
    rank = math.ceil(round(share * len(ordered), 9))
    return ordered[max(rank, 1) - 1]


def slope(points: Sequence[tuple[float, float]]) -> float | None:
    """The slope of the straight line through (x, y) with the least squares of residuals.

    Returns:
        None where no line is defined: fewer than two different x.
    """
    if not points:
        return None
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    if spread == 0:
        return None
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


def mean_batch(batches: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Mean items and mean patches of the batches, from what each *item* tells of its own batch.

    A batch of n items is told n times, so each telling counts 1/n: the mean is over batches, not over items, in which
    large batches would weigh more.

    Args:
        batches: for each item (items of its batch, patches of its batch); at least one.

    Returns:
        Items and patches of a batch.
    """
    count = sum(1 / items for items, _ in batches)
    return len(batches) / count, sum(patches / items for items, patches in batches) / count


def distribution(values: Sequence[float], points: int = 101) -> tuple[list[float], list[float]]:
    """A cumulative distribution, thinned for drawing.

    Returns:
        Values in ascending order, and for each the share of values that do not exceed it; at most ``points`` of them.
    """
    shares = [step / (points - 1) for step in range(points)]
    return [percentile(values, share) for share in shares], shares
