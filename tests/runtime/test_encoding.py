"""From PREPARED to a slot, seen through a scheduler: engines that live and die, space in their arenas, batches."""

from __future__ import annotations

import pytest

from encoder_svc.errors import Reason
from encoder_svc.runtime.computations import Computation
from encoder_svc.runtime.parts import PartState
from encoder_svc.runtime.slots import SlotState
from epd.encoder.v1.embedding_pb2 import Checksum
from epd.encoder.v1.encoder_service_pb2 import ReadOutcome
from epd.internal.v1.engine_pb2 import BatchDone, ItemResult
from epd.internal.v1.media_worker_pb2 import Tower
from tests.runtime.recording_hands import Brain, Caller, encode_command, item_result

VISION = Tower.TOWER_VISION


def computations(brain: Brain) -> list[Computation]:
    """Of the last request's parts."""
    return [part.computation for part in brain.request.parts if part.computation is not None]


def release(brain: Brain, caller: Caller, part: int = 0) -> None:
    """The receivers have read a part."""
    leases = [(grant.lease_id, ReadOutcome.READ_OUTCOME_OK) for grant in caller.chunk(part).leases]
    brain.scheduler.release(leases, brain.now)


def test_f04_parts_of_several_requests_share_a_batch() -> None:
    brain = Brain(budget=16, batches_ahead=1)
    brain.submit(encode_command("r0", prompt_id="p0"))
    brain.prepare_all(patches=16)
    callers = [brain.submit(encode_command(f"r{index}", prompt_id=f"p{index}")) for index in range(1, 5)]
    brain.prepare_all(patches=4)
    assert [len(batch) for batch in brain.hands.batch_parts()] == [1]
    brain.finish_batch()
    assert [len(batch) for batch in brain.hands.batch_parts()] == [4]
    brain.finish_batch()
    for caller in callers:
        assert (caller.chunk().timings.batch_items, caller.chunk().timings.batch_patches) == (4, 16)


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_an_engine_holds_as_many_batches_as_it_may(ahead: int) -> None:
    brain = Brain(budget=4, batches_ahead=ahead)
    brain.submit(encode_command(parts=range(6)))
    brain.prepare_all(patches=4)
    assert len(brain.hands.batches[0]) == ahead
    brain.finish_batch()
    assert len(brain.hands.batches[0]) == ahead


def test_the_engine_is_told_where_everything_is() -> None:
    brain = Brain()
    brain.submit(encode_command())
    brain.prepare_all(nbytes=128, input_bytes=70, patches=9)
    (item,) = brain.hands.batches[0][0].items
    (made,) = computations(brain)
    assert made.slot is not None
    assert (item.part, item.payload_offset, item.nbytes) == (made.key, made.slot.payload_offset, 128)
    assert (item.input_offset, item.input.nbytes, item.input.patches) == (made.input_offset, 70, 9)
    assert list(item.grid_dim) == [1, 2, 2]
    assert item.tensors[0].name == "embedding"


def test_slots_go_to_the_oldest_prompt_even_if_a_younger_ones_embedding_would_fit() -> None:
    brain = Brain(arena_bytes=1024, prompt_bytes=1024)
    holder = brain.ready_part(encode_command("r0", prompt_id="p0"), nbytes=512)
    old = brain.submit(encode_command("r1", prompt_id="old"))
    brain.prepare_all(nbytes=512)
    young = brain.submit(encode_command("r2", prompt_id="young"))
    brain.prepare_all(nbytes=64)
    assert brain.hands.batches[0] == []
    release(brain, holder)
    brain.run_all()
    assert old.chunk().generation < young.chunk().generation


def test_a_wait_for_a_slot_ends() -> None:
    brain = Brain(arena_bytes=1024, prompt_bytes=1024, space_seconds=20.0, lease_seconds=100.0)
    holder = brain.ready_part(encode_command("r0", prompt_id="p0"), nbytes=900)
    waiting = brain.submit(encode_command("r1", prompt_id="p1"))
    brain.prepare_all(nbytes=900)
    brain.advance(19.9)
    assert waiting.ends == {}
    brain.advance(0.1)
    assert waiting.error().reason is Reason.SPACE_TIMEOUT
    assert waiting.error().retry_after is not None
    release(brain, holder)
    brain.assert_empty()


