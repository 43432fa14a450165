"""Equal content: made once for all who want it, kept, found again, and never confused with another."""

from __future__ import annotations

from dataclasses import replace

import pytest

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.commands import AcquireCommand, CancelCommand, EncodeCommand, ItemCommand
from encoder_svc.runtime.content_names import name_content
from encoder_svc.runtime.events import ChunkEvent, PartCancelled
from encoder_svc.runtime.leases import LeaseState
from encoder_svc.runtime.parts import PartState
from encoder_svc.runtime.slots import ContentName, SlotState
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2 import CachePolicy, ReadOutcome
from epd.encoder.v1.media_pb2 import ImageDetail, ImageOptions, MediaItem, Modality
from epd.internal.v1.engine_pb2 import EngineReady
from tests.runtime.recording_hands import (
    ENGINE_READY,
    NAMESPACE,
    Brain,
    Caller,
    digest_of,
    encode_command,
    layout,
    model_input,
)

OK, CORRUPT = ReadOutcome.READ_OUTCOME_OK, ReadOutcome.READ_OUTCOME_CORRUPT
USE = CachePolicy.CACHE_POLICY_USE
REFRESH = CachePolicy.CACHE_POLICY_REFRESH
BYPASS = CachePolicy.CACHE_POLICY_BYPASS
STAGES = ["queued", "preparing", "measured", "prepared", "encoding"]


def asks(number: int, *, content: int = 1, policy: CachePolicy = USE, **wishes: object) -> EncodeCommand:
    """A request of a prompt of its own for one content."""
    given = {"prompt_id": f"p{number}", **wishes}
    return encode_command(f"r{number}", content=content, policy=policy, **given)  # type: ignore[arg-type] # as named


def by_key(key: bytes, number: int, **wishes: object) -> EncodeCommand:
    """A request for a content by its key."""
    command = asks(number, **wishes)  # type: ignore[arg-type] # as named
    media = MediaItem(modality=Modality.MODALITY_IMAGE, content_key=key)
    return replace(command, items=(ItemCommand(media, ()),))


def key_of(content: int, salt: bytes = b"") -> bytes:
    """The published key of a content."""
    item = MediaItem(modality=Modality.MODALITY_IMAGE)
    return name_content("", NAMESPACE, salt, item, digest_of(content)).content_key


def bring_to(brain: Brain, stage: str) -> None:
    """Brings the only computation to a stage; nothing else is there."""
    if stage == "queued":
        return
    if stage != "preparing":
        brain.measure()
    if stage in {"prepared", "encoding"}:
        brain.finish()
    if stage == "encoding":
        brain.start_batch()


def brain_for(stage: str) -> Brain:
    """A brain in which a computation can stay at a stage."""
    brain = Brain(workers=0 if stage == "queued" else 1)
    if stage == "prepared":
        brain.lose_engine()
    return brain


def finish(brain: Brain, stage: str) -> None:
    """The computation goes all the way."""
    if stage == "queued":
        brain.scheduler.media_worker_ready(0, brain.now)
    if stage == "prepared":
        brain.revive_engine()
    brain.run_all()


def release_all(brain: Brain, *callers: Caller) -> None:
    """Everything that was READY has been read."""
    for caller in callers:
        for end in caller.ends.values():
            if isinstance(end, ChunkEvent):
                brain.scheduler.release([(grant.lease_id, OK) for grant in end.chunk.leases], brain.now)


def cached(brain: Brain) -> list[int]:
    """The sizes of the slots that are kept for nobody."""
    return [slot.nbytes for engine in brain.engines for slot in engine.slots.live if not slot.leases]


def acquire(brain: Brain, key: bytes, *receivers: str, identity: str = "", ttl: float | None = None) -> EmbeddingChunk:
    """An ``Acquire`` call."""
    return brain.scheduler.acquire(AcquireCommand(identity, key, receivers, "p", 3, 9, ttl), brain.now)


# Single flight.


