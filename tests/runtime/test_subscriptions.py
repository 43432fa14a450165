"""Named receivers in a real scheduler: who is told what, when, and for how long."""

from __future__ import annotations

import pytest

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.commands import AcquireCommand, CancelCommand, SubscribeCommand
from encoder_svc.runtime.content_names import name_content
from encoder_svc.runtime.events import ChunkEvent, LeaseRevoked, PartCancelled, PartFailed, SubscriptionEvent, Synced
from encoder_svc.runtime.leases import LeaseState
from encoder_svc.runtime.subscriptions import Subscription
from epd.encoder.v1.embedding_pb2 import CHUNK_STATE_READY, EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2 import READ_OUTCOME_CORRUPT, READ_OUTCOME_OK, CachePolicy
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from tests.runtime.recording_hands import NAMESPACE, Brain, digest_of, encode_command


class Ear:
    """A receiver that takes what it is told when the test says so.

    Args:
        brain: the server.
        name: of the receiver.
        incarnation: which life of it this is.
        identity: whose it is.
    """

    def __init__(self, brain: Brain, name: str = "lm", incarnation: int = 1, identity: str = "") -> None:
        self._brain = brain
        self.woken = 0
        command = SubscribeCommand(identity, name, incarnation)
        self.subscription: Subscription = brain.scheduler.subscribe(command, self._wake, brain.now)

    def _wake(self) -> None:
        self.woken += 1

    def take(self) -> list[SubscriptionEvent]:
        """All that there is."""
        events = []
        while (event := self.subscription.take(self._brain.now)) is not None:
            events.append(event)
        return events

    def told(self) -> list[str]:
        """All that there is, in words."""
        return [word_of(event) for event in self.take()]

    def leave(self) -> None:
        """The connection is lost."""
        self._brain.scheduler.subscriptions.leave(self.subscription)


def word_of(event: SubscriptionEvent) -> str:
    """An event as a word, with its part."""
    match event:
        case ChunkEvent(chunk):
            return f"{'ready' if chunk.state == CHUNK_STATE_READY else 'layout'} {chunk.part_idx}"
        case PartFailed(part_idx=part_idx):
            return f"failed {part_idx}"
        case PartCancelled(part_idx=part_idx):
            return f"cancelled {part_idx}"
        case LeaseRevoked(part_idx=part_idx):
            return f"revoked {part_idx}"
        case Synced():
            return f"synced {event.events}"


def chunk_in(event: SubscriptionEvent) -> EmbeddingChunk:
    """The chunk of an event that has one."""
    assert isinstance(event, ChunkEvent)
    return event.chunk


def release(brain: Brain, chunk: EmbeddingChunk) -> LeaseState | None:
    """Gives the only lease of a chunk back; returns its state now."""
    (grant,) = chunk.leases
    ((_, state),) = brain.scheduler.release([(grant.lease_id, READ_OUTCOME_OK)], brain.now)
    return state


def test_a_receiver_that_listens_is_told_layout_then_ready_with_its_own_lease_alone() -> None:
    brain = Brain()
    ears = {name: Ear(brain, name) for name in ("lm/tp0", "lm/tp1")}
    assert [ear.told() for ear in ears.values()] == [["synced 0"]] * 2
    caller = brain.submit(encode_command(receivers=("lm/tp0", "lm/tp1")))
    brain.measure()
    assert [ear.told() for ear in ears.values()] == [["layout 0"]] * 2
    brain.run_all()
    leases = {grant.receiver_id: grant.lease_id for grant in caller.chunk().leases}
    assert len(set(leases.values())) == 2
    for name, ear in ears.items():
        (event,) = ear.take()
        (grant,) = chunk_in(event).leases
        assert (grant.receiver_id, grant.lease_id) == (name, leases[name])
        assert chunk_in(event).locators == caller.chunk().locators
        assert release(brain, chunk_in(event)) is LeaseState.RELEASED
    assert brain.scheduler.subscriptions.parcels == 0
    brain.assert_empty()


def test_what_was_ready_before_the_receiver_came_is_told_as_ready_alone() -> None:
    brain = Brain()
    brain.ready_part(encode_command(receivers=("lm",)))
    brain.advance(20.0)
    ear = Ear(brain)
    chunk, synced = ear.take()
    assert word_of(chunk) == "ready 0"
    assert chunk_in(chunk).leases[0].ttl.ToSeconds() == 40, "it lives so long from now"
    assert synced == Synced(events=1)


