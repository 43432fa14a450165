"""The arithmetic of the figures."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_svc.bench.memory import LEAST_POINTS, slope_since
from encoder_svc.bench.statistics import distribution, mean_batch, percentile, slope

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300)


@given(VALUES, st.floats(0.01, 1))
def test_a_percentile_is_the_least_value_that_enough_values_do_not_exceed(values: list[float], share: float) -> None:
    found = percentile(values, share)
    enough = share * len(values) - 1e-6
    assert found in values
    assert sum(value <= found for value in values) >= enough
    assert sum(value < found for value in values) < max(enough, 1) + 1e-3


def test_percentiles_of_a_hundred_are_their_ranks() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0, 0.01, 0.07, 0.5, 0.99, 1)] == [1, 1, 7, 50, 99, 100]


def test_there_is_no_percentile_of_nothing() -> None:
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 0.5)
    with pytest.raises(ValueError, match="from 0 to 1"):
        percentile([1.0], 99)


@given(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), st.lists(st.integers(0, 10_000), min_size=2, unique=True))
def test_the_slope_of_a_line_is_its_own(gradient: float, offset: float, xs: list[int]) -> None:
    points = [(float(x), gradient * x + offset) for x in xs]
    assert slope(points) == pytest.approx(gradient, rel=1e-6, abs=1e-5)


def test_the_slope_is_that_of_least_squares() -> None:
    assert slope([(0, 0), (1, 3), (2, 0), (3, 3)]) == pytest.approx(0.6)


def test_one_place_has_no_slope() -> None:
    assert slope([]) is None
    assert slope([(1, 5), (1, 6)]) is None


def test_a_mean_batch_is_a_mean_over_batches_and_not_over_items() -> None:
    # One batch of three items with 30 patches, one of a single item with 10.
    items, patches = mean_batch([(3, 30), (3, 30), (3, 30), (1, 10)])
    assert items == pytest.approx(2)
    assert patches == pytest.approx(20)


@given(VALUES)
def test_a_distribution_rises_from_the_least_to_the_greatest(values: list[float]) -> None:
    x, y = distribution(values)
    assert x == sorted(x)
    assert (x[0], x[-1]) == (min(values), max(values))
    assert (y[0], y[-1]) == (0, 1)


def life(start: int, stop: int, gradient: float) -> list[tuple[float, float]]:
    return [(float(x), gradient * x) for x in range(start, stop, 10)]


def test_growth_before_the_second_half_does_not_count() -> None:
    points = [*life(0, 500, 1000), *((x, 500_000 + 7 * x) for x, _ in life(500, 1000, 0))]
    assert slope_since([points], 500) == pytest.approx(7)


def test_a_process_that_was_replaced_has_no_slope_but_an_earlier_death_does_not_matter() -> None:
    assert slope_since([life(0, 700, 5), life(710, 1000, 9)], 500) is None
    assert slope_since([life(0, 300, 5), life(310, 1000, 9)], 500) == pytest.approx(9)
    assert slope_since([life(0, 490, 5), life(500, 1000, 9)], 500) is None, "its start counts as growth"


def test_few_measurements_give_no_slope() -> None:
    assert slope_since([life(0, 500 + 10 * LEAST_POINTS, 5)], 500) == pytest.approx(5)
    assert slope_since([life(0, 500 + 10 * LEAST_POINTS - 10, 5)], 500) is None
