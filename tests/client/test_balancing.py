"""Who gets which item."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from encoder_client.fleet.balancing import BOUND, Candidate, KnownContents, Wish, assign, preferred

keys = st.binary(min_size=32, max_size=32)
costs = st.floats(min_value=1, max_value=10_000)


def candidates_of(backlogs: list[float]) -> list[Candidate]:
    return [Candidate(f"t{n}", f"i{n}", backlog) for n, backlog in enumerate(backlogs)]


backlogs = st.lists(st.floats(min_value=0, max_value=100_000), min_size=1, max_size=6)


@given(st.lists(st.tuples(costs, keys | st.just(b"")), max_size=12), backlogs, st.integers(0, 2**16))
def test_every_item_gets_a_place_and_the_same_draw_gives_the_same(
    items: list[tuple[float, bytes]], loads: list[float], seed: int
) -> None:
    wishes = [Wish(n, cost, key) for n, (cost, key) in enumerate(items)]
    places = assign(wishes, candidates_of(loads), Random(seed))
    assert set(places) == {wish.part_idx for wish in wishes}
    assert set(places.values()) <= {f"t{n}" for n in range(len(loads))}
    assert places == assign(list(reversed(wishes)), candidates_of(loads), Random(seed))


@given(keys, backlogs)
def test_a_holder_is_taken_whatever_it_has_to_do(key: bytes, loads: list[float]) -> None:
    candidates = candidates_of(loads)
    busiest = max(candidates, key=lambda candidate: candidate.backlog)
    wish = Wish(0, 100, key, holder=busiest.instance_id)
    assert assign([wish], candidates, Random(0)) == {0: busiest.target}


@given(st.lists(keys, min_size=1, max_size=50, unique=True), st.integers(2, 6))
def test_contents_move_only_from_the_encoder_that_leaves(contents: list[bytes], count: int) -> None:
    candidates = candidates_of([0.0] * count)
    fewer = candidates[:-1]
    for key in contents:
        before = preferred(key, candidates)
        if before in fewer:
            assert preferred(key, fewer) == before
        assert preferred(key, list(reversed(candidates))) == before


def test_all_clients_prefer_the_same_and_contents_spread() -> None:
    random = Random(0)
    candidates = candidates_of([0.0] * 4)
    places = Counter(preferred(random.randbytes(32), candidates).target for _ in range(4000))
    assert all(800 < count < 1200 for count in places.values())


@given(st.lists(st.tuples(costs, keys), min_size=1, max_size=40))
def test_a_preference_overloads_nobody(items: list[tuple[float, bytes]]) -> None:
    wishes = [Wish(n, cost, key) for n, (cost, key) in enumerate(items)]
    places = assign(wishes, candidates_of([0.0, 0.0]), Random(0))
    work = dict.fromkeys(("t0", "t1"), 0.0)
    for wish in wishes:
        work[places[wish.part_idx]] += wish.cost
    mean, largest = sum(work.values()) / 2, max(cost for cost, _ in items)
    assert max(work.values()) <= BOUND * (mean + largest) * (1 + 1e-9)


def test_equal_items_of_a_prompt_are_shared_out() -> None:
    places = assign([Wish(n, 100) for n in range(8)], candidates_of([0.0, 0.0]), Random(0))
    assert Counter(places.values()) == {"t0": 4, "t1": 4}


def test_engines_share_a_backlog() -> None:
    candidates = [Candidate("small", "a", 0.0, engines=1), Candidate("large", "b", 0.0, engines=3)]
    places = assign([Wish(n, 100) for n in range(8)], candidates, Random(0))
    assert Counter(places.values()) == {"large": 6, "small": 2}


def test_of_two_that_are_drawn_the_one_with_less_to_do() -> None:
    candidates = candidates_of([1000.0, 0.0, 500.0])
    drawn = Counter(assign([Wish(0, 1)], candidates, Random(seed))[0] for seed in range(300))
    assert set(drawn) == {"t1", "t2"}
    assert drawn["t1"] > drawn["t2"]


def test_an_encoder_that_failed_on_an_item_is_the_last_to_get_it_again() -> None:
    candidates = candidates_of([0.0, 1000.0])
    assert assign([Wish(0, 1, avoided={"i0"})], candidates, Random(0)) == {0: "t1"}
    assert assign([Wish(0, 1, avoided={"i0", "i1"})], candidates, Random(0)) == {0: "t0"}


def test_known_contents_are_bounded() -> None:
    known = KnownContents(2)
    for name in (b"a", b"b", b"a", b"c"):
        known.note(name, f"i-{name.decode()}")
    assert [known.holder(name) for name in (b"a", b"b", b"c")] == ["i-a", "", "i-c"]
    known.forget(b"a")
    known.forget(b"nobody's")
    assert known.holder(b"a") == ""