@pytest.mark.parametrize("stage", STAGES)
def test_equal_content_in_flight_is_made_once(stage: str) -> None:
    brain = brain_for(stage)
    first = brain.submit(asks(1))
    bring_to(brain, stage)
    second = brain.submit(asks(2, receivers=("a", "b"), lease_ttl=5.0))
    assert len(brain.scheduler.store) == 1
    assert brain.request.parts[0].state is PartState(stage if stage != "measured" else "preparing")
    assert second.laid_out == ({0} if stage in {"measured", "prepared", "encoding"} else set())
    finish(brain, stage)
    one, other = first.chunk(), second.chunk()
    assert (one.slot_key, one.generation, one.checksum) == (other.slot_key, other.generation, other.checksum)
    assert (one.prompt_id, other.prompt_id) == ("p1", "p2")
    assert (one.request_id, other.request_id) == ("r1", "r2")
    assert [grant.receiver_id for grant in one.leases] == [""]
    assert [grant.receiver_id for grant in other.leases] == ["a", "b"]
    assert {grant.ttl.seconds for grant in other.leases} == {5}
    assert (one.from_cache, other.from_cache) == (False, False)
    assert second.laid_out == {0}
    assert brain.observer.looked_up == ["miss", "joined"]
    assert len(brain.observer.batches) == 1
    release_all(brain, first, second)
    assert cached(brain) == [128]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("gone", ["first", "second"])
def test_f24_the_cancel_of_one_does_not_hurt_the_others(stage: str, gone: str) -> None:
    brain = brain_for(stage)
    callers = {"first": brain.submit(asks(1))}
    bring_to(brain, stage)
    callers["second"] = brain.submit(asks(2))
    left = callers.pop(gone)
    number = 1 if gone == "first" else 2
    assert brain.scheduler.cancel(CancelCommand("", "request", f"r{number}"), brain.now) == (1, 1)
    assert isinstance(left.ends[0], PartCancelled)
    (other,) = callers.values()
    assert other.ends == {}
    assert brain.hands.dropped == []
    finish(brain, stage)
    assert other.chunk().nbytes == 128
    assert len(brain.observer.batches) == 1
    release_all(brain, other)
    brain.scheduler.encoding.engines[0].slots.forget_all()
    brain.assert_empty()


@pytest.mark.parametrize("stage", STAGES)
def test_f24_the_cancel_of_the_last_one_abandons_the_computation(stage: str) -> None:
    brain = brain_for(stage)
    brain.submit(asks(1))
    bring_to(brain, stage)
    brain.submit(asks(2))
    for number in (1, 2):
        brain.scheduler.cancel(CancelCommand("", "request", f"r{number}"), brain.now)
    assert len(brain.scheduler.store) == 0
    third = brain.submit(asks(3))
    assert brain.observer.looked_up == ["miss", "joined", "miss"], "nobody joins what is given up"
    finish(brain, stage)
    assert third.chunk().nbytes == 128
    release_all(brain, third)
    brain.engines[0].slots.forget_all()
    brain.assert_empty()


def test_f24_the_deadline_of_one_does_not_hurt_the_others() -> None:
    brain = Brain()
    hurried = brain.submit(asks(1, deadline=brain.now + 5.0))
    patient = brain.submit(asks(2, deadline=brain.now + 50.0))
    brain.measure()
    brain.advance(6.0)
    assert hurried.error().reason is Reason.DEADLINE_EXCEEDED
    assert patient.ends == {}
    brain.run_all()
    assert patient.chunk().nbytes == 128


def test_a_failed_computation_fails_all_who_wait_for_it_and_the_next_one_tries_again() -> None:
    brain = Brain()
    callers = [brain.submit(asks(number)) for number in range(3)]
    task = brain.hands.tasks[0].pop(0)
    fault = ServiceError(Reason.MEDIA_CORRUPT, "own words")
    brain.scheduler.item_failed(0, task.part, fault, brain.now)
    assert [caller.error() for caller in callers] == [fault] * 3
    brain.assert_empty()
    again = brain.submit(asks(9))
    brain.run_all()
    assert again.chunk().nbytes == 128


