"""The brain, one situation at a time. What can happen in any order is in ``test_scheduler_machine.py``."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.commands import CancelCommand, EncodeCommand, ItemCommand
from encoder_svc.runtime.computations import Computation
from encoder_svc.runtime.events import Accepted, ChunkEvent, Completed, PartCancelled
from encoder_svc.runtime.leases import LeaseState
from encoder_svc.runtime.parts import PartState
from encoder_svc.runtime.slots import footprint
from epd import slot_header
from epd.encoder.v1.embedding_pb2 import ChecksumAlgorithm, ChunkState
from epd.encoder.v1.encoder_service_pb2 import ReadOutcome
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from tests.runtime.recording_hands import Brain, Caller, RecordingHands, digest_of, encode_command

OK, CORRUPT = ReadOutcome.READ_OUTCOME_OK, ReadOutcome.READ_OUTCOME_CORRUPT


def refusal(brain: Brain, command: EncodeCommand) -> ServiceError:
    """Why a request is refused as a whole."""
    caller = Caller(command)
    with pytest.raises(ServiceError) as fault:
        brain.scheduler.submit(command, caller, brain.now)
    assert caller.events == []
    assert brain.observer.refused[-1] is fault.value.reason
    return fault.value


def leases(caller: Caller, part: int = 0) -> list[bytes]:
    """The leases on a part's slot."""
    return [grant.lease_id for grant in caller.chunk(part).leases]


def release(brain: Brain, lease: bytes, outcome: ReadOutcome = OK) -> LeaseState | None:
    """Gives a lease back; what it is then."""
    ((_, after),) = brain.scheduler.release([(lease, outcome)], brain.now)
    return after


def test_a_part_goes_all_the_way() -> None:
    brain = Brain()
    caller = brain.submit(encode_command(file_bytes=50))
    brain.advance(1.0)
    brain.measure(nbytes=256)
    brain.advance(1.0)
    brain.finish()
    brain.start_batch()
    brain.advance(2.0)
    brain.finish_batch()
    accepted, early, late, completed = caller.events
    assert isinstance(accepted, Accepted)
    assert isinstance(early, ChunkEvent)
    assert isinstance(late, ChunkEvent)
    assert completed == Completed(ready=1, failed=0, cancelled=0, from_cache=0, total_seconds=4.0)
    layout, chunk = early.chunk, late.chunk
    assert (layout.state, chunk.state) == (ChunkState.CHUNK_STATE_LAYOUT, ChunkState.CHUNK_STATE_READY)
    assert not layout.leases
    assert not layout.locators
    assert (layout.generation, layout.slot_key, layout.HasField("checksum")) == (0, b"", False)
    assert (chunk.prompt_id, chunk.request_id, chunk.part_idx, chunk.num_parts) == ("p", "r", 0, 16)
    assert chunk.checksum.algorithm == ChecksumAlgorithm.CHECKSUM_ALGORITHM_XXH3_64
    assert chunk.compatibility_fingerprint == layout.compatibility_fingerprint == b"\x07" * 32
    assert (chunk.timings.prepare.ToTimedelta().total_seconds(), chunk.timings.total.seconds) == (0.5, 4)
    for name in ("grid_dim", "token_count", "tensors", "nbytes", "modality"):
        assert getattr(chunk, name) == getattr(layout, name)
    (slot,) = brain.engines[0].slots.live
    assert (chunk.generation, chunk.slot_key, chunk.checksum.value) == (slot.generation, slot.key, slot.checksum)
    assert slot_header.read_generation(memoryview(brain.arenas[0]), slot.offset) == chunk.generation
    assert release(brain, leases(caller)[0]) is LeaseState.RELEASED
    brain.assert_empty()
    assert brain.observer.ended == [(PartState.READY, None)]


def test_layout_is_left_out_when_asked() -> None:
    caller = Brain().ready_part(encode_command(skip_layout=True))
    assert [type(event) for event in caller.events] == [Accepted, ChunkEvent, Completed]


