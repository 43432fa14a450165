"""The whole scheduler against children and callers that do anything, in any order, at any time.

Whatever happened, everything comes to an end: each part once, each request with one ``Completed``, and nothing is held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.commands import AcquireCommand, CancelCommand, EncodeCommand, ItemCommand
from encoder_svc.runtime.computations import Computation
from encoder_svc.runtime.content_names import name_content
from encoder_svc.runtime.events import ChunkEvent, PartFailed
from encoder_svc.runtime.forwards import ForwardState
from encoder_svc.runtime.leases import Lease, LeaseState
from encoder_svc.runtime.parts import Part, PartState
from encoder_svc.runtime.requests import Request
from encoder_svc.runtime.slots import ContentName, SlotState
from encoder_svc.runtime.uploads import Upload
from epd import slot_header
from epd.encoder.v1.encoder_service_pb2 import CachePolicy, ReadOutcome
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from epd.internal.v1.engine_pb2 import BatchDone
from epd.internal.v1.media_worker_pb2 import Tower
from tests.runtime.recording_hands import (
    ENGINE_READY,
    NAMESPACE,
    Brain,
    Caller,
    RunningBatch,
    Task,
    digest_of,
    encode_command,
    item_inputs,
    item_result,
    layout,
)

WORKERS = ENGINES = 2
ARENA, INPUT = 4096, 2048
SMALL, MIDDLE, LARGE = (64, 64, 1, 0), (200, 300, 4, 0), (900, 900, 9, 0)
FILM, LONG_FILM = (192, 256, 4, 3), (704, 512, 9, 12)
SIZES = [
    *(SMALL, SMALL, MIDDLE, MIDDLE, LARGE, FILM, FILM, LONG_FILM),
    *((1900, 1500, 40, 0), (2100, 64, 1, 0), (64, INPUT + 1, 1, 0)),
]
"""Bytes of the embedding, bytes of the input, patches, and mel frames of sound; of each content."""
CONTENTS = len(SIZES)
REASONS = [Reason.FORWARD_FAILED, Reason.OUTPUT_NOT_FINITE, Reason.OUT_OF_MEMORY]
REFUSALS = {
    Reason.REQUEST_ID_LIVE,
    Reason.PART_ALREADY_SUBMITTED,
    Reason.ADMISSION_FULL,
    Reason.REQUEST_INVALID,
    Reason.DEADLINE_EXCEEDED,
}
OUTCOMES = [ReadOutcome.READ_OUTCOME_OK, ReadOutcome.READ_OUTCOME_CORRUPT, ReadOutcome.READ_OUTCOME_ABANDONED]
SOURCES = ["hashed"] * 8 + ["bytes", "bytes", "uri", "content_key", "upload"]
POLICIES = [
    CachePolicy.CACHE_POLICY_USE,
    CachePolicy.CACHE_POLICY_USE,
    CachePolicy.CACHE_POLICY_REFRESH,
    CachePolicy.CACHE_POLICY_BYPASS,
]
SIZE_OF = {digest_of(content): size for content, size in enumerate(SIZES)}
WISHES = st.fixed_dictionaries(
    {
        "request_id": st.integers(0, 9),
        "prompt_id": st.integers(0, 3),
        "parts": st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True),
        "file_bytes": st.sampled_from([0, 1, 100, 700]),
        "priority": st.integers(-1, 1),
        "deadline": st.sampled_from([None, None, None, 0.0, 5.0, 30.0]),
        "receivers": st.sampled_from([("",), ("a", "b"), ("a", "b", "c"), ()]),
        "skip_layout": st.booleans(),
        "lease_ttl": st.sampled_from([None, 1.0, 1000.0]),
        "policy": st.sampled_from(POLICIES),
        "salt": st.sampled_from([b"", b"", b"salt"]),
        "identity": st.sampled_from(["", "", "them"]),
    }
)
CANARY = "encoder-svc canary"

Content = tuple[str, bytes, bytes]
"""What decides an embedding here: identity, salt, media digest."""
Thing = TypeVar("Thing")


def one_of(data: st.DataObject, things: list[Thing]) -> Thing:
    """One of some things, as the data say."""
    return things[data.draw(st.integers(0, len(things) - 1))]


def name_of(content: Content) -> ContentName:
    """What a content is kept under."""
    identity, salt, digest = content
    return name_content(identity, NAMESPACE, salt, MediaItem(modality=Modality.MODALITY_IMAGE), digest)


class SchedulerMachine(RuleBasedStateMachine):
    """Callers, receivers, children and a clock around one scheduler."""

    def __init__(self) -> None:
        super().__init__()
        self.brain = Brain(
            workers=0,
            engines=ENGINES,
            arena_bytes=ARENA,
            budget=6,
            started=False,
            prompt_bytes=ARENA // 2,
            input_bytes=INPUT,
            max_queued_parts=24,
            max_queued_bytes=2000,
            max_queued_patches=20_000,
        )
        self.scheduler, self.hands = self.brain.scheduler, self.brain.hands
        self.calls: list[tuple[Request, Caller]] = []
        self.contents: dict[tuple[Request, int], Content] = {}
        """What each part shows, by request and part index."""
        self.unchecked: list[tuple[Request, Caller]] = []
        self.made: dict[int, Computation] = {}
        """Every computation that a child was told to work on."""
        self.shows: dict[int, Content] = {}
        """What these show."""
        self.forwards: set[int] = set()
        """Those of them that came back well."""
        self.failed: set[int] = set()
        """Those of them of which something came back badly."""
        self.halves: dict[int, tuple[int, int]] = {}
        """Those of which one tower's share is written: in which engine's life, and where."""
        self.lives: Counter[int] = Counter()
        self.workers: set[int] = set()
        self.engines: set[int] = set()
        self.released: list[bytes] = []
        self.uploads: list[tuple[str, Upload, bytes]] = []
        self.numbers = iter(range(1_000_000))
        for index in range(ENGINES):
            self.start_engine(index)
        for index in range(WORKERS):
            self.start_worker(index)
        self.hands.watch = self.is_wanted
        self.scheduler.canary.start(self.brain.now)

    def is_wanted(self, key: int) -> None:
        """Whatever a child is told to do is for a part that somebody still waits for."""
        computation = self.scheduler.store._live[key]
        assert not computation.ended
        deadlines = [part.request.command.deadline for part in computation.parts]
        assert any(deadline is None or deadline > self.brain.now for deadline in deadlines)
        if key not in self.made:
            self.made[key] = computation
            part = computation.parts[0]
            self.shows[key] = self.contents.get((part.request, part.item.part_idx), (CANARY, b"", b""))

    # Callers.

    @rule(data=st.data(), wishes=st.lists(WISHES, min_size=1, max_size=5))
    def submit(self, data: st.DataObject, wishes: list[dict[str, Any]]) -> None:
        for wish in wishes:
            self.submit_one(data, wish)

    def submit_one(self, data: st.DataObject, wish: dict[str, Any]) -> None:
        """One ``Encode`` call, which is refused or comes in."""
        parts, identity, salt, deadline = wish["parts"], wish["identity"], wish["salt"], wish["deadline"]
        numbers = {
            "deadline": None if deadline is None else self.brain.now + deadline,
            "request_id": f"r{wish['request_id']}",
            "prompt_id": f"p{wish['prompt_id']}",
        }
        command = encode_command(num_parts=6, content=0, **{**wish, **numbers})
        shown = {part: (identity, salt, digest_of(data.draw(st.integers(0, CONTENTS - 1)))) for part in parts}
        items = tuple(self.source(data, item, shown) for item in command.items)
        command = replace(command, items=items)
        admission = self.scheduler.admission
        before = (len(self.scheduler.requests), admission.parts, admission.media_bytes, admission.patches)
        caller = Caller(command)
        # Contents are known by request, which is there before the scheduler goes on with it.
        real_admit = self.scheduler.requests.admit

        def admit(*arguments: object) -> Request:
            request = real_admit(*arguments)  # type: ignore[arg-type] # as they come
            if request.command is command:
                self.contents.update({(request, part): content for part, content in shown.items()})
            return request

        self.scheduler.requests.admit = admit  # type: ignore[method-assign, assignment] # to see the request
        try:
            request = self.scheduler.submit(command, caller, self.brain.now)
        except ServiceError as error:
            refused = error
        else:
            self.calls.append((request, caller))
            self.unchecked.append((request, caller))
            return
        finally:
            self.scheduler.requests.admit = real_admit  # type: ignore[method-assign]
        assert refused.reason in REFUSALS
        assert caller.events == []
        assert (refused.reason is Reason.ADMISSION_FULL) == (refused.retry_after is not None)
        after = (len(self.scheduler.requests), admission.parts, admission.media_bytes, admission.patches)
        assert after == before, "a refused request leaves no trace"

    def source(self, data: st.DataObject, item: ItemCommand, shown: dict[int, Content]) -> ItemCommand:
        """Where an item's media come from."""
        media = item.item
        content = shown[media.part_idx]
        match one_of(data, SOURCES):
            case "hashed":
                return replace(item, digest=content[2])
            case "bytes":
                return replace(item, digest=None)
            case "uri":
                media.uri = "https://example.com/"
                return ItemCommand(media, ())
            case "content_key":
                media.content_key = name_of(content).content_key
                return ItemCommand(media, ())
            case _:
                identity, upload, digest = one_of(data, [*self.uploads, ("", None, b"")])
                media.upload_id = upload.id if upload is not None else "no such upload"
                shown[media.part_idx] = (content[0], content[1], digest)
                assert identity in {"", "them"}
                return ItemCommand(media, ())

    @precondition(lambda self: self.hands.sources)
    @rule(data=st.data())
    def media_come(self, data: st.DataObject) -> None:
        self.bring(one_of(data, sorted(self.hands.sources)), how=data.draw(st.integers(0, 9)))

    def bring(self, key: int, *, how: int = 9) -> None:
        """The media of a part are here, or cannot be had."""
        item, files = self.hands.sources.pop(key)
        part = self.scheduler.requests.part(key)
        assert part is not None, "what nobody waits for is brought no more"
        content = self.contents.get((part.request, item.part_idx), (CANARY, b"", digest_of(-1)))
        if how == 0 and content[0] != CANARY:
            error = ServiceError(Reason.FETCH_FAILED, "own words", retry_after=1.0)
            self.scheduler.source_failed(key, error, self.brain.now)
            return
        if how == 1 and content[0] != CANARY:
            part.item.content_sha256 = digest_of(-2)
        self.scheduler.sourced(key, files or (bytes(10),), content[2], 0.1, self.brain.now)

    def bring_all(self) -> None:
        """All media come, but for parts whose time is over by then."""
        for key in sorted(self.hands.sources):
            if key in self.hands.sources:
                self.bring(key)

    @rule(data=st.data(), identity=st.sampled_from(["", "them"]), nbytes=st.sampled_from([1, 400, 900]))
    def upload(self, data: st.DataObject, identity: str, nbytes: int) -> None:
        uploads = self.scheduler.uploads
        try:
            upload = uploads.begin(identity, nbytes, self.brain.now)
        except ServiceError as error:
            assert error.reason is Reason.ADMISSION_FULL  # noqa: PT017 # else branch below is the other outcome
            return
        uploads.add(upload, bytes(nbytes - 1))
        if data.draw(st.booleans()):
            uploads.abandon(upload)
            return
        uploads.add(upload, bytes([next(self.numbers) % 3]))
        self.uploads.append((identity, upload, uploads.finish(upload, b"", self.brain.now)))

    @rule(
        content=st.integers(0, CONTENTS - 1),
        salt=st.sampled_from([b"", b"salt"]),
        identity=st.sampled_from(["", "them"]),
        receivers=st.sampled_from([(), ("a",), ("a", "b")]),
    )
    def acquire(self, content: int, salt: bytes, identity: str, receivers: tuple[str, ...]) -> None:
        asked = (identity, salt, digest_of(content))
        name = name_of(asked)
        slot = self.scheduler.store.cached(name)
        command = AcquireCommand(identity, name.content_key, receivers, "p", 3, 4, None)
        before = len(self.scheduler.leases)
        try:
            chunk = self.scheduler.acquire(command, self.brain.now)
        except ServiceError as error:
            assert error.reason is Reason.CONTENT_UNKNOWN  # noqa: PT017 # the other outcome is below
            assert slot is None
            return
        assert slot is not None
        assert self.shows[chunk.checksum.value] == asked
        assert [grant.receiver_id for grant in chunk.leases] == list(receivers)
        assert len(self.scheduler.leases) == before + len(receivers)

    @precondition(lambda self: self.live_calls())
    @rule(data=st.data(), what=st.sampled_from(["request", "prompt"]))
    def cancel(self, data: st.DataObject, what: str) -> None:
        request, caller = one_of(data, self.live_calls())
        waiting = request.open_parts
        if what == "request":
            found = self.scheduler.cancel(
                CancelCommand(request.command.identity, "request", request.command.request_id), self.brain.now
            )
            assert found == (1, waiting)
        else:
            self.scheduler.cancel(CancelCommand(request.command.identity, "prompt", request.prompt.id), self.brain.now)
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
        # What is due would happen with the release, and be taken for its doing.
        self.scheduler.tick(self.brain.now)
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
        self.step(worker, self.hands.tasks[worker][0], fails=data.draw(st.integers(0, 9)) == 0)

    def step(self, worker: int, task: Task, *, fails: bool = False) -> None:
        """The worker does the next thing for its first item."""
        scheduler, now = self.scheduler, self.brain.now
        # Equal content has equal sizes.
        nbytes, input_bytes, patches, frames = SIZE_OF.get(self.shows[task.part][2], MIDDLE)
        if fails and not task.dropped:
            self.hands.tasks[worker].pop(0)
            scheduler.item_failed(worker, task.part, ServiceError(Reason.MEDIA_CORRUPT, "own words"), now)
        elif task.comes_back:
            self.hands.tasks[worker].pop(0)
            scheduler.item_dropped(worker, task.part, now)
        elif not task.measured:
            task.measured, task.nbytes = True, input_bytes
            inputs = item_inputs(input_bytes, patches, frames)
            scheduler.item_measured(worker, task.part, layout(nbytes), inputs, now)
        elif task.offset is not None:
            self.hands.tasks[worker].pop(0)
            scheduler.item_prepared(worker, task.part, 0.1, now)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def worker_dies(self, data: st.DataObject) -> None:
        self.lose_worker(one_of(data, sorted(self.workers)))

    def lose_worker(self, worker: int) -> None:
        """A worker dies, of itself or because it was stopped."""
        self.workers.remove(worker)
        made = [self.made[key] for key in self.hands.parts_at(worker)]
        stopped = worker in self.hands.stopped
        self.hands.stopped = [other for other in self.hands.stopped if other != worker]
        self.hands.tasks[worker].clear()
        blamed = (PartState.FAILED, Reason.MEDIA_WORKER_LOST)
        before = self.brain.observer.ended.count(blamed)
        expected = len(made[0].parts) if made and not made[0].ended and not stopped else 0
        self.scheduler.media_worker_lost(worker, self.brain.now)
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
        reasons = [one_of(data, REASONS) if data.draw(st.integers(0, 9)) == 0 else "" for _ in batch.items]
        self.finish_batch(engine, reasons)

    @precondition(lambda self: any(len(self.hands.batches[engine]) > 1 for engine in self.engines))
    @rule(data=st.data())
    def engine_is_late(self, data: st.DataObject) -> None:
        """What stands behind its batch goes elsewhere, if there is room."""
        engine = one_of(data, [engine for engine in sorted(self.engines) if len(self.hands.batches[engine]) > 1])
        if not self.hands.batches[engine][0].started:
            self.brain.start_batch(engine)
        self.brain.advance(5.0)

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
        self.lose_engine(one_of(data, sorted(self.engines)))

    def lose_engine(self, engine: int) -> None:
        """An engine dies, of itself or because it was stopped."""
        self.engines.remove(engine)
        self.lives[engine] += 1
        self.released += [lease.id for lease in self.live_leases() if lease.slot.engine == engine]
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

    @rule(rounds=st.integers(3, 9))
    def children_work_on(self, rounds: int) -> None:
        self.children_work(rounds)

    @rule(rounds=st.integers(1, 3))
    def children_work(self, rounds: int) -> None:
        """Nothing goes wrong for a while."""
        for _ in range(rounds):
            for worker in sorted(self.workers):
                for _ in range(3):
                    if self.hands.tasks[worker]:
                        self.step(worker, self.hands.tasks[worker][0])
            self.bring_all()
            for engine in sorted(self.engines):
                if self.hands.batches[engine]:
                    self.brain.start_batch(engine)
                    self.finish_batch(engine)

    def finish_batch(self, engine: int, reasons: Sequence[str] = ()) -> None:
        """The engine's first batch comes back, well or as is said of each item."""
        batch = self.hands.batches[engine].pop(0)
        asked = {forward.computation.key for forward in self.brain.engines[engine].batches[batch.id].items}
        results = []
        for item, reason in zip(batch.items, reasons or [""] * len(batch.items), strict=True):
            results.append(item_result(item.part, reason, item.partial))
            place = (self.lives[engine] * ENGINES + engine, item.payload_offset)
            if reason:
                self.failed |= {item.part} & asked
            elif item.partial:
                self.halves[item.part] = place
            elif not item.input.matrices or self.halves.get(item.part) == place:
                self.forwards.add(item.part)
        self.scheduler.batch_done(engine, BatchDone(batch=batch.id, items=results), self.brain.now)

    @precondition(lambda self: self.hands.stopped_engines)
    @rule(data=st.data())
    def hung_engine_is_killed(self, data: st.DataObject) -> None:
        self.lose_engine(one_of(data, self.hands.stopped_engines))

    # The clock.

    @rule(seconds=st.sampled_from([0.0, 0.5, 5.0, 11.0, 40.0]), timely=st.booleans())
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
        names: list[ContentName] = []
        for engine, arena in zip(self.brain.engines, self.brain.arenas, strict=True):
            end = 0
            sizes: Counter[str] = Counter()
            for slot in sorted(engine.slots.live, key=lambda slot: slot.offset):
                assert slot.offset >= end
                end = slot.payload_offset + slot.nbytes
                filled = slot.state is SlotState.FILLED
                word = slot_header.read_generation(memoryview(arena), slot.offset)
                assert word == (slot.generation if filled else 0)
                assert slot.leases == alive.pop(slot, 0)
                if filled:
                    assert slot.leases or slot.name is not None, "a slot that nobody has is free"
                    assert slot.checksum in self.forwards - self.failed, "only what is whole is there to be read"
                else:
                    assert slot.leases == 0
                    assert slot.name is None
                if slot.name is not None:
                    assert engine.slots.find(slot.name) is slot
                    assert name_of(self.shows[slot.checksum]) == slot.name
                    names.append(slot.name)
                sizes["leased" if slot.leases else "cached" if filled else "reserved"] += slot.nbytes
            assert end <= ARENA
            assert engine.slots.reserved_bytes == sizes["reserved"]
            assert engine.slots.leased_bytes == sizes["leased"]
            assert engine.slots.cached_bytes == sizes["cached"]
            if engine.index not in self.engines:
                assert not sizes, "a dead engine has nothing"
        assert not alive, "no lease lives on a slot that is free"
        assert len(names) == len(set(names)), "a content is cached once, in one arena"

    @invariant()
    def inputs_are_apart(self) -> None:
        places = [
            (computation.input_offset, computation.input_offset + computation.input_bytes)
            for computation in self.made.values()
            if computation.input_offset is not None
        ]
        for worker in self.workers:
            for task in self.hands.tasks[worker]:
                assert task.offset in (None, self.made[task.part].input_offset)
        for engine in self.engines:
            for batch in self.brain.engines[engine].batches.values():
                sent = {item.part: item.input_offset for item in self.batch(engine, batch.id).items}
                assert all(sent[item.computation.key] == item.computation.input_offset for item in batch.items)
        places.sort()
        assert all(first[1] <= second[0] for first, second in pairwise(places))
        assert all(end <= INPUT for _, end in places)
        assert self.scheduler.preparation.input_bytes_taken == sum(
            -(-(end - start) // 64) * 64 for start, end in places
        )

    @invariant()
    def the_counts_are_right(self) -> None:
        live = self.live_parts()
        admission = self.scheduler.admission
        assert self.scheduler.requests.live_parts() == Counter(part.state.value for part in live)
        assert admission.parts == len(live) <= 24
        assert admission.media_bytes == sum(part.media_bytes for part in live)
        assert admission.patches == sum(part.patches for part in live)
        assert all(part.slot_bytes <= ARENA // 2 for part in live)
        for worker in self.hands.tasks:
            assert len(self.hands.tasks[worker]) <= 2
        for engine in self.brain.engines:
            assert len(engine.batches) <= self.brain.rules.batches_ahead
            assert sorted(engine.batches) == [batch.id for batch in self.hands.batches[engine.index]]
            sent = [forward for batch in engine.batches.values() for forward in batch.items]
            waiting = engine.batcher.waiting()
            assert {forward.state for forward in sent} <= {ForwardState.SENT}
            assert {forward.state for forward in waiting} <= {ForwardState.WAITING}
            assert all(not forward.computation.ended for forward in waiting)
            assert {forward.computation.engine for forward in (*sent, *waiting)} <= {engine.index}
            for tower in (Tower.TOWER_VISION, Tower.TOWER_AUDIO):
                given = sum(forward.patches for forward in (*sent, *waiting) if forward.tower == tower)
                assert engine.patches[tower] == given
            here = {forward.key for forward in (*sent, *waiting)}
            assert len(here) == len(sent) + len(waiting), "a forward is in one place"
            for computation in self.made.values():
                if computation.slot is not None and not computation.ended and computation.engine == engine.index:
                    open_ones = {f.key for f in computation.forwards if f.state is not ForwardState.DONE}
                    assert open_ones <= here, "what is in no hand would wait for ever"
                    assert open_ones
        assert self.scheduler.uploads.bytes <= self.brain.rules.max_uploads_bytes

    @invariant()
    def a_computation_lives_while_somebody_waits_for_it(self) -> None:
        waited: Counter[Computation] = Counter()
        for part in self.live_parts():
            if part.computation is not None:
                assert not part.computation.ended
                assert part in part.computation.parts
                waited[part.computation] += 1
            else:
                assert part.key in self.hands.sources, "what is in no hand would wait for ever"
        assert set(self.scheduler.store._live.values()) == set(waited)
        for computation, parts in waited.items():
            assert len(computation.parts) == parts
            shown = {self.contents.get((part.request, part.item.part_idx)) for part in computation.parts}
            assert len(shown) == 1, "only equal content shares a computation"
            assert parts == 1 or shown != {None}
            if computation.name is not None:
                assert self.scheduler.store.in_the_making(computation.name) is computation, "others can join it"

    @invariant()
    def whoever_waits_for_a_completion_gets_it_with_the_last_part(self) -> None:
        for request, caller in self.calls:
            assert caller.gone or (caller.completed is None) == (request.open_parts > 0)

    @invariant()
    def everybody_gets_what_it_asked_for(self) -> None:
        """Fault 23: never another content's embedding, nor one across identities or salts."""
        for request, caller in self.unchecked:
            for index, end in caller.ends.items():
                if isinstance(end, ChunkEvent):
                    assert self.shows[end.chunk.checksum.value] == self.contents[request, index]
                    assert [grant.receiver_id for grant in end.chunk.leases] == list(request.command.receivers)
                    assert not (
                        end.chunk.from_cache and request.command.cache_policy == CachePolicy.CACHE_POLICY_BYPASS
                    ) or caller.command.items[index_of(caller.command, index)].item.HasField("content_key")
        self.unchecked = [(request, caller) for request, caller in self.unchecked if request.open_parts]

    def batch(self, engine: int, number: int) -> RunningBatch:
        """A batch that an engine has, as the engine sees it."""
        return next(batch for batch in self.hands.batches[engine] if batch.id == number)

    def live_parts(self) -> list[Part]:
        """The parts that have not ended, the canaries' too."""
        return [part for request in self.scheduler.requests.live() for part in request.parts if not part.ended]

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
        for engine in list(self.hands.stopped_engines):
            self.lose_engine(engine)
        self.bring_all()
        for worker in range(WORKERS):
            if worker not in self.workers:
                self.start_worker(worker)
            for _ in range(4):
                if self.hands.tasks[worker]:
                    self.step(worker, self.hands.tasks[worker][0])
        for engine in range(ENGINES):
            if engine not in self.engines:
                self.start_engine(engine)
            while self.hands.batches[engine]:
                self.finish_batch(engine)

    def teardown(self) -> None:
        """All children live and answer, all leases end: then everything has ended and nothing is held."""
        # The canary goes on for ever; it is no part of what must end.
        self.scheduler.draining = True
        for _ in range(200):
            self.everybody_works()
            if not len(self.scheduler.requests) and not any(self.hands.tasks.values()):
                break
            self.brain.advance(0.5)
        assert not self.live_calls(), "something is stuck"
        self.brain.advance(self.brain.rules.max_lease_seconds)
        self.brain.advance(self.brain.rules.lease_seconds)
        assert self.scheduler.subscriptions.parcels == 0
        assert self.scheduler.uploads.bytes == 0
        for engine in self.brain.engines:
            assert all(slot.name is not None for slot in engine.slots.live), "only what is cached is left"
            engine.slots.forget_all()
        self.brain.assert_empty()
        for request, caller in self.calls:
            assert caller.gone or caller.completed is not None
            assert all(part.ended and part.media_bytes == 0 for part in request.parts)
            for event in caller.events:
                assert not isinstance(event, PartFailed) or event.error.message
        for computation in self.made.values():
            assert computation.ended
            assert (computation.files, computation.slot, computation.input_offset) == ((), None, None)
        assert len(self.scheduler.timers._heap) < 2 or self.only_the_canary_waits()
        assert len(self.brain.observer.ended) >= sum(len(request.parts) for request, _ in self.calls)

    def only_the_canary_waits(self) -> bool:
        """No timer but the canary's is left."""
        live = [timer for _, _, timer in self.scheduler.timers._heap if timer.action is not None]
        return [timer.action for timer in live] == [self.scheduler.canary.start]


def index_of(command: EncodeCommand, part_idx: int) -> int:
    """Which item of a command is a part."""
    return [item.item.part_idx for item in command.items].index(part_idx)


TestScheduler = SchedulerMachine.TestCase
# A run that fails is told as it was: to shrink one of so many steps takes minutes.
TestScheduler.settings = settings(
    max_examples=45,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    report_multiple_bugs=False,
)
