"""The search for a budget, on devices whose speed is a formula."""

from __future__ import annotations

import pytest
import torch

from encoder_svc.engine.batch_budget import MOST, measure_budget


class Device:
    """Takes a time for every launch, and one for each item that does not run beside others."""

    def __init__(self, width: int, memory: int = 1 << 30) -> None:
        self.width = width
        self.memory = memory
        self.asked: list[int] = []

    def seconds(self, items: int) -> float:
        self.asked.append(items)
        if items > self.memory:
            raise torch.OutOfMemoryError
        return 0.001 * -(-items // self.width)


@pytest.mark.parametrize(("width", "cost", "budget"), [(1, 256, 256), (8, 256, 2048), (64, 16, 1024), (6, 100, 400)])
def test_a_batch_grows_as_long_as_it_pays(width: int, cost: int, budget: int) -> None:
    assert measure_budget(Device(width).seconds, cost) == budget


def test_the_search_has_an_end() -> None:
    device = Device(1 << 40)
    assert MOST <= measure_budget(device.seconds, 1000) < 2 * MOST
    assert len(device.asked) < 50


@pytest.mark.parametrize(("memory", "budget"), [(1, 100), (2, 100), (20, 800)])
def test_where_memory_ends_half_of_what_fits_is_taken(memory: int, budget: int) -> None:
    assert measure_budget(Device(1 << 40, memory).seconds, 100) == budget