def test_leases_live_exactly_from_ready() -> None:
    brain = Brain(lease_seconds=60.0)
    caller = brain.submit(encode_command())
    brain.prepare_all()
    brain.advance(15.0)
    brain.finish_batch()
    assert caller.chunk().leases[0].ttl.ToTimedelta().total_seconds() == 60.0
    brain.advance(59.999)
    assert len(brain.scheduler.leases) == 1
    brain.advance(0.001)
    assert brain.scheduler.leases.find(leases(caller)[0], brain.now) is LeaseState.EXPIRED
    brain.assert_empty()


@pytest.mark.parametrize(("asked", "given"), [(None, 60.0), (5.0, 5.0), (9999.0, 600.0)])
def test_the_life_of_a_lease_is_bounded(asked: float | None, given: float) -> None:
    brain = Brain()
    caller = brain.ready_part(encode_command(lease_ttl=asked))
    assert caller.chunk().leases[0].ttl.ToTimedelta().total_seconds() == given
    found = brain.scheduler.renew(leases(caller)[0], 9999.0, brain.now)
    assert not isinstance(found, LeaseState)
    assert found is not None
    assert found.expires_at == brain.now + 600.0


def test_each_receiver_has_a_lease_of_its_own() -> None:
    brain = Brain()
    caller = brain.ready_part(encode_command(receivers=("a", "b")))
    assert [grant.receiver_id for grant in caller.chunk().leases] == ["a", "b"]
    first, second = leases(caller)
    release(brain, first)
    assert len(brain.engines[0].slots.live) == 1
    release(brain, second)
    brain.assert_empty()


def test_an_embedding_for_nobody_holds_nothing() -> None:
    brain = Brain()
    caller = brain.ready_part(encode_command(receivers=()))
    assert not caller.chunk().leases
    brain.assert_empty()


def test_f11_one_call_may_name_a_lease_twice() -> None:
    brain = Brain()
    caller = brain.ready_part(encode_command(receivers=("a", "b")))
    first, second = leases(caller)
    answers = brain.scheduler.release([(first, OK), (first, OK), (b"unknown", OK)], brain.now)
    assert [after for _, after in answers] == [LeaseState.RELEASED, LeaseState.RELEASED, None]
    assert answers[1][0] is LeaseState.RELEASED
    assert brain.scheduler.live_lease(second, brain.now).slot.leases == 1


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("release", Reason.LEASE_RELEASED),
        ("expire", Reason.LEASE_EXPIRED),
        ("revoke", Reason.LEASE_REVOKED),
        ("forge", Reason.LEASE_UNKNOWN),
    ],
)
def test_a_dead_lease_reads_nothing_and_says_why(end: str, reason: Reason) -> None:
    brain = Brain()
    lease = leases(brain.ready_part())[0]
    assert brain.scheduler.live_lease(lease, brain.now).slot.nbytes == 128
    match end:
        case "release":
            release(brain, lease)
        case "expire":
            brain.now += 60.0
        case "revoke":
            brain.lose_engine()
        case _:
            lease = bytes(16)
    with pytest.raises(ServiceError) as fault:
        brain.scheduler.live_lease(lease, brain.now)
    assert fault.value.reason is reason


# Corrupt reads.


def test_a_damaged_slot_is_taken_from_its_other_readers() -> None:
    brain = Brain()
    caller = brain.ready_part(encode_command(receivers=("a", "b")))
    first, second = leases(caller)
    release(brain, first, CORRUPT)
    ((engine, query, offset, nbytes),) = brain.hands.verifies
    (slot,) = brain.engines[0].slots.live
    assert (engine, offset, nbytes) == (0, slot.payload_offset, 128)
    brain.scheduler.slot_verified(query, slot.checksum + 1, brain.now)
    assert brain.scheduler.leases.find(second, brain.now) is LeaseState.REVOKED
    brain.assert_empty()