@pytest.mark.parametrize("reason", [Reason.OUTPUT_NOT_FINITE, Reason.FORWARD_FAILED, Reason.OUT_OF_MEMORY])
def test_f37_what_failed_is_not_kept(reason: Reason) -> None:
    brain = Brain()
    callers = [brain.submit(asks(number)) for number in range(2)]
    brain.prepare_all()
    brain.finish_batch(reasons=dict.fromkeys(brain.keys, reason))
    assert [caller.error().reason for caller in callers] == [reason] * 2
    brain.assert_empty()
    with pytest.raises(ServiceError) as fault:
        acquire(brain, key_of(1))
    assert fault.value.reason is Reason.CONTENT_UNKNOWN


def test_parts_of_one_request_share_what_they_have_in_common() -> None:
    brain = Brain()
    command = asks(1, parts=(0, 1, 2))
    digests = [digest_of(7), digest_of(8), digest_of(7)]
    items = tuple(replace(item, digest=digest) for item, digest in zip(command.items, digests, strict=True))
    caller = brain.submit(replace(command, items=items))
    assert len(brain.scheduler.store) == 2
    brain.run_all()
    assert caller.completed is not None
    assert caller.completed.ready == 3
    assert caller.chunk(0).slot_key == caller.chunk(2).slot_key != caller.chunk(1).slot_key


def test_a_joiner_is_charged_for_its_media_only_while_they_are_needed() -> None:
    brain = Brain()
    brain.submit(asks(1, file_bytes=50))
    brain.submit(asks(2, file_bytes=50))
    assert brain.scheduler.admission.media_bytes == 100
    brain.measure()
    brain.finish()
    assert brain.scheduler.admission.media_bytes == 0
    brain.submit(asks(3, file_bytes=50))
    assert brain.scheduler.admission.media_bytes == 0
    brain.run_all()


def test_a_joiner_whose_prompt_has_no_room_fails_alone() -> None:
    brain = Brain(prompt_bytes=500)
    first = brain.submit(asks(1, content=1))
    big = brain.submit(asks(2, content=2, parts=(0,)))
    brain.measure()
    brain.finish()
    brain.measure(nbytes=300)
    joiner = brain.submit(encode_command("r3", prompt_id="p1", parts=(1,), content=2, policy=USE))
    assert joiner.error(1).reason is Reason.PROMPT_TOO_LARGE
    brain.run_all()
    assert first.chunk().nbytes == 128
    assert big.chunk().nbytes == 300


def test_a_worker_that_dies_after_measuring_charges_nobody_twice() -> None:
    brain = Brain(prompt_bytes=192 + 64)
    blocker = brain.submit(asks(0, content=0))
    caller = brain.submit(asks(1))
    brain.hands.tasks[0][1].measured = True
    brain.measure(nbytes=64)
    key = brain.keys[0]
    brain.scheduler.item_measured(0, key, layout(128), [model_input()], brain.now)
    joiner = brain.submit(asks(2))
    charged = brain.request.prompt.slot_bytes
    brain.lose_worker()
    assert blocker.error().reason is Reason.MEDIA_WORKER_LOST
    brain.scheduler.media_worker_ready(0, brain.now)
    brain.run_all()
    assert caller.chunk().nbytes == joiner.chunk().nbytes == 128
    assert brain.request.prompt.slot_bytes == charged == 192


# Hits.


def test_a_hit_is_answered_at_once_and_by_no_hand() -> None:
    brain = Brain()
    release_all(brain, brain.ready_part(asks(1)))
    brain.advance(1.0)
    caller = brain.submit(asks(2, receivers=("a", "b"), lease_ttl=7.0))
    assert brain.hands.tasks[0] == []
    assert brain.hands.batches[0] == []
    chunk = caller.chunk()
    assert chunk.from_cache
    assert caller.laid_out == set()
    assert [grant.ttl.seconds for grant in chunk.leases] == [7, 7]
    assert (chunk.prompt_id, chunk.request_id, chunk.num_parts) == ("p2", "r2", 16)
    assert chunk.content_key == key_of(1)
    assert caller.completed is not None
    assert (caller.completed.ready, caller.completed.from_cache) == (1, 1)
    assert brain.observer.looked_up == ["miss", "hit"]
    assert brain.engines[0].slots.cached_bytes == 0
    release_all(brain, caller)
    assert brain.engines[0].slots.cached_bytes == 128