def test_a_wait_for_an_engine_ends() -> None:
    brain = Brain(space_seconds=20.0)
    brain.lose_engine()
    waiting = brain.submit(encode_command())
    brain.prepare_all()
    brain.advance(20.0)
    assert waiting.error().reason is Reason.NOT_READY
    brain.assert_empty()


def test_parts_go_to_the_engine_with_the_least_to_do() -> None:
    brain = Brain(engines=2, budget=4, batches_ahead=1)
    brain.submit(encode_command(parts=range(4)))
    brain.prepare_all(patches=4)
    assert [engine.patches[VISION] for engine in brain.engines] == [8, 8]
    brain.run_all()


def test_an_engine_without_space_is_passed_over() -> None:
    brain = Brain(engines=2, arena_bytes=1024, prompt_bytes=1024)
    callers = [brain.submit(encode_command(f"r{index}", prompt_id=f"p{index}")) for index in range(2)]
    brain.prepare_all(nbytes=900)
    brain.run_all()
    assert [len(engine.slots.live) for engine in brain.engines] == [1, 1]
    for caller in callers:
        release(brain, caller)
    brain.assert_empty()


def test_parts_whose_forward_had_not_started_wait_again_and_are_not_suspected() -> None:
    brain = Brain(budget=8, batches_ahead=2)
    caller = brain.submit(encode_command(parts=range(6)))
    brain.prepare_all(patches=4)
    brain.start_batch()
    brain.lose_engine()
    made = computations(brain)
    assert [part.state for part in brain.request.parts] == [PartState.PREPARED] * 6
    assert [computation.attempts for computation in made] == [1, 0, 0, 0, 0, 0]
    assert all(computation.slot is None and computation.input_offset is not None for computation in made)
    assert brain.engines[0].slots.live == ()
    brain.revive_engine()
    seen = []
    while brain.hands.batches[0]:
        seen.append([item.part for item in brain.finish_batch().items])
    first, *others = brain.keys
    assert [first] in seen, "it is tried once more, alone"
    assert sorted(part for batch in seen for part in batch) == [first, *others]
    assert max(map(len, seen)) == 2
    assert caller.completed is not None
    assert caller.completed.ready == 6


def test_f29_a_part_whose_engine_dies_twice_under_it_fails_and_no_other() -> None:
    brain = Brain(budget=16, batches_ahead=1)
    caller = brain.submit(encode_command(parts=range(3)))
    brain.prepare_all(patches=1)
    brain.run_all()
    assert caller.completed is not None
    caller = brain.submit(encode_command("again", parts=range(3), skip_layout=True))
    for _ in range(3):
        brain.measure(patches=4)
        brain.finish()
    brain.finish_batch()
    poison = brain.keys[1]
    assert brain.hands.batch_parts() == [brain.keys[1:]]
    deaths = 0
    while brain.hands.batches[0]:
        brain.start_batch()
        if poison in brain.hands.batch_parts()[0]:
            deaths += 1
            brain.lose_engine()
            brain.revive_engine()
        else:
            brain.finish_batch()
    assert deaths == 2
    assert caller.error(1).reason is Reason.ENGINE_LOST
    assert caller.completed is not None
    assert (caller.completed.ready, caller.completed.failed) == (2, 1)
    assert brain.scheduler.preparation.input_bytes_taken == 0


def test_the_death_of_an_engine_revokes_the_leases_on_its_arena() -> None:
    brain = Brain()
    caller = brain.ready_part(encode_command(receivers=("a", "b")))
    brain.lose_engine()
    brain.assert_empty()
    for grant in caller.chunk().leases:
        ((before, _),) = brain.scheduler.release([(grant.lease_id, ReadOutcome.READ_OUTCOME_OK)], brain.now)
        assert before == "revoked"