def test_a_slot_that_is_whole_stays_with_its_readers() -> None:
    brain = Brain()
    caller = brain.ready_part(encode_command(receivers=("a", "b")))
    first, second = leases(caller)
    release(brain, first, CORRUPT)
    (slot,) = brain.engines[0].slots.live
    brain.scheduler.slot_verified(brain.hands.verifies[0][1], slot.checksum, brain.now)
    assert brain.scheduler.live_lease(second, brain.now).state is LeaseState.GRANTED


def test_a_damaged_slot_is_taken_from_whoever_still_reads_when_that_is_known() -> None:
    brain = Brain()
    caller = brain.ready_part(encode_command(receivers=("a", "b", "c")))
    first, second, third = leases(caller)
    release(brain, first, CORRUPT)
    release(brain, second)
    (slot,) = brain.engines[0].slots.live
    brain.scheduler.slot_verified(brain.hands.verifies[0][1], slot.checksum + 1, brain.now)
    assert brain.scheduler.leases.find(third, brain.now) is LeaseState.REVOKED
    brain.assert_empty()


def test_f25_a_verdict_on_a_slot_that_is_gone_harms_no_newer_use_of_its_memory() -> None:
    brain = Brain()
    caller = brain.ready_part(encode_command(receivers=("a", "b")))
    first, second = leases(caller)
    release(brain, first, CORRUPT)
    release(brain, second)
    newer = brain.ready_part(encode_command("newer"))
    assert brain.engines[0].slots.live[0].payload_offset == brain.hands.verifies[0][2]
    brain.scheduler.slot_verified(brain.hands.verifies[0][1], 12345, brain.now)
    assert brain.scheduler.live_lease(leases(newer)[0], brain.now).state is LeaseState.GRANTED


def test_f25_a_verdict_of_a_dead_engines_life_harms_nothing() -> None:
    brain = Brain()
    caller = brain.ready_part(encode_command(receivers=("a", "b")))
    release(brain, leases(caller)[0], CORRUPT)
    query = brain.hands.verifies[0][1]
    brain.lose_engine()
    brain.revive_engine()
    newer = brain.ready_part(encode_command("newer"))
    brain.scheduler.slot_verified(query, 12345, brain.now)
    assert brain.scheduler.live_lease(leases(newer)[0], brain.now).state is LeaseState.GRANTED


def test_the_last_reader_of_a_slot_gives_it_back_whatever_it_saw() -> None:
    brain = Brain()
    release(brain, leases(brain.ready_part())[0], CORRUPT)
    assert brain.hands.verifies == []
    brain.assert_empty()


# Ends before READY.


def test_cancel_by_request_and_by_prompt() -> None:
    brain = Brain()
    first = brain.submit(encode_command("r1", parts=(0, 1)))
    second = brain.submit(encode_command("r2", parts=(2,)))
    other = brain.submit(encode_command("r3", prompt_id="q"))
    assert brain.scheduler.cancel(CancelCommand("", "request", "r1"), brain.now) == (1, 2)
    assert brain.scheduler.cancel(CancelCommand("", "request", "r1"), brain.now) == (0, 0)
    assert brain.scheduler.cancel(CancelCommand("", "prompt", "p"), brain.now) == (1, 1)
    assert brain.scheduler.cancel(CancelCommand("somebody", "prompt", "q"), brain.now) == (0, 0)
    assert isinstance(first.ends[1], PartCancelled)
    assert second.completed is not None
    assert other.completed is None
    brain.run_all()
    assert other.completed is not None


def test_cancel_leaves_what_is_ready_and_its_leases() -> None:
    brain = Brain(budget=4, batches_ahead=1)
    caller = brain.submit(encode_command(parts=(0, 1)))
    brain.prepare_all(patches=4)
    brain.finish_batch()
    assert brain.scheduler.cancel(CancelCommand("", "request", "r"), brain.now) == (1, 1)
    assert caller.completed is not None
    assert (caller.completed.ready, caller.completed.cancelled) == (1, 1)
    assert brain.scheduler.live_lease(leases(caller)[0], brain.now).state is LeaseState.GRANTED