def test_a_hit_that_is_still_leased_is_shared() -> None:
    brain = Brain()
    first = brain.ready_part(asks(1))
    second = brain.submit(asks(2))
    (slot,) = brain.engines[0].slots.live
    assert slot.leases == 2
    release_all(brain, first)
    assert slot.state is SlotState.FILLED
    release_all(brain, second)
    assert cached(brain) == [128]


def test_a_hit_needs_no_engine_that_is_free_nor_a_worker() -> None:
    brain = Brain(engines=2)
    release_all(brain, brain.ready_part(asks(1)))
    brain.lose_worker()
    brain.lose_engine(1)
    assert brain.submit(asks(2)).chunk().from_cache


def test_a_hit_counts_for_its_prompt() -> None:
    brain = Brain(prompt_bytes=192)
    release_all(brain, brain.ready_part(asks(1)))
    blocked = brain.submit(encode_command("r", prompt_id="p", parts=(0, 1), content=1, policy=USE))
    assert blocked.chunk(0).from_cache
    brain.measure(nbytes=128)
    assert blocked.error(1).reason is Reason.PROMPT_TOO_LARGE
    brain.finish()
    over = brain.submit(asks(3))
    assert over.chunk().from_cache
    again = brain.submit(encode_command("r4", prompt_id="p3", parts=(1,), content=1, policy=USE))
    assert again.chunk(1).from_cache, "the prompt had ended, so it begins anew"


def test_refresh_makes_it_again_and_replaces_what_was_there() -> None:
    brain = Brain()
    old = brain.ready_part(asks(1))
    new = brain.ready_part(asks(2, policy=REFRESH))
    assert not new.chunk().from_cache
    assert new.chunk().generation != old.chunk().generation
    hit = brain.submit(asks(3))
    assert hit.chunk().generation == new.chunk().generation
    assert len(brain.engines[0].slots.live) == 2, "the old one is still read"
    release_all(brain, old)
    assert [slot.generation for slot in brain.engines[0].slots.live] == [new.chunk().generation]
    release_all(brain, new, hit)
    assert cached(brain) == [128]


def test_refresh_replaces_what_another_engine_holds() -> None:
    brain = Brain(engines=2)
    release_all(brain, brain.ready_part(asks(1)))
    assert [len(engine.slots.live) for engine in brain.engines] == [1, 0]
    brain.submit(asks(0, content=9))
    brain.prepare_all()
    new = brain.submit(asks(2, policy=REFRESH))
    brain.prepare_all()
    brain.finish_batch(1)
    assert new.chunk().nbytes == 128
    assert [slot for slot in brain.engines[0].slots.live if slot.state is SlotState.FILLED] == []
    assert brain.submit(asks(3)).chunk().generation == new.chunk().generation


@pytest.mark.parametrize("refreshed_first", [False, True])
def test_f25_what_was_refreshed_stays_whichever_computation_ends_first(refreshed_first: bool) -> None:
    brain = Brain(engines=2)
    older = brain.submit(asks(1))
    brain.prepare_all()
    refreshed = brain.submit(asks(2, policy=REFRESH))
    joined = brain.submit(asks(3))
    brain.prepare_all()
    for engine in (1, 0) if refreshed_first else (0, 1):
        brain.finish_batch(engine)
    assert older.chunk().slot_key != refreshed.chunk().slot_key == joined.chunk().slot_key
    assert (older.chunk().content_key, refreshed.chunk().content_key) == (b"", key_of(1))
    assert brain.submit(asks(4)).chunk().slot_key == refreshed.chunk().slot_key
    release_all(brain, older)
    assert brain.engines[0].slots.live == ()


def test_bypass_neither_looks_nor_keeps_nor_joins() -> None:
    brain = Brain()
    release_all(brain, brain.ready_part(asks(1)))
    looked_up = list(brain.observer.looked_up)
    first, second = (replace(asks(number), cache_policy=BYPASS) for number in (2, 3))
    callers = [brain.submit(first), brain.submit(second)]
    assert len(brain.scheduler.store) == 2
    brain.run_all()
    assert brain.observer.looked_up == looked_up
    assert [caller.chunk().from_cache for caller in callers] == [False, False]
    assert [caller.chunk().content_key for caller in callers] == [b"", b""]
    release_all(brain, *callers)
    assert cached(brain) == [128]


