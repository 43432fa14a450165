"""From QUEUED to PREPARED, seen through a scheduler: workers that live, die and hang, and space for inputs."""

from __future__ import annotations

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.parts import PartState
from tests.runtime.recording_hands import Brain, encode_command


def states(brain: Brain) -> list[PartState]:
    """Of the last request's parts."""
    return [part.state for part in brain.request.parts]


def test_a_worker_holds_two_items_and_gets_the_next_when_it_answers() -> None:
    brain = Brain()
    brain.submit(encode_command(parts=range(4)))
    assert brain.hands.parts_at(0) == brain.keys[:2]
    assert states(brain) == [PartState.PREPARING] * 2 + [PartState.QUEUED] * 2
    brain.measure()
    brain.finish()
    assert brain.hands.parts_at(0) == brain.keys[1:3]


def test_the_worker_gets_the_item_and_its_files() -> None:
    brain = Brain()
    brain.submit(encode_command(parts=(3,), file_bytes=33))
    (task,) = brain.hands.tasks[0]
    assert (task.item.part_idx, task.files) == (3, (bytes(33),))
    assert brain.scheduler.admission.media_bytes == 33
    brain.measure()
    assert brain.scheduler.admission.media_bytes == 33
    brain.finish()
    assert brain.scheduler.admission.media_bytes == 0, "prepared media are let go"


def test_the_death_of_a_worker_is_blamed_on_its_first_item_only() -> None:
    brain = Brain(workers=1)
    caller = brain.submit(encode_command(parts=range(3)))
    first, second, third = brain.keys
    brain.measure()
    brain.lose_worker()
    assert caller.error(0).reason is Reason.MEDIA_WORKER_LOST
    assert states(brain)[1:] == [PartState.QUEUED] * 2
    assert brain.scheduler.preparation.input_bytes_taken == 0
    assert not brain.scheduler.preparation.ready
    brain.scheduler.media_worker_ready(0, brain.now)
    assert set(brain.hands.parts_at(0)) == {second, third}
    brain.run_all()
    assert caller.completed is not None
    assert (caller.completed.ready, caller.completed.failed) == (2, 1)
    assert brain.scheduler.requests.part(first) is None


def test_items_of_a_dead_worker_go_to_another_and_keep_their_files() -> None:
    brain = Brain(workers=2)
    caller = brain.submit(encode_command(parts=range(4), file_bytes=7))
    assert [len(brain.hands.tasks[worker]) for worker in (0, 1)] == [2, 2]
    brain.lose_worker(0)
    brain.prepare_all(worker=1)
    assert states(brain).count(PartState.FAILED) == 1
    brain.run_all()
    assert caller.completed is not None
    assert caller.completed.ready == 3


def test_a_worker_that_dies_without_items_or_before_it_was_ready_harms_nobody() -> None:
    brain = Brain(workers=0)
    brain.lose_worker(0)
    caller = brain.submit(encode_command())
    brain.scheduler.media_worker_ready(0, brain.now)
    brain.run_all()
    brain.lose_worker(0)
    assert caller.completed is not None
    assert caller.completed.ready == 1


def test_cancelled_items_are_dropped_and_their_space_comes_back_with_the_workers_answer() -> None:
    brain = Brain()
    caller = brain.submit(encode_command(parts=(0, 1)))
    first, second = brain.keys
    brain.measure()
    assert brain.scheduler.preparation.input_bytes_taken == 64
    brain.scheduler.abandon(brain.request, brain.now)
    caller.gone = True
    assert brain.hands.dropped == [first, second]
    assert brain.scheduler.preparation.input_bytes_taken == 64, "the worker may still write there"
    brain.finish()
    assert brain.scheduler.preparation.input_bytes_taken == 0
    brain.finish()
    brain.assert_empty()


def test_an_item_that_was_prepared_while_its_cancel_was_under_way_is_thrown_away() -> None:
    brain = Brain()
    brain.submit(encode_command())
    brain.measure()
    brain.scheduler.abandon(brain.request, brain.now)
    brain.hands.tasks[0][0].dropped = False
    brain.finish()
    brain.assert_empty()
    assert brain.hands.batches[0] == []