def test_f24_one_callers_cancel_does_not_touch_another_request_of_the_same_prompt() -> None:
    brain = Brain()
    brain.submit(encode_command("r1", parts=(0,)))
    other = brain.submit(encode_command("r2", parts=(1,)))
    brain.scheduler.cancel(CancelCommand("", "request", "r1"), brain.now)
    brain.run_all()
    assert other.completed is not None
    assert other.completed.ready == 1


@pytest.mark.parametrize("stage", ["queued", "preparing", "prepared", "encoding"])
def test_f26_the_deadline_ends_a_part_wherever_it_is(stage: str) -> None:
    brain = Brain(workers=0 if stage == "queued" else 1)
    if stage == "prepared":
        brain.lose_engine()
    caller = brain.submit(encode_command(deadline=brain.now + 5.0))
    if stage in {"prepared", "encoding"}:
        brain.prepare_all()
    assert brain.request.parts[0].state == stage
    brain.advance(4.999)
    assert caller.ends == {}
    brain.advance(0.001)
    assert caller.error().reason is Reason.DEADLINE_EXCEEDED
    assert caller.completed is not None
    brain.run_all()
    brain.assert_empty()


def test_f26_a_request_whose_deadline_has_passed_does_not_come_in() -> None:
    brain = Brain()
    assert refusal(brain, encode_command(deadline=brain.now)).reason is Reason.DEADLINE_EXCEEDED
    assert brain.hands.tasks[0] == []
    brain.assert_empty()


def test_f26_no_stage_begins_after_the_deadline_even_if_the_loop_was_late() -> None:
    brain = Brain()
    caller = brain.submit(encode_command(deadline=brain.now + 5.0))
    brain.measure()
    brain.now += 6.0
    brain.finish()
    assert brain.hands.batches[0] == [], "no forward is started"
    assert caller.error().reason is Reason.DEADLINE_EXCEEDED
    brain.assert_empty()


def test_f27_a_storm_of_cancels_leaves_nothing() -> None:
    brain = Brain(max_queued_parts=8)
    for index in range(3000):
        caller = brain.submit(encode_command(f"r{index}", prompt_id=f"p{index % 7}", deadline=brain.now + 1000.0))
        caller.gone = True
        brain.scheduler.abandon(brain.request, brain.now)
        if index % 3 == 0:
            brain.run_all()
    brain.run_all()
    brain.assert_empty()
    assert len(brain.scheduler.timers._heap) <= 2048
    assert len(brain.scheduler.preparation._queue._heap) <= 256


def test_f10_the_lease_of_a_chunk_that_its_caller_was_not_told_of_ends_with_the_call() -> None:
    brain = Brain()
    for receivers, ends in (("",), True), (("lm",), False):
        caller = brain.submit(encode_command(receivers=receivers))
        brain.run_all()
        (lease,) = leases(caller)
        brain.scheduler.abandon(brain.request, brain.now, caller.events)
        brain.scheduler.abandon(brain.request, brain.now, caller.events)
        found = brain.scheduler.leases.find(lease, brain.now)
        # A named receiver hears of its own by its subscription, perhaps later.
        assert (found is LeaseState.REVOKED) == ends
        release(brain, lease)
    brain.assert_empty()


# What is refused.


def test_f02_admission_is_bounded_and_a_refused_request_leaves_no_trace() -> None:
    brain = Brain(max_queued_parts=4, max_queued_bytes=1000)
    brain.submit(encode_command("r1", parts=range(3), file_bytes=100))
    error = refusal(brain, encode_command("r2", prompt_id="q", parts=(0, 1), file_bytes=1))
    assert error.reason is Reason.ADMISSION_FULL
    assert error.retry_after is not None
    assert refusal(brain, encode_command("r2", prompt_id="q", file_bytes=701)).reason is Reason.ADMISSION_FULL
    assert refusal(brain, encode_command("r1", prompt_id="q")).reason is Reason.REQUEST_ID_LIVE
    assert refusal(brain, encode_command("r2", parts=(2,))).reason is Reason.PART_ALREADY_SUBMITTED
    assert (brain.scheduler.admission.parts, brain.scheduler.admission.media_bytes) == (3, 300)
    assert brain.scheduler.requests.prompt("", "q") is None
    brain.run_all()
    brain.submit(encode_command("r2", prompt_id="q", parts=(0, 1), file_bytes=1))


