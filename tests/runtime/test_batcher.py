from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from encoder_svc.runtime.batcher import LEAD_SECONDS, Batcher
from encoder_svc.runtime.forwards import Forward
from epd.internal.v1.media_worker_pb2 import Tower
from tests.runtime.recording_hands import ForwardMaker, budgets

VISION, AUDIO = Tower.TOWER_VISION, Tower.TOWER_AUDIO


def batches(batcher: Batcher) -> list[list[Forward]]:
    """All batches, in order."""
    found = []
    while batch := batcher.next_batch(0.0, None):
        found.append(batch)
    return found


KINDS = st.tuples(
    st.integers(1, 150),
    st.sampled_from([VISION, VISION, AUDIO]),
    st.sampled_from([0, 0, 0, 1]),
    st.integers(0, 3),
)


@given(st.lists(KINDS, max_size=40))
def test_every_part_runs_once_in_a_batch_that_obeys_the_rules(kinds: list[tuple[int, Tower, int, int]]) -> None:
    make, batcher = ForwardMaker(), Batcher(budgets(100, frames=80))
    parts = [
        make(str(prompt), patches=patches, tower=tower, attempts=attempts) for patches, tower, attempts, prompt in kinds
    ]
    for part in parts:
        batcher.push(part)
    found = batches(batcher)
    assert sorted(part.key for batch in found for part in batch) == [part.key for part in parts]
    for batch in found:
        (tower,) = {part.tower for part in batch}
        assert len(batch) == 1 or sum(part.patches for part in batch) <= budgets(100, frames=80)[tower]
        assert len(batch) == 1 or all(part.computation.attempts == 0 for part in batch)


def test_small_parts_share_a_batch_up_to_the_budget() -> None:
    make, batcher = ForwardMaker(), Batcher(budgets(100))
    for _ in range(25):
        batcher.push(make(patches=10))
    assert [len(batch) for batch in batches(batcher)] == [10, 10, 5]


def test_a_budget_that_the_engine_measured_holds_from_then_on() -> None:
    make, batcher = ForwardMaker(), Batcher(budgets(100, frames=80))
    for tower in (VISION, AUDIO):
        for _ in range(8):
            batcher.push(make(patches=20, tower=tower))
    assert len(batcher.next_batch(0.0, None)) == 5
    batcher.set_budget(VISION, 40)
    assert batcher.budget(VISION) == 40
    assert sorted(len(batch) for batch in batches(batcher)) == [1, 2, 4, 4]


def test_a_batch_may_fill_the_budget_exactly() -> None:
    make, batcher = ForwardMaker(), Batcher(budgets(100))
    for patches in (60, 40, 1):
        batcher.push(make(patches=patches))
    assert [len(batch) for batch in batches(batcher)] == [2, 1]


def test_an_oversize_part_runs_alone() -> None:
    make, batcher = ForwardMaker(), Batcher(budgets(100))
    for patches in (10, 500, 10):
        batcher.push(make(patches=patches))
    assert [[part.patches for part in batch] for batch in batches(batcher)] == [[10], [500], [10]]


def test_one_batch_is_for_one_tower_and_each_has_its_budget() -> None:
    make, batcher = ForwardMaker(), Batcher(budgets(2, frames=100))
    for tower in (VISION, AUDIO, VISION, AUDIO, VISION, AUDIO):
        batcher.push(make(tower=tower, patches=1 if tower == VISION else 50))
    found = [(batch[0].tower, len(batch)) for batch in batches(batcher)]
    assert sorted(found) == [(VISION, 1), (VISION, 2), (AUDIO, 1), (AUDIO, 2)]


def test_what_waits_for_one_tower_makes_no_batch_of_the_other_full() -> None:
    make, batcher = ForwardMaker(), Batcher(budgets(10))
    batcher.push(make(patches=6))
    batcher.push(make(patches=6, tower=AUDIO))
    assert batcher.due(5.0, 60.0) == 60.0 - LEAD_SECONDS


