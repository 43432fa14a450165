from __future__ import annotations

import math

import pytest

from encoder_svc.runtime.busy_share import MEMORY_SECONDS, BusyShare


def test_what_was_never_busy_is_idle() -> None:
    assert BusyShare().at(1e9) == 0


def test_the_share_follows_what_it_does_now_and_forgets_the_past() -> None:
    share = BusyShare()
    share.tell(True, 100.0)
    assert share.at(100.0) == 0
    assert share.at(100.0 + MEMORY_SECONDS) == pytest.approx(1 - 1 / math.e)
    assert share.at(100.0 + 20 * MEMORY_SECONDS) == pytest.approx(1)
    share.tell(False, 100.0 + 20 * MEMORY_SECONDS)
    assert share.at(100.0 + 21 * MEMORY_SECONDS) == pytest.approx(1 / math.e)


@pytest.mark.parametrize("period", [0.01, 0.1])
def test_half_of_the_time_is_a_half(period: float) -> None:
    share, now = BusyShare(), 0.0
    while now < 20 * MEMORY_SECONDS:
        share.tell(True, now)
        share.tell(False, now + period / 2)
        now += period
    assert share.at(now) == pytest.approx(0.5, abs=period)


def test_saying_the_same_again_changes_nothing() -> None:
    once, often = BusyShare(), BusyShare()
    once.tell(True, 0.0)
    for now in range(9):
        often.tell(True, float(now))
    assert often.at(9.0) == pytest.approx(once.at(9.0))