def test_requests_are_refused_until_a_model_is_there_and_when_the_server_stops() -> None:
    brain = Brain(started=False)
    assert refusal(brain, encode_command()).reason is Reason.NOT_READY
    brain.revive_engine()
    brain.submit(encode_command())
    brain.scheduler.draining = True
    assert refusal(brain, encode_command("r2")).reason is Reason.SHUTTING_DOWN


def test_receivers_of_other_weights_are_refused() -> None:
    brain = Brain()
    command = replace(encode_command(), expected_fingerprint=b"\x08" * 32)
    assert refusal(brain, command).reason is Reason.FINGERPRINT_MISMATCH
    brain.submit(replace(command, expected_fingerprint=b"\x07" * 32))


def test_a_modality_without_a_tower_is_refused() -> None:
    brain = Brain()
    item = ItemCommand(MediaItem(part_idx=1, modality=Modality.MODALITY_AUDIO), (b"x",))
    command = encode_command()
    error = refusal(brain, replace(command, items=(*command.items, item)))
    assert (error.reason, error.field) == (Reason.MODALITY_UNSUPPORTED, "items[1].modality")


def test_a_prompt_may_take_its_share_of_the_arena_and_no_more() -> None:
    brain = Brain(prompt_bytes=2 * footprint(128))
    caller = brain.submit(encode_command(parts=range(3)))
    brain.prepare_all(nbytes=128)
    assert caller.error(2).reason is Reason.PROMPT_TOO_LARGE
    brain.run_all()
    assert caller.completed is not None
    assert caller.completed.ready == 2


def test_a_part_that_is_asked_for_again_counts_once_in_its_prompts_share() -> None:
    brain = Brain(prompt_bytes=2 * footprint(128))
    first = brain.submit(encode_command("first", parts=(0, 1)))
    brain.measure(nbytes=128)
    brain.finish()
    brain.finish_batch()  # part 0 is READY, and part 1 keeps the prompt alive
    again = brain.submit(encode_command("again", parts=(0,)))
    brain.prepare_all(nbytes=128)
    brain.run_all()
    assert [first.chunk(0).nbytes, first.chunk(1).nbytes, again.chunk(0).nbytes] == [128] * 3


def test_a_part_that_is_asked_for_again_in_vain_leaves_what_its_prompt_was_charged() -> None:
    brain = Brain(prompt_bytes=2 * footprint(128))
    first = brain.submit(encode_command("first", parts=(0, 1)))
    brain.measure(nbytes=128)
    brain.finish()
    brain.finish_batch()
    brain.submit(encode_command("again", parts=(0,)))
    brain.scheduler.cancel(CancelCommand("", "request", "again"), brain.now)
    brain.prepare_all(nbytes=128 + 64)
    assert first.error(1).reason is Reason.PROMPT_TOO_LARGE


def test_parts_that_failed_or_were_cancelled_are_not_held_against_their_prompt() -> None:
    brain = Brain(prompt_bytes=2 * footprint(128))
    brain.submit(encode_command("keeps the prompt alive", parts=(9,)))
    brain.hands.tasks[0].pop()
    for index in range(5):
        caller = brain.submit(encode_command(f"r{index}", parts=(0,)))
        brain.measure(nbytes=128)
        brain.scheduler.cancel(CancelCommand("", "request", f"r{index}"), brain.now)
        brain.finish()
        assert isinstance(caller.ends[0], PartCancelled)
    caller = brain.submit(encode_command("last", parts=(0,)))
    brain.prepare_all(nbytes=128)
    brain.run_all()
    assert caller.chunk().nbytes == 128


# Fairness.


