from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from encoder_svc.runtime.computations import Computation
from encoder_svc.runtime.fair_queue import FairQueue
from tests.runtime.recording_hands import ComputationMaker


def drained(queue: FairQueue[Computation]) -> list[Computation]:
    """Everything, in the order in which it leaves."""
    parts = []
    while (part := queue.pop()) is not None:
        parts.append(part)
    return parts


def test_one_image_does_not_wait_behind_64_of_another_prompt() -> None:
    make, queue = ComputationMaker(), FairQueue[Computation]()
    for _ in range(64):
        queue.push(make("many"), 10)
    single = make("one")
    queue.push(single, 10)
    assert drained(queue).index(single) <= 1


def test_a_late_prompt_is_neither_favoured_for_its_absence_nor_punished() -> None:
    make, queue = ComputationMaker(), FairQueue[Computation]()
    for _ in range(64):
        queue.push(make("many"), 10)
    for _ in range(32):
        queue.pop()
    late = [make("late") for _ in range(8)]
    for part in late:
        queue.push(part, 10)
    following = drained(queue)[:16]
    assert 7 <= sum(part in late for part in following) <= 8


@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=20), min_size=2, max_size=4))
def test_prompts_that_wait_get_equal_shares_of_cost(costs: list[list[int]]) -> None:
    """The bound of start-time fair queueing: two prompts with work differ by at most their two largest costs."""
    make, queue = ComputationMaker(), FairQueue[Computation]()
    cost_of: dict[int, int] = {}
    left = {str(index): len(of_prompt) for index, of_prompt in enumerate(costs)}
    for index, of_prompt in enumerate(costs):
        for cost in of_prompt:
            part = make(str(index))
            cost_of[part.key] = cost
            queue.push(part, cost)
    served = dict.fromkeys(left, 0)
    while all(left.values()):
        popped = queue.pop()
        assert popped is not None
        prompt = popped.prompt.id
        served[prompt] += cost_of[popped.key]
        left[prompt] -= 1
        for first in served:
            for second in served:
                bound = max(costs[int(first)]) + max(costs[int(second)])
                assert abs(served[first] - served[second]) <= bound


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 9)), max_size=30))
def test_larger_priorities_leave_first_and_equal_ones_of_a_prompt_in_order(entries: list[tuple[int, int]]) -> None:
    make, queue = ComputationMaker(), FairQueue[Computation]()
    parts = [make("p", priority=priority) for priority, _ in entries]
    for part, (_, cost) in zip(parts, entries, strict=True):
        queue.push(part, cost)
    assert drained(queue) == sorted(parts, key=lambda part: (-part.priority, part.key))


def test_a_prompt_of_many_parts_is_not_starved_by_prompts_that_keep_coming() -> None:
    """Each newcomer has one part, so none of them is ever ahead; still the old prompt gets its share, one in nine."""
    make, queue = ComputationMaker(), FairQueue[Computation]()
    old = [make("old") for _ in range(5)]
    for part in old:
        queue.push(part, 10)
    left: list[Computation] = []
    for index in range(80):
        while len(queue._heap) < 8 + len(old) - sum(part in old for part in left):
            queue.push(make(f"new-{index}-{len(queue._heap)}"), 10)
        popped = queue.pop()
        assert popped is not None
        left.append(popped)
    places = [left.index(part) for part in old if part in left]
    assert len(places) == 5
    assert all(later - earlier <= 18 for earlier, later in pairwise(places))


def test_parts_that_were_taken_out_are_skipped_and_cost_nothing() -> None:
    make, queue = ComputationMaker(), FairQueue[Computation]()
    first, second, third = make(), make(), make()
    for cost, part in enumerate((first, second, third), 1):
        queue.push(part, cost)
    assert queue.discard(first)
    assert (queue.cost, len(queue)) == (5, 2)
    assert queue.peek() is second
    assert queue.discard(third)
    assert not queue.discard(third)
    assert (queue.cost, len(queue)) == (2, 1)
    assert queue.pop() is second
    assert queue.pop() is None
    assert queue.peek() is None


def test_one_that_comes_back_is_there_once() -> None:
    make, queue = ComputationMaker(), FairQueue[Computation]()
    first, second = make(), make()
    for part in (first, second):
        queue.push(part, 1)
    queue.discard(first)
    queue.push(first, 4)
    assert (queue.cost, len(queue)) == (5, 2)
    assert drained(queue) == [second, first]


def test_drain_takes_all_in_order() -> None:
    make, queue = ComputationMaker(), FairQueue[Computation]()
    parts = [make() for _ in range(4)]
    for part in parts:
        queue.push(part, 1)
    queue.discard(parts[1])
    assert queue.waiting() == queue.drain() == [parts[0], parts[2], parts[3]]
    assert queue.pop() is None
    assert queue.cost == 0


def test_cancels_do_not_let_the_heap_grow() -> None:
    make, queue = ComputationMaker(), FairQueue[Computation]()
    kept = make("kept")
    queue.push(kept, 1)
    for _ in range(5000):
        part = make("gone")
        queue.push(part, 1)
        queue.discard(part)
    assert len(queue._heap) <= 300
    assert drained(queue) == [kept]


def test_prompts_that_ended_are_forgotten() -> None:
    queue = FairQueue[Computation]()
    for _ in range(100):
        make = ComputationMaker()
        queue.push(make(), 1)
        queue.pop()
    del make
    assert len(queue._last_end) <= 1
