"""Videos with sound: two towers' work for one part, in batches of their own, on one engine, into one slot."""

from __future__ import annotations

import pytest

from encoder_svc.errors import Reason
from encoder_svc.runtime.computations import Computation
from encoder_svc.runtime.forwards import Forward, ForwardState
from encoder_svc.runtime.parts import PartState
from epd.encoder.v1.encoder_service_pb2 import ReadOutcome
from epd.encoder.v1.media_pb2 import Modality
from epd.internal.v1.media_worker_pb2 import Tower
from tests.runtime.recording_hands import Brain, Caller, encode_command

VISION, AUDIO = Tower.TOWER_VISION, Tower.TOWER_AUDIO


def only_computation(brain: Brain) -> Computation:
    """Of the last request, which has one part."""
    (part,) = brain.request.parts
    assert part.computation is not None
    return part.computation


def films(brain: Brain, count: int = 1, *, patches: int = 4, frames: int = 3, name: str = "film") -> list[Caller]:
    """Submits and prepares videos with sound, each of a prompt of its own."""
    callers = []
    for number in range(count):
        callers.append(brain.submit(encode_command(f"{name}{number}", prompt_id=f"{name}{number}")))
        brain.prepare_all(patches=patches, frames=frames)
    return callers


def occupy(brain: Brain) -> Caller:
    """Gives the engine something to do, so that what follows waits."""
    caller = brain.submit(encode_command("busy", prompt_id="busy", receivers=()))
    brain.prepare_all(patches=16)
    return caller


def release(brain: Brain, caller: Caller) -> None:
    """The receiver has read the part."""
    brain.scheduler.release([(caller.chunk().leases[0].lease_id, ReadOutcome.READ_OUTCOME_OK)], brain.now)


def towers(brain: Brain, engine: int = 0) -> list[Tower]:
    """Of the batches that an engine has, in order."""
    return [batch.tower for batch in brain.engines[engine].batches.values()]


def test_each_half_is_batched_with_its_like() -> None:
    brain = Brain(budget=16, batches_ahead=1)
    occupy(brain)
    callers = films(brain, 2)
    callers.append(brain.submit(encode_command("image", prompt_id="image")))
    brain.prepare_all(patches=5)
    callers.append(brain.submit(encode_command("sound", prompt_id="sound")))
    brain.prepare_all(patches=0, frames=6)
    brain.finish_batch()
    assert [len(batch) for batch in brain.hands.batch_parts()] == [3]
    assert towers(brain) == [VISION]
    brain.finish_batch()
    assert callers[2].completed is not None
    assert [caller.completed for caller in callers[:2]] == [None, None], "the sound is not there yet"
    assert [len(batch) for batch in brain.hands.batch_parts()] == [3]
    assert towers(brain) == [AUDIO]
    brain.finish_batch()
    for caller in callers[:2]:
        timings = caller.chunk().timings
        assert (timings.batch_items, timings.batch_patches) == (3, 13), "those of the pictures"
        release(brain, caller)
    for caller in callers[2:]:
        release(brain, caller)
    brain.assert_empty()


def test_the_engine_is_told_which_matrix_each_half_makes() -> None:
    brain = Brain()
    films(brain)
    pictures, sound = (batch.items[0] for batch in brain.hands.batches[0])
    assert pictures.part == sound.part
    assert (pictures.modality, list(pictures.grid_dim)) == (Modality.MODALITY_IMAGE, [1, 2, 2])
    assert (sound.modality, list(sound.grid_dim)) == (Modality.MODALITY_AUDIO, [3])
    assert (pictures.first_matrix, sound.first_matrix) == (0, 1)
    assert (pictures.partial, sound.partial) == (True, False), "the one that comes last sums the slot up"
    assert pictures.payload_offset == sound.payload_offset
    assert pictures.input_offset == sound.input_offset
    assert pictures.tensors == sound.tensors


def test_an_item_costs_what_both_towers_do_for_it() -> None:
    brain = Brain()
    brain.engines[0].batcher.set_budget(AUDIO, 3 * brain.engines[0].batcher.budget(VISION))
    films(brain, patches=7, frames=5)
    assert brain.scheduler.admission.patches == 9, "three frames fill as much of a batch as one patch"
    assert (brain.engines[0].patches[VISION], brain.engines[0].patches[AUDIO]) == (7, 5)
    brain.finish_batch()
    assert (brain.engines[0].patches[VISION], brain.engines[0].patches[AUDIO]) == (0, 5)


def test_the_sound_may_come_first() -> None:
    brain = Brain(budget=16, batches_ahead=1)
    occupy(brain)
    brain.submit(encode_command("full", prompt_id="full", receivers=()))
    brain.prepare_all(patches=16)
    (caller,) = films(brain)
    brain.finish_batch()
    brain.advance(0.1)
    brain.finish_batch()
    assert towers(brain) == [AUDIO], "it has waited longer than what is left for the other tower"
    assert brain.finish_batch().items[0].partial
    assert caller.completed is None
    (pictures,) = brain.hands.batches[0][0].items
    assert (pictures.first_matrix, pictures.partial) == (0, False)
    brain.finish_batch()
    assert caller.chunk().checksum.value == pictures.part


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("bad", ["pictures", "sound"])
def test_f05_a_half_that_fails_fails_the_part_and_nobody_else(bad: str, ahead: int) -> None:
    brain = Brain(batches_ahead=ahead)
    (caller,) = films(brain)
    key = only_computation(brain).key
    if bad == "sound":
        brain.finish_batch()
    brain.finish_batch(reasons={key: Reason.FORWARD_FAILED})
    assert caller.error().reason is Reason.FORWARD_FAILED
    if bad == "pictures" and ahead == 2:
        assert brain.engines[0].slots.live, "the engine may still write its sound"
        assert brain.scheduler.preparation.input_bytes_taken
        brain.finish_batch()
    assert brain.hands.batches[0] == []
    brain.assert_empty()


