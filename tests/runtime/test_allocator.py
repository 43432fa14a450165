from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_svc.runtime.allocator import ALIGNMENT, Allocator

STEPS = st.lists(st.one_of(st.integers(1, 700), st.integers(-8, -1)), max_size=60)


def gaps(size: int, taken: dict[int, int]) -> list[tuple[int, int]]:
    """The free runs (offset, length) between the places that are taken, computed from scratch."""
    runs, end = [], 0
    for offset, length in sorted(taken.items()):
        if offset > end:
            runs.append((end, offset - end))
        end = offset + length
    if size > end:
        runs.append((end, size - end))
    return runs


@given(size=st.integers(64, 4096), steps=STEPS)
def test_places_are_aligned_apart_and_the_best_fit(size: int, steps: list[int]) -> None:
    allocator = Allocator(size)
    taken: dict[int, int] = {}
    for step in steps:
        if step < 0:
            if taken:
                offset = list(taken)[step % len(taken)]
                allocator.free(offset)
                del taken[offset]
            continue
        wanted = -(-step // ALIGNMENT) * ALIGNMENT
        fitting = [(length, offset) for offset, length in gaps(allocator.size, taken) if length >= wanted]
        got = allocator.allocate(step)
        assert got == (min(fitting)[1] if fitting else None)
        if got is not None:
            assert got % ALIGNMENT == 0
            taken[got] = wanted
        assert allocator.free_bytes == allocator.size - sum(taken.values())
        left = gaps(allocator.size, taken)
        assert allocator.largest_gap == max((length for _, length in left), default=0)
        for start, length in left:
            assert {allocator.gap_around(offset) for offset in range(start, start + length, ALIGNMENT)} == {length}
    for offset in taken:
        allocator.free(offset)
    assert allocator.free_bytes == allocator.size
    assert allocator.allocate(allocator.size) == 0, "all gaps have merged"


def test_a_place_is_taken_where_it_is_asked_for() -> None:
    allocator = Allocator(256)
    allocator.take(64, 1)
    assert (allocator.gap_around(0), allocator.gap_around(192), allocator.best_gap(65)) == (64, 128, 128)
    with pytest.raises(AssertionError):
        allocator.take(128, 129)
    allocator.free(64)
    assert allocator.largest_gap == 256


def test_neighbours_merge_on_both_sides() -> None:
    allocator = Allocator(192)
    places = [allocator.allocate(64) for _ in range(3)]
    assert places == [0, 64, 128]
    for offset in (0, 128, 64):
        allocator.free(offset)
    assert allocator.allocate(192) == 0


def test_a_size_that_is_no_multiple_is_cut() -> None:
    allocator = Allocator(100)
    assert allocator.size == 64
    assert allocator.allocate(65) is None


def test_a_block_that_is_too_small_has_no_room() -> None:
    assert Allocator(63).allocate(1) is None


def test_a_place_is_freed_once() -> None:
    allocator = Allocator(128)
    assert allocator.allocate(1) == 0
    allocator.free(0)
    with pytest.raises(KeyError):
        allocator.free(0)
    with pytest.raises(KeyError):
        allocator.free(64)