def test_layout_goes_to_receivers_also_if_the_caller_has_no_use_for_it() -> None:
    brain = Brain()
    ear = Ear(brain)
    caller = brain.submit(encode_command(receivers=("lm",), skip_layout=True))
    brain.measure()
    assert ear.told() == ["synced 0", "layout 0"]
    assert caller.laid_out == set()


def test_a_receiver_that_takes_nothing_is_told_the_newest_state_alone() -> None:
    brain = Brain()
    ear = Ear(brain)
    brain.submit(encode_command(receivers=("lm",), parts=(0, 1, 2)))
    brain.run_all()
    brain.submit(encode_command("s", receivers=("lm",), parts=(3,)))
    brain.scheduler.cancel(CancelCommand("", "request", "s"), brain.now)
    assert ear.told() == ["synced 0", "ready 0", "ready 1", "ready 2", "cancelled 3"]


def test_after_a_lost_connection_all_comes_again_that_was_not_released() -> None:
    brain = Brain()
    ear = Ear(brain)
    brain.submit(encode_command(receivers=("lm",), parts=(0, 1)))
    brain.run_all()
    brain.submit(encode_command("s", receivers=("lm",), parts=(2, 3)))
    brain.measure()
    ready = [chunk_in(event) for event in ear.take() if word_of(event).startswith("ready")]
    assert release(brain, ready[0]) is LeaseState.RELEASED
    ear.leave()
    brain.measure()
    again = Ear(brain)
    assert again.told() == ["ready 1", "layout 2", "layout 3", "synced 3"]
    assert release(brain, ready[1]) is LeaseState.RELEASED


def test_failures_cancels_and_revocations_come_again_for_some_time() -> None:
    brain = Brain()
    ear = Ear(brain)
    brain.submit(encode_command(receivers=("lm",), parts=(0, 1, 2)))
    brain.prepare_all()
    reasons = {brain.keys[0]: Reason.FORWARD_FAILED.value}
    while brain.hands.batches[0]:
        brain.finish_batch(reasons=reasons)
    brain.submit(encode_command("s", receivers=("lm",), parts=(3,)))
    brain.scheduler.cancel(CancelCommand("", "request", "s"), brain.now)
    brain.lose_engine()
    expected = ["failed 0", "revoked 1", "revoked 2", "cancelled 3"]
    assert sorted(ear.told()) == sorted(["synced 0", *expected])
    ear.leave()
    assert sorted(Ear(brain).told()) == sorted([*expected, "synced 4"])
    brain.advance(brain.rules.lease_seconds)
    assert Ear(brain).told() == ["synced 0"]
    assert brain.scheduler.subscriptions.parcels == 0


def test_a_lease_that_runs_out_is_told_with_the_reason() -> None:
    brain = Brain()
    ear = Ear(brain)
    brain.ready_part(encode_command(receivers=("lm",), lease_ttl=5.0))
    lease = chunk_in(ear.take()[-1]).leases[0].lease_id
    brain.advance(5.0)
    (event,) = ear.take()
    assert isinstance(event, LeaseRevoked)
    assert (event.lease_id, event.prompt_id, event.request_id, event.part_idx) == (lease, "p", "r", 0)
    assert event.error.reason is Reason.LEASE_EXPIRED
    assert lease.hex() not in repr(event)
    assert str(lease) not in repr(event)


def test_a_damaged_slot_is_told_to_the_other_receivers() -> None:
    brain = Brain()
    ears = [Ear(brain, name) for name in ("a", "b")]
    brain.ready_part(encode_command(receivers=("a", "b")))
    first, second = (chunk_in(ear.take()[-1]) for ear in ears)
    brain.scheduler.release([(first.leases[0].lease_id, READ_OUTCOME_CORRUPT)], brain.now)
    ((_, query, _, _),) = brain.hands.verifies
    brain.scheduler.slot_verified(query, second.checksum.value + 1, brain.now)
    assert ears[0].told() == []
    assert ears[1].told() == ["revoked 0"]
    brain.assert_empty()


def test_when_the_caller_leaves_the_receivers_are_told_of_parts_that_were_not_ready() -> None:
    brain = Brain()
    ear = Ear(brain)
    brain.submit(encode_command(receivers=("lm",), parts=(0, 1)))
    brain.prepare_all()
    brain.scheduler.abandon(brain.request, brain.now)
    assert ear.told() == ["synced 0", "cancelled 0", "cancelled 1"]


