"""Readiness by a canary: an idle engine is tried, a busy one is not suspected, a broken one is found out."""

from __future__ import annotations

import io
import wave

import pytest
from PIL import Image

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime import canary
from encoder_svc.runtime.requests import Request
from encoder_svc.runtime.slots import SlotState
from epd.encoder.v1.encoder_service_pb2 import EngineState
from epd.encoder.v1.media_pb2 import Modality
from epd.internal.v1.media_worker_pb2 import Tower
from tests.runtime.recording_hands import Brain, digest_of, encode_command

SECONDS = 30.0


def brain_with_canary(**given: float) -> Brain:
    """A brain whose engines are watched."""
    brain = Brain(canary_seconds=SECONDS, **given)  # type: ignore[arg-type] # rules and numbers of children
    brain.scheduler.canary.start(brain.now)
    return brain


def canaries(brain: Brain) -> list[Request]:
    """Those that are under way."""
    return [request for request in brain.scheduler.requests.live() if request.command.request_id.startswith("canary-")]


def bring(brain: Brain) -> None:
    """Whatever is to be hashed is."""
    for key in list(brain.hands.sources):
        item, files = brain.hands.sources.pop(key)
        assert item.WhichOneof("source") is None
        brain.scheduler.sourced(key, files, digest_of(0), 0.0, brain.now)


def sing(brain: Brain, engine: int = 0, reason: str = "") -> None:
    """The canary comes to an end at an engine."""
    bring(brain)
    for worker in brain.hands.tasks:
        brain.prepare_all(worker=worker)
    while brain.hands.batches[engine]:
        (item,) = brain.hands.batches[engine][0].items
        brain.finish_batch(engine, {item.part: reason} if reason else None)


def test_f08_an_idle_engine_is_tried_through_the_normal_path() -> None:
    brain = brain_with_canary()
    brain.advance(SECONDS - 0.1)
    assert canaries(brain) == []
    for _ in range(5):
        brain.advance(SECONDS / 4)
    (request,) = canaries(brain)
    assert request.command.engine == 0
    assert request.command.items[0].files
    assert brain.scheduler.ready
    sing(brain)
    assert canaries(brain) == []
    assert brain.scheduler.ready
    brain.assert_empty()


def test_an_engine_that_encodes_well_needs_no_canary() -> None:
    brain = brain_with_canary()
    for number in range(20):
        brain.advance(SECONDS / 2)
        brain.submit(encode_command(f"r{number}", receivers=()))
        brain.run_all()
        assert canaries(brain) == []


@pytest.mark.parametrize(
    "reason", [Reason.FORWARD_FAILED, Reason.OUTPUT_NOT_FINITE, Reason.OUT_OF_MEMORY, Reason.INTERNAL]
)
def test_f06_f08_an_engine_whose_canary_fails_is_not_ready_until_it_encodes_well(reason: Reason) -> None:
    brain = brain_with_canary()
    brain.advance(SECONDS * 1.25)
    sing(brain, reason=reason)
    assert not brain.scheduler.ready
    brain.advance(SECONDS / 4)
    assert len(canaries(brain)) == 1, "it is tried again soon"
    sing(brain)
    assert brain.scheduler.ready


def test_f08_what_is_told_of_an_engine_is_true() -> None:
    brain = Brain(started=False)
    (engine,) = brain.engines
    told = [engine.state]
    brain.scheduler.engine_lost(0, brain.now)
    told.append(engine.state)
    brain.scheduler.engine_starting(0)
    told.append(engine.state)
    brain.revive_engine()
    brain.scheduler.media_worker_ready(0, brain.now)
    told.append(engine.state)
    brain.advance(100.0)
    brain.scheduler.canary.start(brain.now)
    sing(brain, reason=Reason.FORWARD_FAILED)
    told.append(engine.state)
    brain.ready_part(encode_command(receivers=()))
    told.append(engine.state)
    brain.lose_engine()
    told.append(engine.state)
    names = [EngineState.Name(state).removeprefix("ENGINE_STATE_") for state in told]
    assert names == ["STARTING", "DOWN", "STARTING", "READY", "FAILING", "READY", "DOWN"]


def test_a_good_forward_of_anybody_makes_it_ready_again() -> None:
    brain = brain_with_canary()
    brain.advance(SECONDS * 1.25)
    sing(brain, reason=Reason.FORWARD_FAILED)
    caller = brain.submit(encode_command(receivers=()))
    brain.run_all()
    assert caller.chunk().nbytes == 128, "it is still tried if there is no other"
    assert brain.scheduler.ready


def test_a_new_life_is_not_judged_by_the_last_one() -> None:
    brain = brain_with_canary()
    brain.advance(SECONDS * 1.25)
    sing(brain, reason=Reason.FORWARD_FAILED)
    brain.lose_engine()
    brain.revive_engine()
    assert brain.scheduler.ready


def test_one_good_engine_is_enough_and_gets_the_work() -> None:
    brain = brain_with_canary(engines=2)
    brain.advance(SECONDS * 1.25)
    assert sorted(request.command.engine or 0 for request in canaries(brain)) == [0, 1]
    sing(brain, 0, reason=Reason.FORWARD_FAILED)
    sing(brain, 1)
    assert brain.scheduler.ready
    brain.submit(encode_command(parts=range(4), receivers=()))
    brain.prepare_all()
    assert brain.hands.batches[0] == []
    assert brain.hands.batches[1]


