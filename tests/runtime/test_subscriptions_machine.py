"""Named receivers that come, go, stop reading and begin new lives, in any order, around a real scheduler.

Whatever happened: a receiver that reads to the end knows the state of each of its parts; it is told each state once on
a connection, and only of its own leases; what is held for it is bounded; and in the end nothing is.
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.commands import CancelCommand, SubscribeCommand
from encoder_svc.runtime.events import ChunkEvent, LeaseRevoked, PartCancelled, PartFailed, SubscriptionEvent, Synced
from encoder_svc.runtime.leases import Lease
from encoder_svc.runtime.subscriptions import Subscription
from epd.encoder.v1.embedding_pb2 import CHUNK_STATE_READY
from epd.encoder.v1.encoder_service_pb2 import READ_OUTCOME_OK
from tests.runtime.recording_hands import Brain, encode_command

NAMES = ["a", "b", "c"]
IDENTITIES = ["", "them"]
MOST = 6
"""Parts of one receiver."""

Key = tuple[str, str]
"""Identity and name."""
Place = tuple[str, int]
"""Request and part."""


class Line:
    """One connection of a receiver, and what was told on it."""

    def __init__(self, subscription: Subscription) -> None:
        self.subscription = subscription
        self.layouts: set[Place] = set()
        self.leases: set[bytes] = set()
        self.ends: list[Place] = []
        self.synced = False
        self.ended: Reason | None = None

    def take(self, now: float) -> SubscriptionEvent | None:
        """The next event, which must be new on this connection."""
        event = self.subscription.take(now)
        match event:
            case ChunkEvent(chunk) if chunk.state == CHUNK_STATE_READY:
                (grant,) = chunk.leases
                assert grant.receiver_id == self.subscription.receiver.name
                assert grant.ttl.ToNanoseconds() > 0
                assert grant.lease_id not in self.leases
                self.leases.add(grant.lease_id)
            case ChunkEvent(chunk):
                place = (chunk.request_id, chunk.part_idx)
                assert place not in self.layouts
                self.layouts.add(place)
            case PartFailed() | PartCancelled() | LeaseRevoked():
                place = (event.request_id, event.part_idx)
                assert place not in self.ends, "a part ends once"
                self.ends.append(place)
            case Synced():
                assert not self.synced
                self.synced = True
        return event


class ReceiverMachine(RuleBasedStateMachine):
    """Callers, receivers and a clock around one scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.brain = Brain(engines=2, arena_bytes=4096, max_receiver_parts=MOST, max_known_receivers=4)
        self.scheduler = self.brain.scheduler
        self.subscriptions = self.scheduler.subscriptions
        self.lines: dict[Key, Line] = {}
        self.lives: dict[Key, int] = {}
        self.numbers = iter(range(1_000_000))

    @rule(
        identity=st.sampled_from(IDENTITIES),
        receivers=st.lists(st.sampled_from(NAMES), min_size=1, unique=True),
        parts=st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True),
        ttl=st.sampled_from([None, 1.0]),
        skip=st.booleans(),
    )
    def submit(self, identity: str, receivers: list[str], parts: list[int], ttl: float | None, skip: bool) -> None:
        number = next(self.numbers)
        command = encode_command(
            f"r{number}", prompt_id=f"p{number}", parts=parts, receivers=tuple(receivers), lease_ttl=ttl,
            identity=identity, skip_layout=skip,
        )  # fmt: skip
        before = self.subscriptions.parcels
        refused: ServiceError | None = None
        try:
            self.brain.submit(command)
        except ServiceError as error:
            refused = error
        if refused is not None:
            assert refused.reason is Reason.RECEIVER_FULL
            assert self.subscriptions.parcels == before

    @rule(identity=st.sampled_from(IDENTITIES), name=st.sampled_from(NAMES), step=st.sampled_from([-1, 0, 0, 1]))
    def subscribe(self, identity: str, name: str, step: int) -> None:
        key = (identity, name)
        life = max(0, self.lives.get(key, 0) + step)
        refused: ServiceError | None = None
        try:
            subscription = self.scheduler.subscribe(SubscribeCommand(*key, life), lambda: None, self.brain.now)
        except ServiceError as error:
            refused = error
        if refused is not None:
            older = life < self.lives.get(key, 0)
            assert refused.reason is Reason.RECEIVER_FULL or (
                older and refused.reason is Reason.SUBSCRIPTION_SUPERSEDED
            )
            return
        if (old := self.lines.get(key)) is not None:
            self.read_to_end(old)
            assert old.ended in {Reason.SUBSCRIPTION_SUPERSEDED, Reason.SUBSCRIPTION_SLOW}
        self.lines[key], self.lives[key] = Line(subscription), life

    @precondition(lambda self: self.lines)
    @rule(data=st.data())
    def read_one(self, data: st.DataObject) -> None:
        line = self.lines[data.draw(st.sampled_from(sorted(self.lines)))]
        if line.ended is None:
            try:
                line.take(self.brain.now)
            except ServiceError as error:
                line.ended = error.reason

    @precondition(lambda self: self.lines)
    @rule(data=st.data())
    def read_all(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.lines)))
        line = self.lines[key]
        self.read_to_end(line)
        if line.ended is None:
            assert line.synced
            assert {lease.id for lease in self.leases_of(key)} <= line.leases, "it knows all that it may read"

    @precondition(lambda self: self.lines)
    @rule(data=st.data())
    def lose_connection(self, data: st.DataObject) -> None:
        line = self.lines.pop(data.draw(st.sampled_from(sorted(self.lines))))
        self.subscriptions.leave(line.subscription)

    @rule()
    def measure(self) -> None:
        if any(not task.measured for task in self.brain.hands.tasks[0]):
            self.brain.measure()

    @rule(fail=st.booleans())
    def work(self, fail: bool) -> None:
        self.brain.prepare_all()
        for engine in range(2):
            if batches := self.brain.hands.batches[engine]:
                reasons = {batches[0].items[0].part: Reason.FORWARD_FAILED.value} if fail else {}
                self.brain.finish_batch(engine, reasons)

    @rule(engine=st.integers(0, 1))
    def engine_dies(self, engine: int) -> None:
        self.brain.lose_engine(engine)
        self.brain.revive_engine(engine)

    @rule(data=st.data(), how=st.sampled_from(["cancel", "abandon"]))
    def caller_leaves(self, data: st.DataObject, how: str) -> None:
        live = self.scheduler.requests.live()
        if not live:
            return
        request = live[data.draw(st.integers(0, len(live) - 1))]
        if how == "abandon":
            self.scheduler.abandon(request, self.brain.now)
        else:
            command = request.command
            self.scheduler.cancel(CancelCommand(command.identity, "request", command.request_id), self.brain.now)

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        leases = list(self.scheduler.leases._live.values())
        if leases:
            lease = leases[data.draw(st.integers(0, len(leases) - 1))]
            self.scheduler.release([(lease.id, READ_OUTCOME_OK)], self.brain.now)

    @rule(seconds=st.sampled_from([0.5, 2.0, 61.0]))
    def time_passes(self, seconds: float) -> None:
        self.brain.advance(seconds)

    @invariant()
    def what_is_held_is_bounded(self) -> None:
        known = self.subscriptions._receivers
        assert len(known) <= 4
        for receiver in known.values():
            assert len(receiver.parcels) <= MOST
            assert set(receiver.notices) <= set(receiver.parcels)
            if receiver.subscription is not None:
                assert len(receiver.subscription._pending) <= MOST + 1
                assert set(receiver.subscription._pending) - {None} <= set(receiver.parcels)
            else:
                assert receiver.parcels or receiver in self.subscriptions._idle

    @invariant()
    def each_lease_of_a_receiver_is_in_its_parcel(self) -> None:
        receivers = self.subscriptions._receivers.values()
        leases = [parcel.lease for receiver in receivers for parcel in receiver.parcels]
        held = {lease.id for lease in leases if lease is not None}
        assert held == set(self.subscriptions._by_lease)
        assert held == set(self.scheduler.leases._live)

    def read_to_end(self, line: Line) -> None:
        """Takes all that there is."""
        try:
            while line.take(self.brain.now) is not None:
                pass
        except ServiceError as error:
            line.ended = error.reason

    def leases_of(self, key: Key) -> list[Lease]:
        """The live leases of a receiver."""
        parcels = self.subscriptions._by_lease.values()
        return [p.lease for p in parcels if p.lease is not None and (p.receiver.identity, p.receiver.name) == key]

    def teardown(self) -> None:
        """Everything ends, everybody leaves, time passes: then nothing is held."""
        self.scheduler.draining = True
        for request in self.scheduler.requests.live():
            self.scheduler.abandon(request, self.brain.now)
        self.brain.run_all()
        for line in self.lines.values():
            self.read_to_end(line)
            self.subscriptions.leave(line.subscription)
        for _ in range(2):
            self.brain.advance(self.brain.rules.lease_seconds)
        assert self.subscriptions.parcels == 0
        assert not self.subscriptions._by_part
        assert set(self.subscriptions._receivers.values()) == set(self.subscriptions._idle)
        self.brain.assert_empty()


TestReceivers = ReceiverMachine.TestCase
TestReceivers.settings = settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