def test_what_is_acquired_for_a_receiver_is_told_to_it() -> None:
    brain = Brain()
    ear = Ear(brain)
    brain.ready_part(encode_command(receivers=(), content=1, policy=CachePolicy.CACHE_POLICY_USE))
    name = name_content("", NAMESPACE, b"", MediaItem(modality=Modality.MODALITY_IMAGE), digest_of(1))
    command = AcquireCommand("", name.content_key, ("", "lm"), "p9", 3, 4, None)
    answer = brain.scheduler.acquire(command, brain.now)
    _, event = ear.take()
    chunk = chunk_in(event)
    assert (chunk.prompt_id, chunk.part_idx, chunk.num_parts, chunk.from_cache) == ("p9", 3, 4, True)
    assert [grant.lease_id for grant in chunk.leases] == [answer.leases[1].lease_id]


def test_identities_with_the_same_names_never_meet() -> None:
    brain = Brain()
    mine, theirs = Ear(brain, identity="me"), Ear(brain, identity="them", incarnation=9)
    brain.ready_part(encode_command(receivers=("lm",), identity="me"))
    assert mine.told() == ["synced 0", "ready 0"]
    assert theirs.told() == ["synced 0"]


class TestIncarnations:
    """Lives of one receiver."""

    def test_an_older_one_is_refused(self) -> None:
        brain = Brain()
        ear = Ear(brain, incarnation=5)
        with pytest.raises(ServiceError) as refused:
            Ear(brain, incarnation=4)
        assert refused.value.reason is Reason.SUBSCRIPTION_SUPERSEDED
        ear.leave()
        with pytest.raises(ServiceError):
            Ear(brain, incarnation=4)
        assert Ear(brain, incarnation=5).told() == ["synced 0"]

    def test_an_equal_one_keeps_its_leases_and_ends_the_old_call(self) -> None:
        brain = Brain()
        old = Ear(brain)
        brain.ready_part(encode_command(receivers=("lm",)))
        chunk = chunk_in(old.take()[-1])
        new = Ear(brain)
        with pytest.raises(ServiceError) as ended:
            old.take()
        assert ended.value.reason is Reason.SUBSCRIPTION_SUPERSEDED
        assert old.woken > 0
        old.leave()
        assert new.told() == ["ready 0", "synced 1"], "the old call's end takes nothing from the new one"
        assert release(brain, chunk) is LeaseState.RELEASED

    def test_a_newer_one_takes_over_and_revokes_what_the_old_one_was_told_of(self) -> None:
        brain = Brain()
        old = Ear(brain)
        other = Ear(brain, "other")
        brain.ready_part(encode_command(receivers=("lm", "other")))
        mine, others = chunk_in(old.take()[-1]), chunk_in(other.take()[-1])
        brain.submit(encode_command("s", receivers=("lm",), parts=(1,)))
        new = Ear(brain, incarnation=2)
        assert new.told() == ["synced 0"]
        brain.run_all()
        assert new.told() == ["ready 1"], "what was not ready goes to the receiver that lives"
        assert release(brain, mine) is LeaseState.REVOKED
        assert release(brain, others) is LeaseState.RELEASED

    def test_a_newer_one_gets_what_no_life_was_told_of(self) -> None:
        brain = Brain()
        Ear(brain).leave()
        brain.ready_part(encode_command(receivers=("lm",)))
        assert Ear(brain, incarnation=2).told() == ["ready 0", "synced 1"]

    def test_a_newer_one_does_not_hear_of_the_leases_that_the_old_one_let_run_out(self) -> None:
        brain = Brain()
        old = Ear(brain)
        brain.ready_part(encode_command(receivers=("lm",), lease_ttl=1.0))
        assert old.told()[-1] == "ready 0"
        brain.advance(1.0)
        assert Ear(brain, incarnation=2).told() == ["synced 0"]
        assert brain.scheduler.subscriptions.parcels == 0

    def test_the_first_life_gets_what_was_addressed_before_it(self) -> None:
        brain = Brain()
        brain.ready_part(encode_command(receivers=("lm",)))
        assert Ear(brain, incarnation=77).told() == ["ready 0", "synced 1"]


