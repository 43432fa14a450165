"""How much of a batch a device gains from: measured at warm-up.

Small batches leave a device idle; beyond some size a larger one takes longer in proportion, and only makes everybody in
it wait. That size is looked for by doubling a batch of copies of one item, as long as it pays.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from encoder_svc.models.adapter import Tower, WarmUp

_GAIN = 1.1
"""A batch of twice the size is worth it if it encodes so many times as much in a second."""
_REPEATS = 3
MOST = 1 << 17
"""Patches or mel frames. No tower is known that gains from more."""


@torch.inference_mode()
def measure_tower(tower: Tower, warm_up: WarmUp, device: torch.device) -> int:
    """:func:`measure_budget` of a tower, by copies of a small item.

    Args:
        tower: loaded.
        warm_up: the item.
        device: the tower's.
    """

    def seconds(items: int) -> float:
        _finish(device)
        begin = time.perf_counter()
        tower.encode([warm_up.item] * items)
        _finish(device)
        return time.perf_counter() - begin

    cost = measure_budget(seconds, warm_up.cost)
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return cost


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_budget(seconds: Callable[[int], float], cost: int) -> int:
    """Looks for the cost of a batch beyond which the device is no faster.

    Args:
        seconds: runs a forward of so many items and returns how long it took.
        cost: of one item, in patches or mel frames; at least 1.

    Returns:
        A cost, of one item at least, of :data:`MOST` about at most. Where memory ends first, half of what fitted, so
        that larger items find room too.
    """
    items, best = 1, math.inf
    seconds(items)  # the first of each size compiles and allocates
    while True:
        per_item = min(seconds(items) for _ in range(_REPEATS)) / items
        if per_item * _GAIN > best:
            return items // 2 * cost
        best = per_item
        if items * cost >= MOST:
            return items * cost
        try:
            seconds(2 * items)
        except torch.OutOfMemoryError:
            return max(1, items // 2) * cost
        items *= 2