@pytest.mark.parametrize("finished", [0, 1])
@pytest.mark.parametrize("ahead", [1, 2])
def test_a_cancel_takes_both_halves_along(ahead: int, finished: int) -> None:
    brain = Brain(batches_ahead=ahead)
    (caller,) = films(brain)
    for _ in range(finished):
        brain.finish_batch()
    caller.gone = True
    brain.scheduler.abandon(brain.request, brain.now)
    while brain.hands.batches[0]:
        assert brain.engines[0].slots.live
        brain.finish_batch()
    brain.assert_empty()


def test_a_cancel_between_the_halves_gives_all_back_at_once() -> None:
    brain = Brain(budget=16, batches_ahead=1)
    occupy(brain)
    (caller,) = films(brain, frames=2)
    film, computation = brain.request, only_computation(brain)
    brain.submit(encode_command("urgent", prompt_id="urgent", priority=1, receivers=()))
    brain.finish_batch()
    assert [forward.state for forward in computation.forwards] == [ForwardState.SENT, ForwardState.WAITING]
    brain.prepare_all(patches=16)
    brain.finish_batch()
    assert [forward.state for forward in computation.forwards] == [ForwardState.DONE, ForwardState.WAITING]
    assert computation.stage is PartState.ENCODING
    caller.gone = True
    brain.scheduler.abandon(film, brain.now)
    assert computation.input_offset is None
    assert computation.slot is None
    brain.run_all()
    brain.assert_empty()


@pytest.mark.parametrize("finished", [0, 1])
def test_f29_an_engine_that_dies_takes_both_halves_and_both_run_again(finished: int) -> None:
    brain = Brain(engines=2)
    (caller,) = films(brain)
    computation = only_computation(brain)
    first = computation.engine
    for _ in range(finished):
        brain.finish_batch(first)
    brain.lose_engine(first)
    assert computation.engine == 1 - first
    assert computation.attempts == 1
    assert towers(brain, 1 - first) == [VISION, AUDIO]
    assert [len(batch) for batch in brain.hands.batch_parts(1 - first)] == [1, 1]
    brain.revive_engine(first)
    brain.run_all()
    assert caller.chunk().checksum.value == computation.key
    release(brain, caller)
    brain.assert_empty()


def test_f29_what_kills_an_engine_with_either_half_is_tried_twice_in_all() -> None:
    brain = Brain()
    (caller,) = films(brain)
    brain.lose_engine()
    brain.revive_engine()
    brain.finish_batch()
    brain.lose_engine()
    assert caller.error().reason is Reason.ENGINE_LOST
    brain.revive_engine()
    brain.assert_empty()


def late_pair() -> Brain:
    """Two engines that take a second for a batch of either tower; the second of them is full, the first is idle."""
    brain = Brain(engines=2, budget=4, batches_ahead=2, space_seconds=1e6, forward_seconds=1e6, lease_seconds=600.0)
    learners = films(brain, 2, name="learn")
    brain.advance(1.0)
    for engine in (0, 1):
        brain.finish_batch(engine)
    brain.advance(1.0)
    for engine in (0, 1):
        brain.finish_batch(engine)
    for caller in learners:
        release(brain, caller)
    return brain


def test_a_film_whose_halves_both_wait_leaves_a_late_engine_whole() -> None:
    brain = late_pair()
    callers = [brain.submit(encode_command(f"busy{n}", prompt_id=f"busy{n}")) for n in range(2)]
    brain.prepare_all(patches=4)
    callers += films(brain, 2)
    computation = next(
        forward.computation for forward in brain.engines[0].batcher.waiting() + sent(brain, 0) if forward.index == 1
    )
    assert computation.engine == 0
    slots = len(brain.engines[0].slots.live)
    brain.start_batch(0)
    brain.advance(1.0)
    brain.finish_batch(1)
    while brain.hands.batches[1]:
        brain.finish_batch(1)
    brain.advance(5.0)
    assert brain.engines[0].late
    assert computation.engine == 1
    assert brain.engines[0].patches == {VISION: 4, AUDIO: 0}
    assert len(brain.engines[0].slots.live) == slots, "what was sent may still be written"
    while brain.hands.batches[1]:
        brain.finish_batch(1)
    while brain.hands.batches[0]:
        brain.finish_batch(0)
    for caller in callers:
        assert caller.completed is not None
        assert caller.completed.ready == 1
        release(brain, caller)
    brain.assert_empty()


def sent(brain: Brain, engine: int) -> list[Forward]:
    """What an engine has in its batches."""
    return [forward for batch in brain.engines[engine].batches.values() for forward in batch.items]


def test_a_film_of_which_one_half_is_begun_stays_where_its_slot_is() -> None:
    brain = late_pair()
    films(brain)
    computation = only_computation(brain)
    engine = computation.engine
    brain.start_batch(engine)
    brain.advance(5.0)
    assert brain.engines[engine].late
    assert computation.engine == engine
    brain.finish_batch(engine)
    brain.advance(5.0)
    assert computation.engine == engine, "the pictures are in its slot"
    brain.finish_batch(engine)
    assert computation.ended