def test_f38_one_image_does_not_wait_for_64_of_another_prompt() -> None:
    brain = Brain(max_queued_parts=128, budget=4, batches_ahead=1, arena_bytes=1 << 20, prompt_bytes=1 << 20)
    brain.submit(encode_command("many", prompt_id="many", parts=range(64), num_parts=64))
    single = brain.submit(encode_command("one", prompt_id="one"))
    batches = 0
    while single.completed is None:
        brain.prepare_all(patches=4, input_bytes=64)
        brain.finish_batch()
        batches += 1
    assert batches <= 4


def test_larger_priorities_go_first() -> None:
    brain = Brain()
    brain.submit(encode_command("r0", prompt_id="p0", parts=(0, 1)))
    brain.submit(encode_command("low", prompt_id="low", priority=-1))
    (low,) = brain.keys
    brain.submit(encode_command("high", prompt_id="high", priority=1))
    (high,) = brain.keys
    brain.measure()
    brain.finish()
    brain.measure()
    brain.finish()
    assert brain.hands.parts_at(0) == [high, low]


# Media that are not at hand.


class SlowHands(RecordingHands):
    """Hashing takes a while, and is reported before ``bring`` returns, as for a small file."""

    def __init__(self) -> None:
        super().__init__()
        self.brain: Brain | None = None
        self.seconds = 0.0

    def bring(self, part: int, item: MediaItem, files: tuple[bytes, ...]) -> None:
        assert self.brain is not None
        self.brain.now += self.seconds
        self.brain.scheduler.sourced(part, files, digest_of(part), 0.0, self.brain.now)


def slow_brain(seconds: float) -> Brain:
    """A brain with such hands."""
    hands = SlowHands()
    hands.brain, hands.seconds = Brain(hands=hands), seconds
    return hands.brain


def unhashed(command: EncodeCommand, *parts: int) -> EncodeCommand:
    """The same, with some items still to be hashed."""
    return replace(
        command,
        items=tuple(replace(item, digest=None) if index in parts else item for index, item in enumerate(command.items)),
    )


def test_small_media_are_under_way_when_submit_returns() -> None:
    brain = slow_brain(0.0)
    caller = brain.submit(unhashed(encode_command(parts=(0, 1)), 0, 1))
    assert len(brain.hands.tasks[0]) == 2
    brain.run_all()
    assert caller.completed is not None
    assert caller.completed.ready == 2


def test_f26_a_deadline_that_passes_while_the_first_item_is_hashed_ends_all_of_them() -> None:
    brain = slow_brain(10.0)
    command = encode_command(parts=(0, 1, 2), deadline=brain.now + 5.0)
    caller = brain.submit(unhashed(command, 0, 2))
    assert [caller.error(part).reason for part in range(3)] == [Reason.DEADLINE_EXCEEDED] * 3
    assert len(brain.scheduler.store) == 0, "nobody begins what nobody waits for"
    assert brain.hands.tasks[0] == []
    brain.assert_empty()


@pytest.mark.parametrize("end", ["cancel", "abandon", "deadline"])
def test_a_part_that_ends_is_brought_no_more(end: str) -> None:
    brain = Brain()
    command = unhashed(encode_command(deadline=brain.now + 5.0), 0)
    caller = brain.submit(command)
    (key,) = brain.hands.sources
    assert brain.request.parts[0].state is PartState.FETCHING
    match end:
        case "cancel":
            brain.scheduler.cancel(CancelCommand("", "request", "r"), brain.now)
        case "abandon":
            brain.scheduler.abandon(brain.request, brain.now)
            caller.gone = True
        case _:
            brain.advance(5.0)
    assert brain.hands.sources == {}
    brain.scheduler.sourced(key, (b"late",), digest_of(1), 1.0, brain.now)
    brain.scheduler.source_failed(key, ServiceError(Reason.FETCH_FAILED, "own words"), brain.now)
    assert brain.hands.tasks[0] == []
    brain.assert_empty()


def test_media_that_cannot_be_had_fail_their_part_alone() -> None:
    brain = Brain()
    caller = brain.submit(unhashed(encode_command(parts=(0, 1)), 0))
    fault = ServiceError(Reason.FETCH_REFUSED, "own words")
    brain.scheduler.source_failed(next(iter(brain.hands.sources)), fault, brain.now)
    brain.hands.sources.clear()
    assert caller.error(0) is fault
    brain.run_all()
    assert caller.chunk(1).nbytes == 128