def test_a_part_that_was_cancelled_while_an_engine_has_it_gives_back_all_with_the_batch() -> None:
    brain = Brain()
    caller = brain.submit(encode_command(parts=(0, 1)))
    brain.prepare_all()
    brain.start_batch()
    brain.scheduler.abandon(brain.request, brain.now)
    caller.gone = True
    assert len(brain.scheduler.requests) == 0
    assert [slot.state for slot in brain.engines[0].slots.live] == [SlotState.RESERVED] * 2
    assert brain.scheduler.preparation.input_bytes_taken == 128
    while brain.hands.batches[0]:
        brain.finish_batch()
    brain.assert_empty()


def test_a_part_that_was_cancelled_while_an_engine_has_it_gives_back_all_when_the_engine_dies() -> None:
    brain = Brain()
    caller = brain.submit(encode_command())
    brain.prepare_all()
    brain.start_batch()
    brain.scheduler.abandon(brain.request, brain.now)
    caller.gone = True
    brain.lose_engine()
    brain.assert_empty()


def test_a_part_that_was_cancelled_before_its_batch_gives_back_all_at_once() -> None:
    brain = Brain(budget=4, batches_ahead=1)
    brain.submit(encode_command("r0", prompt_id="p0", receivers=()))
    brain.prepare_all(patches=4)
    brain.submit(encode_command("r1", prompt_id="p1"))
    brain.prepare_all(patches=4)
    assert computations(brain)[0].slot is not None
    brain.scheduler.abandon(brain.request, brain.now)
    assert len(brain.engines[0].slots.live) == 1
    assert brain.engines[0].patches[VISION] == 4
    brain.finish_batch()
    assert brain.hands.batches[0] == []
    brain.assert_empty()


def test_cancels_do_not_let_the_queue_for_slots_grow() -> None:
    brain = Brain(arena_bytes=1024, prompt_bytes=1024, input_bytes=1 << 20)
    brain.ready_part(encode_command("r0", prompt_id="p0"), nbytes=900)
    brain.submit(encode_command("r1", prompt_id="p1"))
    brain.prepare_all(nbytes=900)
    for _ in range(2000):
        brain.submit(encode_command("gone", prompt_id="p2"))
        brain.prepare_all(nbytes=64)
        brain.scheduler.abandon(brain.request, brain.now)
    assert len(brain.scheduler.encoding._placement._waiting) <= 300


@pytest.mark.parametrize("reason", [Reason.FORWARD_FAILED, Reason.OUTPUT_NOT_FINITE, Reason.OUT_OF_MEMORY])
def test_f05_f37_a_failed_part_of_a_batch_fails_alone(reason: Reason) -> None:
    brain = Brain(batches_ahead=1)
    brain.submit(encode_command("r0", prompt_id="p0", receivers=()))
    brain.prepare_all()
    caller = brain.submit(encode_command("r1", prompt_id="p1", parts=range(3)))
    brain.prepare_all()
    brain.finish_batch()
    bad = brain.keys[1]
    brain.finish_batch(reasons={bad: reason})
    assert caller.error(1).reason is reason
    assert caller.completed is not None
    assert (caller.completed.ready, caller.completed.failed) == (2, 1)
    assert len(brain.engines[0].slots.live) == 2


def test_f16_an_item_without_a_checksum_is_no_success() -> None:
    brain = Brain()
    caller = brain.submit(encode_command())
    brain.prepare_all()
    batch = brain.hands.batches[0].pop()
    result = ItemResult(part=batch.items[0].part)
    brain.scheduler.batch_done(0, BatchDone(batch=batch.id, items=[result]), brain.now)
    assert caller.error().reason is Reason.INTERNAL
    brain.assert_empty()


def test_f12_results_belong_to_the_part_that_they_name() -> None:
    brain = Brain(batches_ahead=1)
    brain.submit(encode_command("r0", prompt_id="p0", receivers=()))
    brain.prepare_all()
    caller = brain.submit(encode_command("r1", prompt_id="p1", parts=range(3)))
    brain.prepare_all()
    brain.finish_batch()
    batch = brain.hands.batches[0].pop()
    first, second, third = brain.keys
    results = [item_result(third), item_result(first)]
    brain.scheduler.batch_done(0, BatchDone(batch=batch.id, items=results), brain.now)
    assert (caller.chunk(0).checksum.value, caller.chunk(2).checksum.value) == (first, third)
    assert caller.error(1).reason is Reason.INTERNAL
    assert brain.scheduler.requests.part(second) is None