def test_a_cancelled_item_that_waits_for_space_gets_none() -> None:
    brain = Brain(input_bytes=128)
    brain.submit(encode_command("r1", prompt_id="p1", receivers=()))
    brain.prepare_all(input_bytes=128)
    caller = brain.submit(encode_command("r2", prompt_id="p2"))
    brain.measure(input_bytes=128)
    caller.gone = True
    brain.scheduler.abandon(brain.request, brain.now)
    brain.finish_batch()
    assert brain.scheduler.preparation.input_bytes_taken == 0
    brain.finish()
    brain.assert_empty()


def test_space_goes_to_the_oldest_prompt_even_if_a_younger_ones_item_would_fit() -> None:
    brain = Brain(workers=2, input_bytes=256)
    brain.submit(encode_command("r0", prompt_id="first"))
    brain.prepare_all(input_bytes=192)
    brain.submit(encode_command("r1", prompt_id="old", parts=(0, 1)))
    brain.submit(encode_command("r2", prompt_id="young"))
    old, _, young = (part.computation for request in brain.scheduler.requests.live()[1:] for part in request.parts)
    assert old is not None
    assert young is not None
    brain.measure(0, input_bytes=192)
    brain.measure(1, input_bytes=64)
    assert (old.input_offset, young.input_offset) == (None, None)
    brain.finish_batch()
    assert old.input_offset is not None
    assert young.input_offset is not None


def test_an_item_that_can_never_fit_is_refused_at_once() -> None:
    brain = Brain(input_bytes=128)
    caller = brain.submit(encode_command())
    brain.measure(input_bytes=129)
    assert caller.error().reason is Reason.MEDIA_TOO_LARGE
    brain.finish()
    brain.assert_empty()


def test_a_wait_for_input_space_ends() -> None:
    brain = Brain(input_bytes=128, space_seconds=20.0, prepare_seconds=8.0)
    brain.submit(encode_command("r1"))
    brain.prepare_all(input_bytes=128)
    brain.start_batch()
    waiting = brain.submit(encode_command("r2", prompt_id="p2"))
    brain.measure(input_bytes=128)
    brain.finish()
    assert brain.hands.tasks[0] == [], "no worker waits for space"
    assert states(brain) == [PartState.QUEUED]
    assert waiting.laid_out == {0}
    brain.advance(19.9)
    assert waiting.ends == {}
    brain.advance(0.1)
    assert waiting.error().reason is Reason.SPACE_TIMEOUT
    assert waiting.error().retry_after is not None
    assert brain.hands.stopped == []


def test_what_finds_no_space_comes_back_and_is_given_out_again_with_its_space() -> None:
    brain = Brain(input_bytes=128)
    brain.submit(encode_command("r1", prompt_id="p1", receivers=()))
    brain.prepare_all(input_bytes=128)
    caller = brain.submit(encode_command("r2", prompt_id="p2", file_bytes=7, receivers=()))
    brain.measure(input_bytes=128)
    assert brain.hands.dropped == brain.keys
    brain.finish_batch()
    assert brain.hands.tasks[0][0].offset is None, "the worker has been told to forget it"
    brain.finish()
    (task,) = brain.hands.tasks[0]
    assert (task.part, task.offset, task.measure_only, len(task.files[0])) == (brain.keys[0], 0, False, 7)
    brain.measure(input_bytes=128)
    brain.finish()
    brain.finish_batch()
    assert caller.completed is not None
    assert caller.completed.ready == 1
    assert caller.laid_out == {0}, "and is told once"
    assert brain.scheduler.preparation.input_bytes_taken == 0