@pytest.mark.parametrize(
    "other",
    [
        {"content": 2},
        {"salt": b"salt"},
        {"identity": "them"},
        {"options": ImageOptions(max_pixels=1000)},
        {"options": ImageOptions(detail=ImageDetail.IMAGE_DETAIL_LOW)},
    ],
    ids=["media", "salt", "identity", "pixels", "detail"],
)
@pytest.mark.parametrize("when", ["in flight", "cached"])
def test_f23_what_differs_in_anything_that_matters_is_never_mixed_up(other: dict[str, object], when: str) -> None:
    brain = Brain()
    one = brain.submit(asks(1))
    if when == "cached":
        brain.run_all()
        release_all(brain, one)
    options = other.get("options")
    command = asks(2, **{"content": 1, **other}) if options is None else asks(2)  # type: ignore[arg-type] # as named
    if options is not None:
        media = MediaItem(modality=Modality.MODALITY_IMAGE, image=options)  # type: ignore[arg-type] # ImageOptions
        command = replace(command, items=(replace(command.items[0], item=media),))
    another = brain.submit(command)
    brain.run_all()
    assert not another.chunk().from_cache
    assert another.chunk().slot_key != one.chunk().slot_key
    assert (another.chunk().content_key == one.chunk().content_key) == ("identity" in other)
    assert brain.observer.looked_up == ["miss", "miss"]


def test_f23_modalities_have_keys_of_their_own() -> None:
    names = {
        name_content("", NAMESPACE, b"", MediaItem(modality=modality), digest_of(1))
        for modality in (Modality.MODALITY_IMAGE, Modality.MODALITY_VIDEO, Modality.MODALITY_AUDIO)
    }
    assert len(names) == 3
    assert all(len(name.content_key) == 32 for name in names)


def test_f23_a_name_is_told_apart_whatever_is_in_its_parts() -> None:
    assert ContentName("a", b"b") != ContentName("ab", b"")
    assert name_content("", NAMESPACE, b"x", MediaItem(), digest_of(1)) != name_content(
        "", b"\x09" * 32, b"x", MediaItem(), digest_of(1)
    )


def test_media_whose_digest_is_not_the_promised_one_are_not_encoded() -> None:
    brain = Brain()
    command = asks(1)
    command.items[0].item.content_sha256 = digest_of(2)
    caller = brain.submit(command)
    assert caller.error().reason is Reason.MEDIA_DIGEST_MISMATCH
    assert brain.hands.tasks[0] == []
    brain.assert_empty()


# Content keys, Acquire, and prewarming.


def test_a_content_key_is_a_source_of_what_is_here() -> None:
    brain = Brain()
    release_all(brain, brain.ready_part(asks(1)))
    assert brain.submit(by_key(key_of(1), 2)).chunk().from_cache
    assert brain.submit(by_key(key_of(2), 3)).error().reason is Reason.CONTENT_UNKNOWN
    assert brain.submit(by_key(key_of(1), 4, identity="them")).error().reason is Reason.CONTENT_UNKNOWN
    assert brain.hands.sources == {}


@pytest.mark.parametrize("stage", STAGES)
def test_a_content_key_joins_what_is_in_the_making(stage: str) -> None:
    brain = brain_for(stage)
    first = brain.submit(asks(1))
    bring_to(brain, stage)
    second = brain.submit(by_key(key_of(1), 2))
    brain.scheduler.cancel(CancelCommand("", "request", "r1"), brain.now)
    assert isinstance(first.ends[0], PartCancelled)
    finish(brain, stage)
    assert not second.chunk().from_cache
    assert second.laid_out == {0}


def test_cache_only_prewarms_and_is_held_by_nobody() -> None:
    brain = Brain()
    prewarmed = brain.ready_part(asks(1, receivers=()))
    assert not prewarmed.chunk().leases
    assert not prewarmed.chunk().locators
    assert prewarmed.chunk().content_key == key_of(1)
    assert len(brain.scheduler.leases) == 0
    assert cached(brain) == [128]
    assert brain.engines[0].slots.cached_bytes == 128
    again = brain.submit(asks(2, receivers=()))
    assert again.chunk().from_cache
    assert cached(brain) == [128]
    assert brain.submit(asks(3)).chunk().from_cache