def test_a_report_of_a_batch_that_is_not_there_is_ignored() -> None:
    brain = Brain()
    result = ItemResult(part=1, checksum=Checksum(value=1))
    brain.scheduler.batch_started(0, 99)
    brain.scheduler.batch_done(0, BatchDone(batch=99, items=[result]), brain.now)
    brain.assert_empty()


# Several engines.


def test_work_goes_where_the_fewest_patches_are_under_way() -> None:
    brain = Brain(engines=3, budget=100, batches_ahead=1)
    for number, patches in enumerate((60, 20, 30, 25, 40)):
        brain.submit(encode_command(f"r{number}", prompt_id=f"p{number}", receivers=()))
        brain.prepare_all(patches=patches)
    assert [engine.patches[VISION] for engine in brain.engines] == [60, 45, 70]
    assert brain.scheduler.load(brain.now).utilization == 175 / 300
    brain.run_all()
    brain.assert_empty()


def test_f36_fewer_items_than_engines() -> None:
    brain = Brain(engines=3)
    caller = brain.submit(encode_command())
    brain.run_all()
    assert caller.chunk().nbytes == 128
    assert [len(engine.slots.live) for engine in brain.engines] == [1, 0, 0]


def test_f29_what_had_not_started_moves_to_the_other_engine() -> None:
    brain = Brain(engines=2, budget=4, batches_ahead=2, prompt_bytes=4096)
    caller = brain.submit(encode_command(parts=range(8)))
    brain.prepare_all(patches=4)
    assert [engine.patches[VISION] for engine in brain.engines] == [16, 16]
    brain.start_batch(0)
    brain.lose_engine(0)
    assert [engine.patches[VISION] for engine in brain.engines] == [0, 32]
    assert sorted(computation.attempts for computation in computations(brain)) == [0] * 7 + [1]
    assert all(slot is not None for slot in (computation.slot for computation in computations(brain)))
    while brain.hands.batches[1]:
        brain.finish_batch(1)
    assert caller.completed is not None
    assert caller.completed.ready == 8
    assert {chunk.encoder.engine_boot_id for chunk in map(caller.chunk, range(8))} == {"0" * 32}


def test_f29_what_killed_one_engine_and_the_other_fails_and_takes_nobody_along() -> None:
    brain = Brain(engines=2, budget=4, batches_ahead=1)
    caller = brain.submit(encode_command(parts=range(4)))
    brain.prepare_all(patches=4)
    poison = brain.keys[0]
    for _ in range(2):
        while not (holders := [index for index in (0, 1) if [poison] in brain.hands.batch_parts(index)]):
            brain.finish_batch(next(index for index in (0, 1) if brain.hands.batches[index]))
        (engine,) = holders
        brain.start_batch(engine)
        brain.lose_engine(engine)
        brain.revive_engine(engine)
    brain.run_all()
    assert caller.error(0).reason is Reason.ENGINE_LOST
    assert caller.completed is not None
    assert (caller.completed.ready, caller.completed.failed) == (3, 1)
    for part in range(1, 4):
        release(brain, caller, part)
    brain.assert_empty()


def test_a_death_before_the_word_that_it_had_started_counts_for_the_first_batch() -> None:
    brain = Brain(budget=4, batches_ahead=2)
    brain.submit(encode_command(parts=range(3)))
    brain.prepare_all(patches=4)
    brain.lose_engine()
    assert [computation.attempts for computation in computations(brain)] == [1, 0, 0]


@pytest.mark.parametrize("started", [False, True])
def test_an_engine_that_hangs_is_killed_and_its_batch_tried_again(started: bool) -> None:
    brain = Brain(budget=4, batches_ahead=2, forward_seconds=100.0, space_seconds=1000.0)
    caller = brain.submit(encode_command(parts=range(3), lease_ttl=600.0))
    brain.prepare_all(patches=4)
    if started:
        brain.start_batch()
    brain.advance(99.9)
    assert brain.hands.stopped_engines == []
    brain.advance(0.1)
    assert brain.hands.stopped_engines == [0]
    assert caller.ends == {}
    brain.lose_engine()
    brain.revive_engine()
    brain.run_all()
    assert caller.completed is not None
    assert caller.completed.ready == 3
    assert brain.scheduler.timers.next_due() is not None
    for part in range(3):
        release(brain, caller, part)
    brain.assert_empty()