def test_fetched_media_are_charged_from_then_on() -> None:
    brain = Brain()
    command = encode_command()
    media = MediaItem(modality=Modality.MODALITY_IMAGE, uri="https://example.com/a.png")
    brain.submit(replace(command, items=(ItemCommand(media, ()),)))
    ((key, (item, files)),) = brain.hands.sources.items()
    brain.hands.sources.clear()
    assert (item.uri, files) == ("https://example.com/a.png", ())
    assert brain.scheduler.admission.media_bytes == 0
    brain.scheduler.sourced(key, (bytes(500),), digest_of(1), 0.5, brain.now)
    assert brain.scheduler.admission.media_bytes == 500
    assert brain.hands.tasks[0][0].files == (bytes(500),)
    brain.measure()
    brain.finish()
    assert brain.scheduler.admission.media_bytes == 0
    brain.run_all()


# What ends a server, and what it tells of itself.


def test_f40_all_that_is_left_at_the_end_fails_and_leases_live_on() -> None:
    brain = Brain()
    read = brain.ready_part(encode_command("read"))
    left = brain.submit(unhashed(encode_command("left", prompt_id="q", parts=range(4)), 3))
    brain.measure()
    brain.finish()
    brain.scheduler.draining = True
    brain.scheduler.fail_all(brain.now)
    assert [left.error(part).reason for part in range(4)] == [Reason.SHUTTING_DOWN] * 4
    assert left.completed is not None
    assert brain.scheduler.live_lease(leases(read)[0], brain.now).state is LeaseState.GRANTED
    assert brain.hands.sources == {}
    brain.run_all()
    release(brain, leases(read)[0])
    brain.assert_empty()


def test_load_is_what_waits_and_how_busy_the_engines_were_and_never_0() -> None:
    brain = Brain(engines=2, budget=16, batches_ahead=2)
    assert 0 < brain.scheduler.load(brain.now).utilization <= 0.001
    brain.submit(encode_command(parts=range(4)))
    estimate = 4 * 1024
    assert brain.scheduler.load(brain.now).utilization == pytest.approx(estimate / 64)
    brain.prepare_all(patches=4)
    assert brain.scheduler.load(brain.now).utilization == pytest.approx(16 / 64)
    brain.now += 5.0
    brain.run_all()
    load = brain.scheduler.load(brain.now)
    assert load.utilization == pytest.approx(1 - math.exp(-1)), "it has nothing to do, but has been busy"
    assert load.parts_per_second > 0
    brain.now += 1e6
    assert 0 < brain.scheduler.load(brain.now).utilization <= 0.001


def test_f06_a_request_that_the_scheduler_stumbles_over_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    brain = Brain()
    begin = brain.scheduler.store.begin

    def stumbles_over_the_second(item: MediaItem, *arguments: Any) -> Computation:
        if item.part_idx:
            raise ZeroDivisionError
        return begin(item, *arguments)

    monkeypatch.setattr(brain.scheduler.store, "begin", stumbles_over_the_second)
    with pytest.raises(ZeroDivisionError):
        brain.submit(encode_command(parts=range(3)))
    brain.run_all()
    brain.assert_empty()


def test_what_is_counted_is_what_happened() -> None:
    brain = Brain()
    brain.submit(encode_command("r1", prompt_id="p1", content=1))
    brain.submit(encode_command("r2", prompt_id="p2", content=1))
    brain.run_all()
    brain.submit(encode_command("r3", prompt_id="p3", content=1))
    assert (brain.observer.admitted, brain.observer.refused) == (3, [])
    assert brain.observer.ended == [(PartState.READY, None)] * 3
    assert brain.observer.looked_up == ["miss", "joined", "hit"]
    assert brain.observer.batches == [(1, 4)]
    assert brain.observer.stages == ["queue", "prepare", "batch_wait"]