def test_cache_only_and_a_reader_share_a_computation() -> None:
    brain = Brain()
    prewarming = brain.submit(asks(1, receivers=()))
    reading = brain.submit(asks(2))
    brain.run_all()
    assert len(prewarming.chunk().leases) == 0
    assert len(reading.chunk().leases) == 1
    release_all(brain, reading)
    assert cached(brain) == [128]


def test_acquire_leases_what_is_here() -> None:
    brain = Brain()
    first = brain.ready_part(asks(1))
    release_all(brain, first)
    chunk = acquire(brain, key_of(1), "a", "b", ttl=9999.0)
    assert [grant.receiver_id for grant in chunk.leases] == ["a", "b"]
    assert {grant.ttl.seconds for grant in chunk.leases} == {600}
    assert (chunk.prompt_id, chunk.part_idx, chunk.num_parts, chunk.from_cache) == ("p", 3, 9, True)
    assert (chunk.slot_key, chunk.checksum) == (first.chunk().slot_key, first.chunk().checksum)
    for name in ("grid_dim", "token_count", "tensors", "nbytes"):
        assert getattr(chunk, name) == getattr(first.chunk(), name)
    (slot,) = brain.engines[0].slots.live
    assert slot.leases == 2
    brain.advance(600.0)
    assert cached(brain) == [128]


def test_acquire_without_receivers_only_looks() -> None:
    brain = Brain()
    release_all(brain, brain.ready_part(asks(1)))
    chunk = acquire(brain, key_of(1))
    assert not chunk.leases
    assert not chunk.locators
    assert chunk.nbytes == 128
    assert len(brain.scheduler.leases) == 0
    assert cached(brain) == [128]


@pytest.mark.parametrize("case", ["unknown", "another identity", "in the making"])
def test_acquire_never_encodes(case: str) -> None:
    brain = Brain()
    if case == "in the making":
        brain.submit(asks(1))
    elif case == "another identity":
        brain.ready_part(asks(1))
    with pytest.raises(ServiceError) as fault:
        acquire(brain, key_of(1), "a", identity="them" if case == "another identity" else "")
    assert fault.value.reason is Reason.CONTENT_UNKNOWN


# How a kept embedding goes.


def test_f25_what_was_forgotten_takes_no_newer_entry_with_it() -> None:
    brain = Brain()
    old = brain.ready_part(asks(1))
    (old_slot,) = brain.engines[0].slots.live
    new = brain.ready_part(asks(2, policy=REFRESH))
    slots = brain.engines[0].slots
    slots.forget(old_slot)
    release_all(brain, old)
    slots.forget(old_slot)
    assert brain.submit(asks(3)).chunk().generation == new.chunk().generation


def test_f25_a_computation_that_ends_late_takes_no_newer_one_from_the_store() -> None:
    """An older computation of the same content is over after a newer one has begun: others still join the newer."""
    brain = Brain()
    brain.submit(asks(1))
    newer = brain.submit(asks(2, policy=REFRESH))
    assert len(brain.scheduler.store) == 2
    brain.scheduler.cancel(CancelCommand("", "request", "r1"), brain.now)
    joined = brain.submit(asks(3))
    assert len(brain.scheduler.store) == 1
    brain.run_all()
    assert joined.chunk().slot_key == newer.chunk().slot_key


def test_the_loss_of_an_engine_forgets_what_it_kept_and_nothing_else() -> None:
    brain = Brain(engines=2)
    release_all(brain, brain.ready_part(asks(1)))
    brain.submit(asks(0, content=9))
    brain.prepare_all()
    brain.submit(asks(2, content=2))
    brain.prepare_all()
    brain.finish_batch(1)
    brain.finish_batch(0)
    assert [len(engine.slots.live) for engine in brain.engines] == [2, 1]
    brain.lose_engine(0)
    assert brain.engines[0].slots.live == ()
    assert brain.submit(asks(3, content=2)).chunk().from_cache
    assert brain.submit(by_key(key_of(1), 4)).error().reason is Reason.CONTENT_UNKNOWN