def test_a_full_tower_starves_no_other() -> None:
    make, batcher = ForwardMaker(), Batcher(budgets(10))
    sound = make(tower=AUDIO)
    batcher.push(sound)
    for now in range(3):
        batcher.push(make(patches=10))
        if batcher.next_batch(float(now), now - 1.0) == [sound]:
            return
    raise AssertionError("sound waits behind pictures that came later")


def test_the_larger_priority_goes_first_whatever_tower_it_is_for() -> None:
    make, batcher = ForwardMaker(), Batcher(budgets(10))
    batcher.push(make())
    urgent = make(tower=AUDIO, priority=1)
    batcher.push(urgent)
    assert batcher.next_batch(0.0, None) == [urgent]


def test_a_suspect_runs_alone() -> None:
    make, batcher = ForwardMaker(), Batcher(budgets(100))
    for attempts in (0, 1, 1, 0, 0):
        batcher.push(make(attempts=attempts))
    assert [len(batch) for batch in batches(batcher)] == [1, 1, 1, 2]


def test_parts_that_were_taken_out_take_no_place() -> None:
    make, batcher = ForwardMaker(), Batcher(budgets(2))
    parts = [make() for _ in range(4)]
    for part in parts:
        batcher.push(part)
    batcher.discard(parts[0])
    batcher.discard(parts[2])
    assert batches(batcher) == [[parts[1], parts[3]]]


def test_an_empty_batcher_has_no_batch() -> None:
    make, batcher = ForwardMaker(), Batcher(budgets(2))
    assert batcher.next_batch(0.0, None) == []
    part = make()
    batcher.push(part)
    assert batcher.drain() == [part]
    assert batcher.next_batch(0.0, None) == []


# When a batch is taken.


def test_nothing_is_due_while_nothing_waits() -> None:
    batcher = Batcher(budgets(10))
    assert batcher.due(5.0, None) is None
    assert batcher.due(5.0, 9.0) is None


def test_an_idle_engine_gets_what_there_is_at_once() -> None:
    make, batcher = ForwardMaker(), Batcher(budgets(10))
    batcher.push(make())
    assert batcher.due(5.0, None) == 5.0


def test_a_window_lets_the_first_item_wait_for_company_and_no_longer() -> None:
    make, batcher = ForwardMaker(), Batcher(budgets(10), window=0.5)
    batcher.push(make())
    assert batcher.due(5.0, None) == 5.5
    batcher.push(make())
    assert batcher.due(5.4, None) == 5.5, "it counts from the first"
    assert len(batcher.next_batch(5.5, None)) == 2
    batcher.push(make())
    assert batcher.due(7.0, None) == 7.5


def test_a_full_batch_does_not_wait() -> None:
    make, batcher = ForwardMaker(), Batcher(budgets(10), window=0.5)
    batcher.push(make(patches=9))
    assert batcher.due(5.0, 60.0) == 60.0 - LEAD_SECONDS
    batcher.push(make(patches=1))
    assert batcher.due(5.0, 60.0) == batcher.due(5.0, None) == 5.0


def test_a_suspect_does_not_wait_since_nobody_will_join_it() -> None:
    make, batcher = ForwardMaker(), Batcher(budgets(10), window=0.5)
    batcher.push(make(attempts=1))
    assert batcher.due(5.0, 60.0) == 5.0


def test_while_a_batch_runs_the_next_is_taken_just_before_its_end() -> None:
    make, batcher = ForwardMaker(), Batcher(budgets(10))
    batcher.push(make())
    assert batcher.due(5.0, 6.0) == 6.0 - LEAD_SECONDS
    assert (batcher.due(7.0, 6.0) or 0) <= 7.0, "it takes longer than was expected: at once"


def test_what_was_taken_out_makes_no_batch_full() -> None:
    make, batcher = ForwardMaker(), Batcher(budgets(10))
    first = make(patches=5)
    for item in (first, make(patches=4)):
        batcher.push(item)
    batcher.discard(first)
    batcher.push(make(patches=1))
    assert batcher.due(5.0, 60.0) == 60.0 - LEAD_SECONDS