def test_while_some_wait_for_space_the_next_are_only_measured() -> None:
    brain = Brain(input_bytes=128)
    brain.submit(encode_command("r1", prompt_id="p1", receivers=()))
    brain.prepare_all(input_bytes=128)
    waiting = [brain.submit(encode_command(f"w{number}", prompt_id=f"w{number}", receivers=())) for number in range(9)]
    first, second = brain.hands.tasks[0]
    assert (first.measure_only, second.measure_only) == (False, False)
    brain.prepare_all(input_bytes=128)
    assert brain.hands.tasks[0] == []
    assert len(brain.hands.dropped) == 2, "the others were not begun"
    assert all(caller.laid_out == {0} for caller in waiting)
    brain.finish_batch()
    assert [task.measure_only for task in brain.hands.tasks[0]] == [False]
    while brain.hands.tasks[0] or brain.hands.batches[0]:
        brain.prepare_all(input_bytes=128)
        brain.finish_batch()
    assert all(caller.completed is not None for caller in waiting)


def test_a_worker_that_dies_takes_nothing_along_that_waits_for_space() -> None:
    brain = Brain(input_bytes=128)
    brain.submit(encode_command("r1", prompt_id="p1", receivers=()))
    brain.prepare_all(input_bytes=128)
    caller = brain.submit(encode_command("r2", prompt_id="p2", parts=(0, 1), receivers=()))
    brain.measure(input_bytes=64)
    brain.measure(input_bytes=64)
    brain.lose_worker()
    brain.scheduler.media_worker_ready(0, brain.now)
    assert brain.hands.tasks[0] == []
    brain.finish_batch()
    brain.run_all()
    assert caller.completed is not None
    assert (caller.completed.ready, caller.completed.failed) == (1, 1)
    brain.assert_empty()


def test_a_decoder_that_hangs_is_stopped_and_only_its_item_fails() -> None:
    brain = Brain(prepare_seconds=10.0)
    caller = brain.submit(encode_command(parts=range(3)))
    brain.advance(9.9)
    assert caller.ends == {}
    brain.advance(0.1)
    assert caller.error(0).reason is Reason.MEDIA_TIMEOUT
    assert brain.hands.stopped == [0]
    assert brain.scheduler.requests.live_parts() == {PartState.PREPARING: 1, PartState.QUEUED: 1}
    brain.lose_worker()
    assert len(caller.ends) == 1
    brain.scheduler.media_worker_ready(0, brain.now)
    brain.run_all()
    assert caller.completed is not None
    assert caller.completed.ready == 2


def test_each_item_has_its_whole_time() -> None:
    brain = Brain(prepare_seconds=10.0)
    caller = brain.submit(encode_command(parts=range(3)))
    for _ in range(3):
        brain.advance(9.0)
        brain.measure()
        brain.finish()
    assert caller.ends == {}
    assert brain.hands.stopped == []


def test_a_hung_worker_that_was_told_to_drop_its_item_is_stopped_too() -> None:
    brain = Brain(prepare_seconds=10.0)
    caller = brain.submit(encode_command())
    brain.scheduler.abandon(brain.request, brain.now)
    caller.gone = True
    brain.advance(10.0)
    assert brain.hands.stopped == [0]


def test_a_worker_that_was_stopped_for_one_item_is_not_blamed_on_the_next() -> None:
    """Its answer may cross with the kill; then another item is first when the death is noticed."""
    brain = Brain(prepare_seconds=10.0)
    caller = brain.submit(encode_command(parts=(0, 1, 2)))
    brain.measure()
    brain.advance(10.0)
    assert caller.error(0).reason is Reason.MEDIA_TIMEOUT
    brain.hands.tasks[0][0].dropped = False
    brain.finish()
    assert len(brain.hands.tasks[0]) == 1, "a worker that is about to die gets nothing more"
    brain.lose_worker()
    assert list(caller.ends) == [0]
    brain.scheduler.media_worker_ready(0, brain.now)
    brain.run_all()
    assert caller.completed is not None
    assert caller.completed.ready == 2


def test_a_failed_item_fails_alone_with_the_workers_reason() -> None:
    brain = Brain()
    caller = brain.submit(encode_command(parts=(0, 1)))
    task = brain.hands.tasks[0].pop(0)
    fault = ServiceError(Reason.MEDIA_TRUNCATED, "own words")
    brain.scheduler.item_failed(0, task.part, fault, brain.now)
    brain.run_all()
    assert caller.error(0) is fault
    assert caller.chunk(1).nbytes == 128