@pytest.mark.parametrize("others", [0, 1])
def test_a_damaged_slot_is_found_no_more(others: int) -> None:
    brain = Brain()
    caller = brain.ready_part(asks(1, receivers=("a", "b")[: 1 + others]))
    leases = [grant.lease_id for grant in caller.chunk().leases]
    brain.scheduler.release([(leases[0], CORRUPT)], brain.now)
    ((_, query, _, _),) = brain.hands.verifies
    (slot,) = brain.engines[0].slots.live
    brain.scheduler.slot_verified(query, slot.checksum ^ 1, brain.now)
    for lease in leases[1:]:
        assert brain.scheduler.leases.find(lease, brain.now) is LeaseState.REVOKED
    brain.assert_empty()
    assert brain.submit(by_key(key_of(1), 2)).error().reason is Reason.CONTENT_UNKNOWN


def test_a_slot_that_was_doubted_without_reason_is_kept() -> None:
    brain = Brain()
    caller = brain.ready_part(asks(1))
    brain.scheduler.release([(caller.chunk().leases[0].lease_id, CORRUPT)], brain.now)
    ((_, query, _, _),) = brain.hands.verifies
    (slot,) = brain.engines[0].slots.live
    brain.scheduler.slot_verified(query, slot.checksum, brain.now)
    assert brain.submit(asks(2)).chunk().from_cache


def test_space_is_made_of_what_is_kept_and_not_read() -> None:
    brain = Brain(arena_bytes=1024, prompt_bytes=1024)
    callers = [brain.ready_part(asks(number, content=number), nbytes=192) for number in range(4)]
    release_all(brain, callers[0], callers[1], callers[3])
    brain.submit(asks(5, content=0))
    other = brain.ready_part(asks(6, content=6), nbytes=192)
    assert other.chunk().nbytes == 192
    known = [content for content in range(4) if brain.scheduler.store.cached(ContentName("", key_of(content)))]
    assert known == [0, 2, 3], "the one that was used least recently had to go"


def test_a_content_key_of_another_modality_finds_nothing() -> None:
    brain = Brain(started=False)
    both = EngineReady()
    both.CopyFrom(ENGINE_READY)
    both.model.modalities.append(Modality.MODALITY_VIDEO)
    brain.scheduler.engine_ready(0, both, brain.now)
    brain.scheduler.media_worker_ready(0, brain.now)
    release_all(brain, brain.ready_part(asks(1)))
    command = by_key(key_of(1), 2)
    video = MediaItem(modality=Modality.MODALITY_VIDEO, content_key=key_of(1))
    caller = brain.submit(replace(command, items=(ItemCommand(video, ()),)))
    assert caller.error().reason is Reason.CONTENT_UNKNOWN


def test_what_is_acquired_says_its_modality() -> None:
    brain = Brain()
    release_all(brain, brain.ready_part(asks(1)))
    assert acquire(brain, key_of(1), "lm").modality == Modality.MODALITY_IMAGE


def test_f40_a_server_that_stops_grants_nothing_new() -> None:
    brain = Brain()
    release_all(brain, brain.ready_part(asks(1)))
    brain.scheduler.draining = True
    with pytest.raises(ServiceError) as fault:
        acquire(brain, key_of(1), "lm")
    assert fault.value.reason is Reason.SHUTTING_DOWN
    with pytest.raises(ServiceError) as fault:
        brain.scheduler.begin_upload("", 10, brain.now)
    assert fault.value.reason is Reason.SHUTTING_DOWN


def test_f02_fetched_media_are_bounded_like_others() -> None:
    brain = Brain(max_queued_bytes=1000)
    item = MediaItem(modality=Modality.MODALITY_IMAGE, uri="https://host/file")
    callers = [brain.submit(replace(asks(number), items=(ItemCommand(item, ()),))) for number in (1, 2)]
    for part in list(brain.hands.sources):
        brain.scheduler.sourced(part, (bytes(600),), digest_of(part), 0.1, brain.now)
    assert brain.scheduler.admission.media_bytes == 600
    assert callers[1].error().reason is Reason.ADMISSION_FULL