def test_each_forward_has_its_whole_time_from_when_it_is_the_first() -> None:
    brain = Brain(budget=4, batches_ahead=3, forward_seconds=100.0, space_seconds=1000.0)
    brain.submit(encode_command(parts=range(3)))
    brain.prepare_all(patches=4)
    for _ in range(3):
        brain.advance(99.0)
        brain.finish_batch()
    brain.advance(1000.0)
    assert brain.hands.stopped_engines == []


def test_an_idle_engine_is_not_taken_for_a_hung_one() -> None:
    brain = Brain(forward_seconds=100.0)
    brain.ready_part(encode_command(receivers=()))
    brain.advance(1000.0)
    assert brain.hands.stopped_engines == []


def test_an_engine_that_is_not_back_yet_gets_nothing() -> None:
    brain = Brain(engines=2)
    brain.lose_engine(0)
    caller = brain.submit(encode_command(parts=range(4)))
    brain.prepare_all()
    assert brain.hands.batches[0] == []
    while brain.hands.batches[1]:
        brain.finish_batch(1)
    assert caller.completed is not None
    assert caller.completed.ready == 4


def test_joiners_share_the_fate_of_what_an_engine_died_of_twice() -> None:
    brain = Brain()
    callers = [brain.submit(encode_command(f"r{number}", prompt_id=f"p{number}", content=1)) for number in range(3)]
    brain.prepare_all()
    for _ in range(2):
        brain.lose_engine()
        brain.revive_engine()
    assert [caller.error().reason for caller in callers] == [Reason.ENGINE_LOST] * 3
    brain.assert_empty()


# Engines that are late.


def late_pair(**given: float) -> tuple[Brain, list[Caller]]:
    """Two engines that take a second for a batch; the first of them has been at one for longer than it should."""
    brain = Brain(engines=2, budget=4, batches_ahead=2, space_seconds=1e6, forward_seconds=1e6, **given)  # type: ignore[arg-type] # numbers
    callers = [brain.submit(encode_command("learn", prompt_id="learn", parts=(0, 1), receivers=()))]
    brain.prepare_all(patches=4)
    brain.advance(1.0)
    for engine in (0, 1):
        brain.finish_batch(engine)
    callers += [brain.submit(encode_command(f"r{part}", prompt_id=f"p{part}")) for part in range(8)]
    brain.prepare_all(patches=4)
    assert [len(brain.hands.batches[engine]) for engine in (0, 1)] == [2, 2]
    brain.start_batch(0)
    return brain, callers[1:]


def test_what_waits_behind_a_batch_that_takes_far_too_long_goes_to_the_other_engine() -> None:
    brain, callers = late_pair()
    for _ in range(2):
        brain.advance(1.0)
        brain.finish_batch(1)
    brain.advance(1.9)
    assert brain.engines[0].patches[VISION] == 16
    brain.advance(0.2)
    assert brain.engines[0].patches[VISION] == 4, "what runs stays"
    while brain.hands.batches[1]:
        brain.finish_batch(1)
    ended = [caller.completed is not None for caller in callers]
    assert ended.count(False) == 1
    brain.finish_batch(0)
    assert all(caller.completed is not None and caller.completed.ready == 1 for caller in callers)
    (ghost,) = brain.hands.batches[0]
    reserved = brain.engines[0].slots.reserved_bytes
    assert reserved == ghost.items[0].nbytes, "the engine may still write what was taken from it"
    brain.finish_batch(0)
    for caller in callers:
        release(brain, caller)
    brain.assert_empty()


def test_a_late_engine_that_dies_takes_nothing_along_that_went_elsewhere() -> None:
    brain, callers = late_pair()
    brain.advance(3.0)
    brain.finish_batch(1)
    brain.advance(1.5)
    assert brain.engines[0].patches[VISION] == 4
    brain.lose_engine(0)
    while brain.hands.batches[1]:
        brain.finish_batch(1)
    assert all(caller.completed is not None and caller.completed.ready == 1 for caller in callers)
    for caller in callers:
        release(brain, caller)
    brain.assert_empty()


