from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from encoder_svc.runtime.timers import Timers


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=40), st.lists(st.integers(0, 25), max_size=6))
def test_what_is_due_happens_once_in_order_unless_cancelled(planned: list[tuple[int, bool]], ticks: list[int]) -> None:
    timers = Timers()
    seen: list[int] = []
    for index, (when, cancelled) in enumerate(planned):
        timer = timers.at(when, lambda _, index=index: seen.append(index))  # type: ignore[misc] # bound at once
        if cancelled:
            timer.cancel()
            timer.cancel()
    for now in sorted(ticks):
        timers.run_due(now)
        kept = [(when, index) for index, (when, cancelled) in enumerate(planned) if not cancelled]
        assert seen == [index for when, index in sorted(kept) if when <= now]
        left = [when for when, _ in kept if when > now]
        assert timers.next_due() == (min(left) if left else None)


def test_a_timer_is_due_at_its_very_time() -> None:
    timers, seen = Timers(), list[float]()
    timers.at(2.0, seen.append)
    assert timers.run_due(1.999) == 0
    assert timers.run_due(2.0) == 1
    assert timers.run_due(2.0) == 0
    assert seen == [2.0]


def test_what_is_set_while_others_happen_is_due_too() -> None:
    timers, seen = Timers(), list[float]()
    timers.at(1.0, lambda now: seen.append(timers.at(now, seen.append).at))
    assert timers.run_due(3.0) == 2
    assert seen == [3.0, 3.0]


def test_a_timer_may_cancel_one_that_is_due_at_the_same_time() -> None:
    timers, seen = Timers(), list[float]()
    timers.at(1.0, lambda _: second.cancel())
    second = timers.at(1.0, seen.append)
    assert timers.run_due(1.0) == 1
    assert seen == []


def test_cancelled_timers_are_swept() -> None:
    timers = Timers()
    kept = [timers.at(1000.0 + index, lambda _: None) for index in range(10)]
    for index in range(20_000):
        timers.at(60.0 + index, lambda _: None).cancel()
    assert len(timers._heap) <= 1024
    assert timers.next_due() == 1000.0
    assert timers.run_due(2000.0) == len(kept)


def test_live_timers_do_not_make_every_sweep_in_vain() -> None:
    timers = Timers()
    for index in range(5000):
        timers.at(index, lambda _: None)
    assert timers._sweep_at > 5000
    assert timers.run_due(5000.0) == 5000
