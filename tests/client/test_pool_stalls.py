"""When a pool has stalled, and who is told: pure, with the time passed in."""

from __future__ import annotations

from encoder_client.pool.pool_ledger import Ticket
from encoder_client.pool.pool_stalls import StallWatch

_AGES = iter(range(1, 1000))


def ticket(*offsets: int) -> Ticket:
    return Ticket("p", (64,) * len(offsets), 0.0, (next(_AGES), 0), offsets=offsets)


def watch_with(*offsets: int) -> tuple[StallWatch, Ticket]:
    """At 0.0 slots are granted, and a wish waits. The patience is 1.0."""
    watch, waiting = StallWatch(1.0), ticket()
    watch.granted(ticket(*offsets), 0.0)
    watch.waits(waiting, 0.0)
    return watch, waiting


def test_who_waits_is_told_once_when_nothing_was_filled_for_a_while() -> None:
    watch, waiting = watch_with(0)
    assert watch.next_time() == 1.0
    assert watch.told(0.99) == []
    assert watch.told(1.0) == [waiting]
    assert watch.told(2.0) == []
    assert watch.next_time() is None


def test_a_slot_that_is_filled_puts_it_off() -> None:
    watch, waiting = watch_with(0, 64)
    watch.filled(0, 0.9)
    watch.filled(0, 1.5)  # known already
    assert watch.next_time() == 1.9
    assert watch.told(1.8) == []
    assert watch.told(1.9) == [waiting]


def test_a_pool_in_which_all_is_filled_waits_for_its_users_only() -> None:
    watch, waiting = watch_with(0)
    watch.filled(0, 0.5)
    assert watch.next_time() is None
    assert watch.told(100.0) == []
    watch.granted(ticket(128), 100.0)
    assert watch.told(101.0) == [waiting]


def test_who_comes_late_has_its_own_patience() -> None:
    watch, first = watch_with(0)
    second = ticket()
    watch.waits(second, 0.7)
    assert watch.told(1.0) == [first]
    assert watch.next_time() == 1.7
    assert watch.told(1.7) == [second]


def test_who_has_left_the_queue_is_not_told() -> None:
    watch, waiting = watch_with(0)
    watch.leaves(waiting)
    watch.leaves(waiting)
    assert watch.told(5.0) == []
