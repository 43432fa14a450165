"""Prompts that need space on several encoders and in their readers' pools at once: everything comes to an end.

If readers have room for what they ask for, nothing waits in a circle: without any limit of time, everything ends. If
their pools are small, a pool may wait for an arena and the arena for the pool. Readers that give leases back when their
pool stalls end that, again without any limit of time; for others, limits of time do. Where space suffices for all,
nobody may have to give up.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from encoder_svc.errors import Reason
from tests.runtime.reading_world import ENCODERS, ENDLESS, SECONDS, SIZES, PromptOfReader, World, fits
from tests.runtime.recording_hands import Brain, encode_command

PARTS = st.tuples(st.integers(0, ENCODERS - 1), st.integers(0, len(SIZES) - 1))
PROMPTS = st.lists(st.lists(PARTS, min_size=1, max_size=4).filter(fits), min_size=1, max_size=12)


def play(prompts: list[list[tuple[int, int]]], chance: Random) -> World:
    """Two readers ask for prompts, and everybody does something now and then; then all go on as long as it takes."""
    world = World(readers=2)
    for number, parts in enumerate(prompts):
        world.submit(chance.randrange(2), PromptOfReader(f"p{number}", parts))
        for _ in range(chance.randrange(6)):
            chance.choice([world.children_step, world.reader_step])(chance.randrange(2))
    world.everything_that_can(chance)
    for _ in range(4 * 12):
        world.advance(SECONDS / 4)
        world.everything_that_can(chance)
    return world


@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow], deadline=None, max_examples=150)
@given(
    prompts=PROMPTS,
    engines=st.integers(1, 2),
    chance=st.randoms(use_true_random=False),
)
def test_f38_nothing_waits_in_a_circle(prompts: list[list[tuple[int, int]]], engines: int, chance: Random) -> None:
    """No limit of time runs out here, and still all that was not cancelled is made and read."""
    world = World(2, ENDLESS, pool=1 << 30, engines=engines)
    for number, parts in enumerate(prompts):
        world.submit(chance.randrange(2), PromptOfReader(f"p{number}", parts))
        for _ in range(chance.randrange(6)):
            chance.choice([world.children_step, world.reader_step])(chance.randrange(2))
        if chance.random() < 0.2:
            world.cancel(chance.choice(world.all_prompts()))
    world.everything_that_can(chance)
    for prompt in world.all_prompts():
        assert len(prompt.read) + len(prompt.cancelled) == len(prompt.parts), "something waits in a circle"
    for encoder in world.encoders:
        encoder.assert_empty()


def play_crowded(seed: int, *, engines: int, cached: bool, gives_back: bool, eager: bool = False) -> World:
    """Many prompts, each of which hardly fits into its pool; calls and answers arrive in any order."""
    chance = Random(seed)
    world = World(2, ENDLESS, engines=engines, gives_back=gives_back, eager=eager)
    asks: list[Callable[[], None]] = []
    while len(world.all_prompts()) < 12:
        parts = [(chance.randrange(ENCODERS), chance.randrange(1, len(SIZES))) for _ in range(chance.randint(1, 4))]
        if not fits(parts):
            continue
        number = len(world.all_prompts())
        prompt = PromptOfReader(f"p{number}", parts, 4 * number if cached else None)
        world.prompts[chance.randrange(2)].append(prompt)
        asks += [partial(world.ask_one, prompt, index) for index in range(ENCODERS)]
    chance.shuffle(asks)
    for ask in asks:
        ask()
        for _ in range(chance.randrange(6)):
            chance.choice([world.children_step, world.reader_step])(chance.randrange(2))
    world.everything_that_can(chance)
    return world


@settings(deadline=None, max_examples=150)
@given(seed=st.integers(0, 2**32), engines=st.integers(1, 2), cached=st.booleans(), eager=st.booleans())
def test_f38_small_pools_wait_in_no_circle(seed: int, engines: int, cached: bool, eager: bool) -> None:
    """Readers give leases back: no limit of time runs out, and all is read."""
    world = play_crowded(seed, engines=engines, cached=cached, gives_back=True, eager=eager)
    for prompt in world.all_prompts():
        assert len(prompt.read) == len(prompt.parts), "something waits in a circle"
    assert all(pool.statistics().used == 0 for pool in world.pools)


def test_f38_small_pools_do_if_readers_keep_their_leases() -> None:
    """The worlds of the test above are such that it proves something."""
    worlds = [play_crowded(seed, engines=1, cached=True, gives_back=False) for seed in range(100)]
    stuck = sum(not all(prompt.done for prompt in world.all_prompts()) for world in worlds)
    assert stuck >= 5


@pytest.mark.parametrize("gives_back", [True, False])
def test_f38_a_pool_and_an_arena_that_wait_for_each_other(gives_back: bool) -> None:
    """One prompt has the pool and waits for slots; the slots are leased to others, which wait for the pool."""
    chance = Random(0)
    world = World(1, ENDLESS, gives_back=gives_back)
    others = [PromptOfReader(f"p{number}", [(0, 2), (0, 2)], 2 * number) for number in range(2)]
    first = PromptOfReader("first", [(0, 2), (0, 2)], 100)
    for prompts in (others, [first]):
        for prompt in prompts:
            world.submit(0, prompt)
        while world.children_step(0):
            pass
    assert [len(prompt.ready) for prompt in (*others, first)] == [2, 2, 0]
    world.prompts[0] = [first, *others]  # the reader hears of its sizes before those of the others
    world.everything_that_can(chance)
    assert first.done == gives_back
    assert [len(prompt.read) for prompt in world.all_prompts()] == ([2, 2, 2] if gives_back else [0, 0, 0])


def test_the_last_part_of_the_oldest_prompt_is_measured_whatever_younger_ones_hold() -> None:
    brain = Brain(arena_bytes=2048, prompt_bytes=1024, input_bytes=128, space_seconds=ENDLESS)
    oldest = brain.submit(encode_command("old", prompt_id="old", parts=range(4)))
    for name in "bcde":
        brain.submit(encode_command(name, prompt_id=name))
    for _ in range(3):
        brain.measure(nbytes=192, input_bytes=128)
        brain.finish()
        brain.finish_batch()
    assert brain.engines[0].slots.reserve(300) is not None, "somebody else's embedding"
    # One of the young ones takes the input arena and waits for a slot; the next two are at the worker.
    last = brain.scheduler.requests.live()[0].parts[3].computation
    assert last is not None
    while tasks := brain.hands.tasks[0]:
        if not tasks[0].measured:
            brain.measure(nbytes=192 if tasks[0].part == last.key else 950, input_bytes=128)
        brain.finish()
    assert oldest.laid_out == {0, 1, 2, 3}


@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow], deadline=None, max_examples=60)
@given(prompts=PROMPTS, chance=st.randoms(use_true_random=False))
def test_everything_ends_with_several_encoders_and_pools(prompts: list[list[tuple[int, int]]], chance: Random) -> None:
    world = play(prompts, chance)
    for prompt in world.all_prompts():
        assert all(caller.completed is not None for caller in prompt.callers), "somebody waits for ever"
        assert prompt.done, "somebody waits for ever"
        assert {error.reason for error in prompt.failed.values()} <= {Reason.SPACE_TIMEOUT}
    for encoder in world.encoders:
        encoder.assert_empty()
    assert all(pool.statistics().used == 0 for pool in world.pools)


@settings(suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow], deadline=None, max_examples=60)
@given(prompts=PROMPTS, chance=st.randoms(use_true_random=False))
def test_f38_nobody_gives_up_while_two_prompts_at_most_are_under_way(
    prompts: list[list[tuple[int, int]]], chance: Random
) -> None:
    """Two shares fill an arena, and each reader has room for one prompt: so each goes through, in any order."""
    for first, second in zip(prompts[::2], [*prompts[1::2], []], strict=False):
        pair = [parts for parts in (first, second) if parts]
        world = World(readers=2)
        for number, parts in enumerate(pair):
            world.submit(number, PromptOfReader(f"p{number}", parts))
        world.everything_that_can(chance)
        for prompt in world.all_prompts():
            assert prompt.done
            assert len(prompt.read) == len(prompt.parts)
