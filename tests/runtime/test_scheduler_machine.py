"""The whole scheduler against children and callers that do anything, in any order, at any time.

Whatever happened, everything comes to an end: each part once, each request with one ``Completed``, and nothing is held.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime import slot_header
from encoder_svc.runtime.commands import CancelCommand
from encoder_svc.runtime.events import PartFailed
from encoder_svc.runtime.leases import Lease, LeaseState
from encoder_svc.runtime.parts import PartState
from encoder_svc.runtime.requests import Request
from encoder_svc.runtime.slots import SlotState
from epd.encoder.v1.encoder_service_pb2 import ReadOutcome
from epd.internal.v1.engine_pb2 import BatchDone
from tests.runtime.recording_hands import (
    ENGINE_READY,
    Brain,
    Caller,
    Task,
    encode_command,
    item_result,
    layout,
    model_input,
)

WORKERS = ENGINES = 2
ARENA, INPUT = 4096, 2048
REASONS = [Reason.FORWARD_FAILED, Reason.OUTPUT_NOT_FINITE, Reason.OUT_OF_MEMORY]
REFUSALS = {
    Reason.REQUEST_ID_LIVE,
    Reason.PART_ALREADY_SUBMITTED,
    Reason.ADMISSION_FULL,
    Reason.REQUEST_INVALID,
    Reason.DEADLINE_EXCEEDED,
}
OUTCOMES = [ReadOutcome.READ_OUTCOME_OK, ReadOutcome.READ_OUTCOME_CORRUPT, ReadOutcome.READ_OUTCOME_ABANDONED]

Thing = TypeVar("Thing")


def one_of(data: st.DataObject, things: list[Thing]) -> Thing:
    """One of some things, as the data say."""
    return things[data.draw(st.integers(0, len(things) - 1))]


class SchedulerMachine(RuleBasedStateMachine):
    """Callers, receivers, children and a clock around one scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.brain = Brain(
            workers=0,
            engines=ENGINES,
            arena_bytes=ARENA,
            started=False,
            prompt_bytes=ARENA // 2,
            input_bytes=INPUT,
            max_queued_parts=24,
            max_queued_bytes=2000,
        )
        self.scheduler, self.hands = self.brain.scheduler, self.brain.hands
        self.calls: list[tuple[Request, Caller]] = []
        self.workers: set[int] = set()
        self.engines: set[int] = set()
        self.sizes: dict[int, tuple[int, int, int]] = {}
        self.released: list[bytes] = []
        for index in range(ENGINES):
            self.start_engine(index)
        for index in range(WORKERS):
            self.start_worker(index)

        self.hands.watch = self.is_wanted

    def is_wanted(self, part: int) -> None:
        """Whatever a child is told to do is for a part that somebody still waits for."""
        live = self.scheduler.requests.part(part)
        assert live is not None
        deadline = live.request.command.deadline
        assert deadline is None or deadline > self.brain.now

    # Callers.

    @rule(
        name=st.integers(0, 9),
        prompt=st.integers(0, 3),
        parts=st.lists(st.integers(0, 5), min_size=1, max_size=5, unique=True),
        file_bytes=st.sampled_from([0, 1, 100, 700]),
        priority=st.integers(-1, 1),
        deadline=st.sampled_from([None, None, 0.0, 5.0, 30.0]),
        receivers=st.sampled_from([("",), ("a", "b"), ("a", "b", "c"), ()]),
        skip_layout=st.booleans(),
        ttl=st.sampled_from([None, 1.0, 1000.0]),
    )
    def submit(
        self,
        name: int,
        prompt: int,
        parts: list[int],
        file_bytes: int,
        priority: int,
        deadline: float | None,
        receivers: tuple[str, ...],
        skip_layout: bool,
        ttl: float | None,
    ) -> None:
        command = encode_command(
            f"r{name}",
            prompt_id=f"p{prompt}",
            parts=parts,
            num_parts=6,
            file_bytes=file_bytes,
            priority=priority,
            deadline=None if deadline is None else self.brain.now + deadline,
            receivers=receivers,
            skip_layout=skip_layout,
            lease_ttl=ttl,
        )
        admission = self.scheduler.admission
        before = (len(self.scheduler.requests), admission.parts, admission.media_bytes)
        caller = Caller(command)
        try:
            request = self.scheduler.submit(command, caller, self.brain.now)
        except ServiceError as error:
            refused = error
        else:
            assert len(caller.events) == 1, "Accepted comes before submit returns, everything else later"
            self.calls.append((request, caller))
            return
        assert refused.reason in REFUSALS
        assert caller.events == []
        assert (refused.reason is Reason.ADMISSION_FULL) == (refused.retry_after is not None)
        after = (len(self.scheduler.requests), admission.parts, admission.media_bytes)
        assert after == before, "a refused request leaves no trace"

    @precondition(lambda self: self.live_calls())
    @rule(data=st.data(), what=st.sampled_from(["request", "prompt"]))
    def cancel(self, data: st.DataObject, what: str) -> None:
        request, caller = one_of(data, self.live_calls())
        waiting = request.open_parts
        if what == "request":
            found = self.scheduler.cancel(CancelCommand("", "request", request.command.request_id), self.brain.now)
            assert found == (1, waiting)
        else:
            self.scheduler.cancel(CancelCommand("", "prompt", request.prompt.id), self.brain.now)
        assert caller.completed is not None

    @precondition(lambda self: self.live_calls())
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        request, caller = one_of(data, self.live_calls())
        caller.gone = True
        self.scheduler.abandon(request, self.brain.now)

    # Receivers.

    @precondition(lambda self: self.live_leases())
    @rule(data=st.data(), outcome=st.sampled_from(OUTCOMES), twice=st.booleans())
    def release(self, data: st.DataObject, outcome: ReadOutcome, twice: bool) -> None:
        lease = one_of(data, self.live_leases())
        now = self.brain.now
        (before, after), *again = self.scheduler.release([(lease.id, outcome)] * (1 + twice), now)
        if lease.expires_at <= now:
            assert (before, after) == (LeaseState.EXPIRED, LeaseState.EXPIRED)
        else:
            assert (before, after) == (lease, LeaseState.RELEASED)
        assert all(answer == (after, after) for answer in again)
        self.released.append(lease.id)

    @precondition(lambda self: self.released)
    @rule(data=st.data(), outcome=st.sampled_from(OUTCOMES))
    def release_late(self, data: st.DataObject, outcome: ReadOutcome) -> None:
        lease = one_of(data, self.released)
        live = {engine.index: engine.slots.live for engine in self.brain.engines}
        alive = len(self.scheduler.leases)
        ((before, after),) = self.scheduler.release([(lease, outcome)], self.brain.now)
        assert before == after
        assert after in {LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.REVOKED}
        assert len(self.scheduler.leases) == alive
        for engine in self.brain.engines:
            assert set(live[engine.index]) <= set(engine.slots.live), "a late release frees nothing"

    @precondition(lambda self: self.live_leases())
    @rule(data=st.data(), ttl=st.sampled_from([None, 0.5, 90.0, 9000.0]))
    def renew(self, data: st.DataObject, ttl: float | None) -> None:
        lease = one_of(data, self.live_leases())
        before, now = lease.expires_at, self.brain.now
        found = self.scheduler.renew(lease.id, ttl, now)
        if before <= now:
            assert found is LeaseState.EXPIRED
        else:
            assert found is lease
            assert lease.expires_at >= before
            assert lease.expires_at <= max(before, now + self.brain.rules.max_lease_seconds)

    # Media workers.

    @precondition(lambda self: any(self.hands.tasks[worker] for worker in self.workers))
    @rule(data=st.data())
    def worker_goes_on(self, data: st.DataObject) -> None:
        worker = one_of(data, [worker for worker in sorted(self.workers) if self.hands.tasks[worker]])
        task = self.hands.tasks[worker][0]
        if task.part not in self.sizes:
            size = st.sampled_from([(64, 64, 1), (200, 300, 4), (900, 900, 9), (2000, 1500, 40), (2100, 64, 1)])
            self.sizes[task.part] = data.draw(st.one_of(size, st.just((64, INPUT + 1, 1))))
        self.step(worker, task, fails=data.draw(st.integers(0, 9)) == 0)

    def step(self, worker: int, task: Task, *, fails: bool = False) -> None:
        """The worker does the next thing for its first item."""
        scheduler, now = self.scheduler, self.brain.now
        nbytes, input_bytes, patches = self.sizes.get(task.part, (64, 64, 1))
        if fails or task.dropped:
            self.hands.tasks[worker].pop(0)
            reason = Reason.INTERNAL if task.dropped else Reason.MEDIA_CORRUPT
            scheduler.prepare_failed(worker, task.part, ServiceError(reason, "own words"), now)
        elif not task.measured:
            task.measured, task.nbytes = True, input_bytes
            scheduler.measured(worker, task.part, layout(nbytes), model_input(input_bytes, patches), now)
        elif task.offset is not None:
            self.hands.tasks[worker].pop(0)
            scheduler.prepared(worker, task.part, 0.1, now)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        self.lose_worker(one_of(data, sorted(self.workers)))

    def lose_worker(self, worker: int) -> None:
        """A worker dies, of itself or because it was stopped."""
        self.workers.remove(worker)
        parts = [self.scheduler.requests.part(part) for part in self.hands.parts_at(worker)]
        stopped = worker in self.hands.stopped
        self.hands.stopped = [other for other in self.hands.stopped if other != worker]
        self.hands.tasks[worker].clear()
        blamed = (PartState.FAILED, Reason.MEDIA_WORKER_LOST)
        before = self.brain.observer.ended.count(blamed)
        self.scheduler.media_worker_lost(worker, self.brain.now)
        expected = bool(parts) and parts[0] is not None and not stopped
        assert self.brain.observer.ended.count(blamed) - before == expected, "only the first is blamed, if any"

    @precondition(lambda self: len(self.workers) < WORKERS)
    @rule(data=st.data())
    def worker_starts(self, data: st.DataObject) -> None:
        self.start_worker(one_of(data, sorted(set(range(WORKERS)) - self.workers)))

    def start_worker(self, worker: int) -> None:
        """A worker takes items."""
        self.workers.add(worker)
        self.scheduler.media_worker_ready(worker, self.brain.now)

    # Engines.

    @precondition(lambda self: any(self.hands.batches[engine] for engine in self.engines))
    @rule(data=st.data())
    def engine_goes_on(self, data: st.DataObject) -> None:
        engine = one_of(data, [engine for engine in sorted(self.engines) if self.hands.batches[engine]])
        batch = self.hands.batches[engine][0]
        if not batch.started:
            batch.started = True
            self.scheduler.batch_started(engine, batch.id)
            return
        self.hands.batches[engine].pop(0)
        reasons = [one_of(data, REASONS) if data.draw(st.integers(0, 9)) == 0 else "" for _ in batch.items]
        results = [item_result(item.part, reason) for item, reason in zip(batch.items, reasons, strict=True)]
        self.scheduler.batch_done(engine, BatchDone(batch=batch.id, items=results), self.brain.now)

    @precondition(lambda self: self.hands.verifies)
    @rule(data=st.data(), damaged=st.booleans())
    def engine_verifies(self, data: st.DataObject, damaged: bool) -> None:
        query = one_of(data, self.hands.verifies)
        self.hands.verifies.remove(query)
        engine, number, offset, _ = query
        slot = next((slot for slot in self.brain.engines[engine].slots.live if slot.payload_offset == offset), None)
        checksum = slot.checksum if slot is not None and not damaged else 12345678
        self.scheduler.slot_verified(number, checksum, self.brain.now)

    @precondition(lambda self: self.engines)
    @rule(data=st.data())
    def engine_dies(self, data: st.DataObject) -> None:
        engine = one_of(data, sorted(self.engines))
        self.engines.remove(engine)
        self.released += [lease.id for lease in self.live_leases() if lease.engine == engine]
        self.brain.lose_engine(engine)
        assert self.brain.engines[engine].slots.live == (), "a dead engine's slots are all free"

    @precondition(lambda self: len(self.engines) < ENGINES)
    @rule(data=st.data())
    def engine_starts(self, data: st.DataObject) -> None:
        self.start_engine(one_of(data, sorted(set(range(ENGINES)) - self.engines)))

    def start_engine(self, engine: int) -> None:
        """An engine takes batches."""
        self.engines.add(engine)
        self.scheduler.engine_ready(engine, ENGINE_READY, self.brain.now)

    @rule(rounds=st.integers(1, 3))
    def children_work(self, rounds: int) -> None:
        """Nothing goes wrong for a while."""
        for _ in range(rounds):
            for worker in sorted(self.workers):
                for _ in range(3):
                    if self.hands.tasks[worker]:
                        self.step(worker, self.hands.tasks[worker][0])
            for engine in sorted(self.engines):
                if self.hands.batches[engine]:
                    self.brain.start_batch(engine)

    # The clock.

    @rule(seconds=st.sampled_from([0.0, 0.5, 5.0, 11.0]), timely=st.booleans())
    def time_passes(self, seconds: float, timely: bool) -> None:
        """Sometimes the loop is late, and reports come before the timer's turn."""
        self.brain.now += seconds
        if timely:
            self.scheduler.tick(self.brain.now)
            due = self.scheduler.timers.next_due()
            assert due is None or due > self.brain.now

    # What is always true.

    @invariant()
    def slots_are_apart_and_say_what_they_are(self) -> None:
        alive = Counter(lease.slot for lease in self.live_leases())
        for engine, arena in zip(self.brain.engines, self.brain.arenas, strict=True):
            end = 0
            for slot in sorted(engine.slots.live, key=lambda slot: slot.offset):
                assert slot.offset >= end
                end = slot.payload_offset + slot.nbytes
                filled = slot.state is SlotState.FILLED
                word = slot_header.read_generation(memoryview(arena), slot.offset)
                assert word == (slot.generation if filled else 0)
                assert slot.leases == alive.pop(slot, 0)
                assert (slot.leases > 0) == filled
            assert end <= ARENA
            sizes = dict.fromkeys(SlotState, 0)
            for slot in engine.slots.live:
                sizes[slot.state] += slot.nbytes
            assert engine.slots.reserved_bytes == sizes[SlotState.RESERVED]
            assert engine.slots.leased_bytes == sizes[SlotState.FILLED]
        assert not alive, "no lease lives on a slot that is free"

    @invariant()
    def inputs_are_apart(self) -> None:
        places = [
            (task.offset, task.offset + task.nbytes)
            for worker in self.workers
            for task in self.hands.tasks[worker]
            if task.offset is not None
        ]
        at_engines = {
            item.part: (item.input_offset, item.input_offset + item.input.nbytes)
            for engine in self.engines
            for batch in self.hands.batches[engine]
            for item in batch.items
        }
        for request, _ in self.calls:
            for part in request.parts:
                if part.input_offset is not None and part.key not in at_engines:
                    assert not part.ended
                    assert part.input is not None
                    places.append((part.input_offset, part.input_offset + part.input.nbytes))
        places += at_engines.values()
        places.sort()
        assert all(first[1] <= second[0] for first, second in pairwise(places))
        assert all(end <= INPUT for _, end in places)
        assert self.scheduler.preparation.input_bytes_taken == sum(
            -(-(end - start) // 64) * 64 for start, end in places
        )

    @invariant()
    def the_counts_are_right(self) -> None:
        live = [part for request, _ in self.live_calls() for part in request.parts if not part.ended]
        assert len(self.scheduler.requests) == len(self.live_calls())
        assert self.scheduler.requests.live_parts() == Counter(part.state.value for part in live)
        assert self.scheduler.admission.parts == len(live) <= 24
        held = sum(len(file) for part in live for file in part.files)
        assert self.scheduler.admission.media_bytes == held <= 2000
        for worker in self.hands.tasks:
            assert len(self.hands.tasks[worker]) <= 2
        for engine in self.brain.engines:
            assert len(engine.batches) <= self.brain.rules.batches_ahead
            assert sorted(engine.batches) == [batch.id for batch in self.hands.batches[engine.index]]
            given_parts = sum(batch.patches for batch in engine.batches.values())
            queued = sum(
                part.patches
                for part in live
                if part.slot and part.state is PartState.PREPARED and part.engine == engine.index
            )
            assert engine.patches == given_parts + queued

    @invariant()
    def whoever_waits_for_a_completion_gets_it_with_the_last_part(self) -> None:
        for request, caller in self.calls:
            assert caller.gone or (caller.completed is None) == (request.open_parts > 0)

    def live_calls(self) -> list[tuple[Request, Caller]]:
        """The calls that have parts that have not ended."""
        return [(request, caller) for request, caller in self.calls if request.open_parts]

    def live_leases(self) -> list[Lease]:
        """Live leases, in the order in which they were granted."""
        return list(self.scheduler.leases._live.values())

    def everybody_works(self) -> None:
        """Every child answers what it can."""
        for worker in set(self.hands.stopped):
            self.lose_worker(worker)
        for worker in range(WORKERS):
            if worker not in self.workers:
                self.start_worker(worker)
            for _ in range(4):
                if self.hands.tasks[worker]:
                    self.step(worker, self.hands.tasks[worker][0])
        for engine in range(ENGINES):
            while self.hands.batches[engine]:
                self.brain.finish_batch(engine)

    def teardown(self) -> None:
        """All children live and answer, all leases end: then everything has ended and nothing is held."""
        for engine in set(range(ENGINES)) - self.engines:
            self.start_engine(engine)
        for _ in range(200):
            self.everybody_works()
            if not self.live_calls() and not any(self.hands.tasks.values()):
                break
            self.brain.advance(0.5)
        assert not self.live_calls(), "something is stuck"
        self.brain.advance(self.brain.rules.max_lease_seconds)
        self.brain.assert_empty()
        for request, caller in self.calls:
            assert caller.gone or caller.completed is not None
            assert all(part.ended and part.files == () and part.slot is None for part in request.parts)
            for event in caller.events:
                assert not isinstance(event, PartFailed) or event.error.message
        assert self.scheduler.timers.next_due() is None
        assert len(self.brain.observer.ended) == sum(len(request.parts) for request, _ in self.calls)


TestScheduler = SchedulerMachine.TestCase
# A run that fails is told as it was: to shrink one of so many steps takes minutes.
TestScheduler.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    report_multiple_bugs=False,
)