class TestBounds:
    """F39: what a receiver costs that does not read, or never comes."""

    def test_what_is_addressed_to_nobody_ends_with_its_lease(self) -> None:
        brain = Brain()
        brain.ready_part(encode_command(receivers=("nobody",)))
        assert brain.scheduler.subscriptions.parcels == 1
        brain.advance(brain.rules.lease_seconds)
        brain.assert_empty()
        brain.advance(brain.rules.lease_seconds)
        assert brain.scheduler.subscriptions.parcels == 0

    def test_a_request_that_would_give_a_receiver_too_many_is_refused_as_a_whole(self) -> None:
        brain = Brain(max_receiver_parts=3)
        brain.ready_part(encode_command(receivers=("lm", "other"), parts=(0, 1)))
        with pytest.raises(ServiceError) as refused:
            brain.submit(encode_command("s", receivers=("new", "lm"), parts=(2, 3)))
        assert (refused.value.reason, refused.value.field) == (Reason.RECEIVER_FULL, "receivers")
        assert brain.observer.refused == [Reason.RECEIVER_FULL]
        assert brain.scheduler.subscriptions.parcels == 4
        brain.submit(encode_command("s", receivers=("new",), parts=(2, 3)))

    def test_an_acquire_for_a_receiver_that_has_too_many_is_refused(self) -> None:
        brain = Brain(max_receiver_parts=1)
        brain.ready_part(encode_command(receivers=("lm",), content=1, policy=CachePolicy.CACHE_POLICY_USE))
        name = name_content("", NAMESPACE, b"", MediaItem(modality=Modality.MODALITY_IMAGE), digest_of(1))
        with pytest.raises(ServiceError) as refused:
            brain.scheduler.acquire(AcquireCommand("", name.content_key, ("lm",), "p", 0, 1, None), brain.now)
        assert refused.value.reason is Reason.RECEIVER_FULL
        assert len(brain.scheduler.leases) == 1

    def test_f39_a_receiver_that_does_not_take_its_notices_is_disconnected_with_a_clear_status(self) -> None:
        brain = Brain(max_receiver_parts=4)
        ear = Ear(brain)
        for number in range(6):
            brain.submit(encode_command(f"r{number}", receivers=("lm",)))
            brain.scheduler.cancel(CancelCommand("", "request", f"r{number}"), brain.now)
            assert brain.scheduler.subscriptions.parcels <= 4
        with pytest.raises(ServiceError) as ended:
            ear.take()
        assert ended.value.reason is Reason.SUBSCRIPTION_SLOW
        assert Ear(brain).told() == ["cancelled 0"] * 4 + ["synced 4"]

    def test_notices_that_were_taken_make_room_without_a_word(self) -> None:
        brain = Brain(max_receiver_parts=4)
        ear = Ear(brain)
        for number in range(9):
            brain.submit(encode_command(f"r{number}", receivers=("lm",)))
            brain.scheduler.cancel(CancelCommand("", "request", f"r{number}"), brain.now)
            assert ear.told()[-1] == "cancelled 0"
        assert brain.scheduler.subscriptions.parcels == 4

    def test_receivers_are_bounded_in_number(self) -> None:
        brain = Brain(max_known_receivers=2)
        first, second = Ear(brain, "a"), Ear(brain, "b")
        for attempt in (lambda: Ear(brain, "c"), lambda: brain.submit(encode_command(receivers=("c",)))):
            with pytest.raises(ServiceError) as refused:
                attempt()
            assert refused.value.reason is Reason.RECEIVER_FULL
        first.leave()
        second.leave()
        third = Ear(brain, "c")
        with pytest.raises(ServiceError):
            Ear(brain, "b", incarnation=0)
        assert Ear(brain, "a", incarnation=0).told() == ["synced 0"], "the one that left first was forgotten for it"
        third.leave()


def test_when_the_server_stops_each_receiver_is_told_all_and_then_why_it_ends() -> None:
    brain = Brain()
    ear = Ear(brain)
    brain.ready_part(encode_command(receivers=("lm",)))
    stop = ServiceError(Reason.SHUTTING_DOWN, "the server has stopped")
    brain.scheduler.subscriptions.end(stop)
    events = [ear.subscription.take(brain.now) for _ in range(2)]
    assert [word_of(event) for event in events if event is not None] == ["synced 0", "ready 0"]
    with pytest.raises(ServiceError) as ended:
        ear.take()
    assert ended.value is stop
    with pytest.raises(ServiceError):
        Ear(brain, "late")