def test_reports_for_items_that_the_worker_does_not_have_are_ignored() -> None:
    brain = Brain(workers=2)
    caller = brain.submit(encode_command())
    key = brain.keys[0]
    fault = ServiceError(Reason.MEDIA_CORRUPT, "own words")
    for worker, part in ((1, key), (0, 999)):
        brain.scheduler.item_failed(worker, part, fault, brain.now)
        brain.scheduler.item_prepared(worker, part, 0.1, brain.now)
    assert states(brain) == [PartState.PREPARING]
    assert caller.ends == {}


def test_several_workers_share_the_queue() -> None:
    brain = Brain(workers=3)
    caller = brain.submit(encode_command(parts=range(8)))
    assert [len(brain.hands.tasks.get(worker, [])) for worker in range(3)] == [2, 2, 2]
    assert brain.hands.parts_at(0) + brain.hands.parts_at(1) + brain.hands.parts_at(2) == brain.keys[:6]
    brain.run_all()
    assert caller.completed is not None
    assert caller.completed.ready == 8


def test_a_slow_worker_holds_up_only_what_it_has() -> None:
    brain = Brain(workers=2, prepare_seconds=1000.0)
    caller = brain.submit(encode_command(parts=range(10)))
    while brain.hands.tasks[1]:
        brain.prepare_all(worker=1)
        for engine in brain.hands.batches:
            while brain.hands.batches[engine]:
                brain.finish_batch(engine)
    assert len(brain.hands.tasks[0]) == 2
    assert len(caller.ends) == 8


def test_when_no_worker_comes_back_what_waits_fails_in_time() -> None:
    brain = Brain(space_seconds=20.0)
    caller = brain.submit(encode_command(parts=range(4)))
    brain.lose_worker()
    assert caller.error(0).reason is Reason.MEDIA_WORKER_LOST
    brain.advance(19.9)
    assert len(caller.ends) == 1
    brain.advance(0.1)
    assert [caller.error(part).reason for part in (1, 2, 3)] == [Reason.NOT_READY] * 3
    assert caller.error(1).retry_after is not None
    brain.assert_empty()
    assert brain.scheduler.timers.next_due() is None
    later = brain.submit(encode_command("later"))
    brain.advance(19.9)
    assert later.ends == {}
    brain.advance(0.1)
    assert later.error().reason is Reason.NOT_READY


def test_when_no_worker_ever_starts_what_waits_fails_in_time() -> None:
    brain = Brain(workers=0, space_seconds=20.0)
    brain.advance(1000.0)
    caller = brain.submit(encode_command())
    brain.lose_worker(0)
    brain.advance(19.9)
    assert caller.ends == {}
    brain.advance(0.1)
    assert caller.error().reason is Reason.NOT_READY
    brain.assert_empty()


def test_a_worker_that_comes_back_in_time_takes_all() -> None:
    brain = Brain(workers=2, space_seconds=20.0)
    caller = brain.submit(encode_command(parts=range(6)))
    for worker in (0, 1):
        brain.lose_worker(worker)
    brain.advance(19.0)
    brain.scheduler.media_worker_ready(1, brain.now)
    brain.advance(5.0)
    brain.run_all()
    assert caller.completed is not None
    assert (caller.completed.ready, caller.completed.failed) == (4, 2)


def test_each_worker_that_hangs_is_stopped_by_itself() -> None:
    brain = Brain(workers=2, prepare_seconds=10.0)
    caller = brain.submit(encode_command(parts=range(4)))
    brain.advance(5.0)
    brain.measure(1)
    brain.finish(1)
    brain.advance(5.0)
    assert brain.hands.stopped == [0]
    assert caller.error(0).reason is Reason.MEDIA_TIMEOUT
    brain.lose_worker(0)
    brain.advance(4.9)
    assert brain.hands.stopped == [0]
    brain.advance(0.1)
    assert brain.hands.stopped == [0, 1]