@pytest.mark.parametrize("engine", [0, 1])
def test_a_canary_goes_to_its_engine_even_if_that_has_more_to_do(engine: int) -> None:
    brain = brain_with_canary(engines=2, batches_ahead=1)
    brain.advance(SECONDS * 0.9)
    other = 1 - engine
    brain.engines[engine].last_good = brain.now - SECONDS - 1
    brain.engines[other].last_good = brain.now
    brain.engines[engine].patches[Tower.TOWER_VISION] += 1000
    brain.advance(SECONDS / 4)
    bring(brain)
    brain.prepare_all()
    assert [len(brain.hands.batches[index]) for index in (engine, other)] == [1, 0]
    brain.engines[engine].patches[Tower.TOWER_VISION] -= 1000
    brain.run_all()
    brain.assert_empty()


def test_f07_a_busy_engine_is_never_suspected() -> None:
    """Its forward takes long, so its canary waits; there is one at most, and it is ready all the time."""
    brain = brain_with_canary(batches_ahead=1, prepare_seconds=1e6, space_seconds=1e6, forward_seconds=1e6)
    brain.submit(encode_command("long", receivers=()))
    brain.prepare_all()
    brain.start_batch()
    for _ in range(40):
        brain.advance(SECONDS / 2)
        bring(brain)
        brain.prepare_all()
        assert brain.scheduler.ready
        assert len(canaries(brain)) <= 1
    assert len(canaries(brain)) == 1
    brain.finish_batch()
    sing(brain)
    assert brain.scheduler.ready


def test_f07_an_engine_whose_arena_is_full_of_leases_is_not_suspected() -> None:
    brain = brain_with_canary(arena_bytes=1024, prompt_bytes=1024, lease_seconds=600.0, space_seconds=20.0)
    brain.ready_part(nbytes=900)
    brain.advance(SECONDS * 1.25)
    bring(brain)
    brain.prepare_all()
    assert len(canaries(brain)) == 1
    brain.advance(20.0)
    assert brain.observer.ended[-1][1] is Reason.SPACE_TIMEOUT
    assert brain.scheduler.ready


def test_f07_an_engine_is_not_suspected_for_want_of_a_media_worker() -> None:
    brain = brain_with_canary(space_seconds=20.0)
    brain.lose_worker()
    brain.advance(SECONDS * 1.25)
    bring(brain)
    brain.advance(20.0)
    assert brain.observer.ended[-1][1] is Reason.NOT_READY
    brain.scheduler.media_worker_ready(0, brain.now)
    assert brain.scheduler.ready


def test_f08_an_engine_is_suspected_when_even_the_canary_cannot_be_decoded() -> None:
    brain = brain_with_canary()
    brain.advance(SECONDS * 1.25)
    bring(brain)
    task = brain.hands.tasks[0].pop()
    brain.scheduler.item_failed(0, task.part, ServiceError(Reason.INTERNAL, "own words"), brain.now)
    assert not brain.scheduler.ready


@pytest.mark.parametrize("why", ["full", "draining"])
def test_a_canary_that_is_refused_says_nothing(why: str) -> None:
    brain = brain_with_canary(max_queued_parts=1, batches_ahead=1)
    if why == "full":
        brain.submit(encode_command(receivers=()))
    else:
        brain.scheduler.draining = True
    brain.advance(SECONDS * 1.25)
    assert canaries(brain) == []
    assert brain.scheduler.encoding.ready
    brain.scheduler.draining = False
    brain.run_all()
    brain.engines[0].last_good = brain.now - SECONDS
    brain.advance(SECONDS / 4)
    assert len(canaries(brain)) == 1


def test_a_dead_engine_is_not_tried() -> None:
    brain = brain_with_canary()
    brain.lose_engine()
    brain.advance(SECONDS * 3)
    assert canaries(brain) == []


def test_the_canary_of_a_dead_engine_does_not_hold_up_the_others() -> None:
    """It is the oldest that waits for a slot, and can have none until its engine is back."""
    brain = brain_with_canary(engines=2)
    brain.advance(SECONDS * 0.9)
    brain.engines[1].last_good = brain.now
    brain.advance(SECONDS / 4)
    bring(brain)
    brain.prepare_all()
    assert len(brain.hands.batches[0]) == 1
    brain.lose_engine(0)
    caller = brain.submit(encode_command(receivers=()))
    brain.prepare_all()
    brain.finish_batch(1)
    assert caller.chunk().nbytes == 128
    brain.revive_engine(0)
    brain.run_all()
    brain.assert_empty()


def test_the_canary_of_a_full_engine_does_not_hold_up_the_others() -> None:
    brain = brain_with_canary(engines=2, arena_bytes=1024, prompt_bytes=1024, lease_seconds=600.0)
    holder = brain.ready_part(nbytes=900)
    assert holder.chunk().nbytes == 900
    assert [slot.state for slot in brain.engines[0].slots.live] == [SlotState.FILLED]
    brain.advance(SECONDS * 0.9)
    brain.engines[1].last_good = brain.now
    brain.advance(SECONDS / 2)
    bring(brain)
    brain.prepare_all(nbytes=900)
    caller = brain.submit(encode_command("r2", receivers=()))
    brain.prepare_all()
    brain.finish_batch(1)
    assert caller.chunk().nbytes == 128


def test_nothing_of_a_canary_is_kept_or_told() -> None:
    brain = brain_with_canary()
    brain.advance(SECONDS * 1.25)
    sing(brain)
    assert brain.observer.looked_up == []
    brain.assert_empty()


def test_its_files_are_what_they_should_be() -> None:
    with Image.open(io.BytesIO(canary._file(Modality.MODALITY_IMAGE))) as image:
        assert (image.format, image.size, image.convert("RGB").getpixel((5, 5))) == ("PNG", (56, 56), (128, 128, 128))
    with wave.open(io.BytesIO(canary._file(Modality.MODALITY_AUDIO))) as sound:
        assert (sound.getnchannels(), sound.getframerate(), sound.getnframes()) == (1, 16_000, 16_000)