def test_a_late_engine_keeps_its_work_while_no_other_can_take_it() -> None:
    brain, callers = late_pair()
    brain.lose_engine(1)
    brain.advance(5.0)
    while brain.hands.batches[0]:
        brain.finish_batch(0)
    assert all(caller.completed is not None and caller.completed.ready == 1 for caller in callers)
    assert not brain.engines[0].late


def test_a_late_engine_gets_nothing_new_while_there_is_another() -> None:
    brain, _ = late_pair()
    brain.advance(3.0)
    brain.finish_batch(1)
    brain.advance(1.5)
    assert [engine.late for engine in brain.engines] == [True, False]
    before = brain.engines[0].patches[VISION]
    brain.submit(encode_command("new", prompt_id="new"))
    brain.prepare_all(patches=4)
    assert brain.engines[0].patches[VISION] == before


# When batches are sent.


def learned(seconds: float, patches: int, **given: float) -> Brain:
    """A brain whose engine is known to take so long for so many patches."""
    brain = Brain(budget=100, space_seconds=1e6, prepare_seconds=1e6, forward_seconds=1e6, **given)  # type: ignore[arg-type] # numbers
    brain.submit(encode_command("learn", prompt_id="learn", receivers=()))
    brain.prepare_all(patches=patches)
    brain.advance(seconds)
    brain.finish_batch()
    return brain


def test_the_next_batch_leaves_just_before_the_engine_needs_it_with_all_that_came_until_then() -> None:
    brain = learned(1.0, 10)
    brain.submit(encode_command("r0", prompt_id="p0", receivers=()))
    brain.prepare_all(patches=20)
    assert len(brain.hands.batches[0]) == 1, "an idle engine gets it at once; it is expected to take two seconds"
    for number in range(1, 4):
        brain.submit(encode_command(f"r{number}", prompt_id=f"p{number}", receivers=()))
        brain.prepare_all(patches=5)
        brain.advance(0.5)
    assert len(brain.hands.batches[0]) == 1
    due = brain.scheduler.timers.next_due()
    assert due is not None
    brain.now = due
    brain.advance(0.0)
    assert [len(batch) for batch in brain.hands.batch_parts()] == [1, 3]


def test_the_next_batch_leaves_at_once_when_it_is_full() -> None:
    brain = learned(1.0, 10)
    brain.submit(encode_command("r0", prompt_id="p0", parts=range(3), receivers=()))
    brain.prepare_all(patches=50)
    assert [len(batch) for batch in brain.hands.batch_parts()] == [1, 2]


def test_an_engine_that_ends_early_does_not_wait_for_the_time_that_was_expected() -> None:
    brain = learned(100.0, 1)
    brain.submit(encode_command("r0", prompt_id="p0", parts=(0,), receivers=()))
    brain.prepare_all(patches=10)
    brain.submit(encode_command("r1", prompt_id="p1", parts=(0,), receivers=()))
    brain.prepare_all(patches=10)
    assert len(brain.hands.batches[0]) == 1
    brain.advance(0.1)
    brain.finish_batch()
    assert len(brain.hands.batches[0]) == 1
    brain.finish_batch()
    brain.assert_empty()


def test_a_new_life_of_an_engine_is_taken_for_fast_until_it_has_run() -> None:
    brain = learned(100.0, 1)
    brain.lose_engine()
    brain.revive_engine()
    brain.submit(encode_command(parts=range(2), receivers=()))
    for _ in range(2):
        brain.measure(patches=10)
        brain.finish()
    assert len(brain.hands.batches[0]) == 2


def test_what_waits_for_its_batch_still_ends_at_its_deadline() -> None:
    brain = learned(1000.0, 1)
    brain.submit(encode_command("r0", prompt_id="p0", receivers=()))
    brain.prepare_all(patches=10)
    caller = brain.submit(encode_command("r1", prompt_id="p1", deadline=brain.now + 5.0))
    brain.prepare_all(patches=10)
    brain.advance(5.0)
    assert caller.error().reason is Reason.DEADLINE_EXCEEDED
    brain.finish_batch()
    brain.assert_empty()
