"""Children that keep what the scheduler tells them, and the pieces that tests of the pure runtime are built from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.batcher import Batcher
from encoder_svc.runtime.chunks import ChunkWriter
from encoder_svc.runtime.commands import EncodeCommand, ItemCommand
from encoder_svc.runtime.computations import Computation
from encoder_svc.runtime.engine_table import Engine
from encoder_svc.runtime.events import Accepted, ChunkEvent, Completed, Event, PartCancelled, PartFailed
from encoder_svc.runtime.forwards import Forward
from encoder_svc.runtime.parts import Part, PartState
from encoder_svc.runtime.requests import Prompt, Request
from encoder_svc.runtime.rules import Rules
from encoder_svc.runtime.scheduler import Scheduler
from encoder_svc.runtime.slots import SlotTable
from epd.encoder.v1.embedding_pb2 import Checksum, ChunkState, DataType, EmbeddingChunk, TensorSpec
from epd.encoder.v1.encoder_service_pb2 import CachePolicy, Delivery, ModelInfo
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from epd.internal.v1.engine_pb2 import BatchDone, BatchItem, EngineReady, ItemResult
from epd.internal.v1.media_worker_pb2 import ModelInput, Tower

RULES = Rules(
    prepare_seconds=10.0,
    space_seconds=20.0,
    forward_seconds=100.0,
    canary_seconds=30.0,
    lease_seconds=60.0,
    max_lease_seconds=600.0,
    prompt_bytes=2048,
    max_queued_parts=64,
    max_queued_bytes=1 << 20,
    max_queued_patches=1 << 20,
    batches_ahead=2,
    input_bytes=4096,
    max_known_receivers=8,
    max_receiver_parts=1000,
    max_upload_bytes=1000,
    max_uploads_bytes=2000,
    upload_seconds=120.0,
)

NAMESPACE = b"\x08" * 32

ENGINE_READY = EngineReady(
    boot_id="0" * 32,
    model=ModelInfo(
        model_type="qwen2_5_vl",
        modalities=[Modality.MODALITY_IMAGE],
        compatibility_fingerprint=b"\x07" * 32,
        cache_namespace=NAMESPACE,
    ),
)


@dataclass
class Task:
    """An item at a worker, as the worker sees it."""

    part: int
    """The computation's number: children do not know of parts."""
    item: MediaItem
    files: tuple[bytes, ...]
    measure_only: bool = False
    measured: bool = False
    offset: int | None = None
    nbytes: int = 0
    dropped: bool = False

    @property
    def comes_back(self) -> bool:
        """The worker's answer is that it has not prepared it."""
        return self.dropped or (self.measure_only and self.measured)


@dataclass
class RunningBatch:
    """A batch at an engine, as the engine sees it."""

    id: int
    items: list[BatchItem]
    started: bool = False


@dataclass
class RecordingHands:
    """What every child was told and has not answered, in order; and what it was ever told."""

    tasks: dict[int, list[Task]] = field(default_factory=lambda: {0: [], 1: [], 2: []})
    batches: dict[int, list[RunningBatch]] = field(default_factory=lambda: {0: [], 1: [], 2: []})
    sources: dict[int, tuple[MediaItem, tuple[bytes, ...]]] = field(default_factory=dict)
    """The parts whose media are being brought."""
    dropped: list[int] = field(default_factory=list)
    stopped: list[int] = field(default_factory=list)
    stopped_engines: list[int] = field(default_factory=list)
    verifies: list[tuple[int, int, int, int]] = field(default_factory=list)
    watch: Callable[[int], None] = lambda part: None
    """Called with each computation that a child is told to work on."""

    def bring(self, part: int, item: MediaItem, files: tuple[bytes, ...]) -> None:
        self.sources[part] = (item, files)

    def stop_bringing(self, part: int) -> None:
        self.sources.pop(part, None)

    def prepare(self, worker: int, part: int, item: MediaItem, files: tuple[bytes, ...], measure_only: bool) -> None:
        self.watch(part)
        self.tasks[worker].append(Task(part, item, files, measure_only))

    def grant(self, worker: int, part: int, offset: int) -> None:
        self.watch(part)
        self.task(worker, part).offset = offset

    def drop(self, worker: int, part: int) -> None:
        self.dropped.append(part)
        for task in self.tasks[worker]:
            if task.part == part:
                task.dropped = True

    def stop(self, worker: int) -> None:
        self.stopped.append(worker)

    def run(self, engine: int, batch: int, items: Sequence[BatchItem]) -> None:
        for item in items:
            self.watch(item.part)
        self.batches[engine].append(RunningBatch(batch, list(items)))

    def stop_engine(self, engine: int) -> None:
        self.stopped_engines.append(engine)

    def verify(self, engine: int, query: int, payload_offset: int, nbytes: int) -> None:
        self.verifies.append((engine, query, payload_offset, nbytes))

    def task(self, worker: int, part: int) -> Task:
        """The task of ``part`` at ``worker``."""
        return next(task for task in self.tasks[worker] if task.part == part)

    def parts_at(self, worker: int) -> list[int]:
        """The parts at ``worker``, in order."""
        return [task.part for task in self.tasks[worker]]

    def batch_parts(self, engine: int = 0) -> list[list[int]]:
        """The parts of each batch at ``engine``, in order."""
        return [[item.part for item in batch.items] for batch in self.batches[engine]]


@dataclass
class CountingObserver:
    """Keeps what was counted."""

    admitted: int = 0
    refused: list[Reason] = field(default_factory=list)
    ended: list[tuple[PartState, Reason | None]] = field(default_factory=list)
    looked_up: list[str] = field(default_factory=list)
    batches: list[tuple[int, int]] = field(default_factory=list)
    stages: list[str] = field(default_factory=list)

    def request_admitted(self) -> None:
        self.admitted += 1

    def request_refused(self, reason: Reason) -> None:
        self.refused.append(reason)

    def part_ended(self, end: PartState, reason: Reason | None, seconds: float) -> None:
        assert seconds >= 0
        self.ended.append((end, reason))

    def stage_took(self, stage: str, seconds: float) -> None:
        assert seconds >= 0
        self.stages.append(stage)

    def batch_ran(self, items: int, patches: int, forward_seconds: float, stage_seconds: float) -> None:
        assert min(forward_seconds, stage_seconds) >= 0
        self.batches.append((items, patches))

    def cache_looked_up(self, result: str) -> None:
        self.looked_up.append(result)


class Caller:
    """One caller's ear: takes the events of one request and checks their order as they come."""

    def __init__(self, command: EncodeCommand) -> None:
        self.command = command
        self.events: list[Event] = []
        self.laid_out: set[int] = set()
        self.ends: dict[int, ChunkEvent | PartFailed | PartCancelled] = {}
        self.completed: Completed | None = None
        self.gone = False

    def __call__(self, event: Event) -> None:
        assert not self.gone, "a caller that is gone is told nothing"
        assert self.completed is None, "nothing follows Completed"
        assert isinstance(event, Accepted) == (not self.events), "Accepted comes first, and once"
        self.events.append(event)
        match event:
            case Accepted():
                pass
            case ChunkEvent(chunk) if chunk.state == ChunkState.CHUNK_STATE_LAYOUT:
                assert chunk.part_idx not in self.laid_out | self.ends.keys()
                self.laid_out.add(chunk.part_idx)
            case ChunkEvent(chunk):
                assert self.command.skip_layout or chunk.from_cache or chunk.part_idx in self.laid_out
                self._end(chunk.part_idx, event)
            case PartFailed(part_idx=part_idx) | PartCancelled(part_idx=part_idx):
                self._end(part_idx, event)
            case Completed():
                kinds = [type(end) for end in self.ends.values()]
                assert set(self.ends) == {item.item.part_idx for item in self.command.items}
                assert event.ready == kinds.count(ChunkEvent)
                assert event.failed == kinds.count(PartFailed)
                assert event.cancelled == kinds.count(PartCancelled)
                self.completed = event

    def _end(self, part_idx: int, event: ChunkEvent | PartFailed | PartCancelled) -> None:
        assert part_idx not in self.ends, "a part ends once"
        self.ends[part_idx] = event

    def chunk(self, part_idx: int = 0) -> EmbeddingChunk:
        """The READY chunk of a part."""
        end = self.ends[part_idx]
        assert isinstance(end, ChunkEvent)
        return end.chunk

    def error(self, part_idx: int = 0) -> ServiceError:
        """Why a part failed."""
        end = self.ends[part_idx]
        assert isinstance(end, PartFailed)
        return end.error


def encode_command(
    request_id: str = "r",
    *,
    prompt_id: str = "p",
    parts: Sequence[int] = (0,),
    num_parts: int = 16,
    file_bytes: int = 10,
    receivers: tuple[str, ...] = ("",),
    priority: int = 0,
    deadline: float | None = None,
    lease_ttl: float | None = None,
    skip_layout: bool = False,
    identity: str = "",
    content: int | None = None,
    policy: CachePolicy = CachePolicy.CACHE_POLICY_UNSPECIFIED,
    salt: bytes = b"",
) -> EncodeCommand:
    """An ``Encode`` call for some parts of a prompt.

    ``content`` numbers what the first of them shows, the next ones show the next numbers. Without it they bypass the
    cache, so that a test of something else meets neither hits nor cached slots.
    """
    first = 0 if content is None else content
    if content is None:
        policy = CachePolicy.CACHE_POLICY_BYPASS
    return EncodeCommand(
        identity=identity,
        request_id=request_id,
        prompt_id=prompt_id,
        num_parts=num_parts,
        items=tuple(
            ItemCommand(
                MediaItem(part_idx=part, modality=Modality.MODALITY_IMAGE),
                (bytes(file_bytes),),
                digest_of(first + place),
            )
            for place, part in enumerate(parts)
        ),
        delivery=Delivery.DELIVERY_CALLER if receivers else Delivery.DELIVERY_CACHE_ONLY,
        receivers=receivers,
        priority=priority,
        cache_policy=policy,
        cache_salt=salt,
        expected_fingerprint=b"",
        lease_ttl=lease_ttl,
        deadline=deadline,
        skip_layout=skip_layout,
    )


def digest_of(content: int) -> bytes:
    """The media digest of a content."""
    return hashlib.sha256(str(content).encode()).digest()


def model_input(nbytes: int = 64, patches: int = 4, tower: Tower = Tower.TOWER_VISION) -> ModelInput:
    """What a tower takes."""
    return ModelInput(nbytes=nbytes, patches=patches, tower=tower)


def budgets(patches: int, frames: int | None = None) -> dict[Tower, int]:
    """What a batch may cost, for each tower; alike if only one is said."""
    return {Tower.TOWER_VISION: patches, Tower.TOWER_AUDIO: patches if frames is None else frames}


def layout(nbytes: int = 128) -> EmbeddingChunk:
    """What a media worker knows of a chunk."""
    spec = TensorSpec(name="embedding", dtype=DataType.DATA_TYPE_FLOAT32, shape=[nbytes // 4, 1], strides=[4, 4])
    return EmbeddingChunk(grid_dim=[1, 2, 2], token_count=nbytes // 4, tensors=[spec], nbytes=nbytes)


def item_inputs(nbytes: int = 64, patches: int = 4, frames: int = 0) -> list[ModelInput]:
    """What the towers take of an item; with frames of sound it is a video, whose inputs share the bytes."""
    if not frames:
        return [model_input(nbytes, patches)]
    if not patches:
        return [model_input(nbytes, frames, Tower.TOWER_AUDIO)]
    pictures = ModelInput(nbytes=nbytes // 2, patches=patches, tower=Tower.TOWER_VISION, matrices=1)
    sound = ModelInput(nbytes=nbytes, patches=frames, tower=Tower.TOWER_AUDIO, matrices=1, grid_dim=[frames])
    return [pictures, sound]


def item_result(part: int, reason: str = "", partial: bool = False) -> ItemResult:
    """How a forward went for a part; its checksum is its number."""
    if reason:
        return ItemResult(part=part, reason=reason, message="own words")
    if partial:
        return ItemResult(part=part)
    return ItemResult(part=part, checksum=Checksum(algorithm="CHECKSUM_ALGORITHM_XXH3_64", value=part))


class ComputationMaker:
    """Makes computations that belong to no scheduler."""

    def __init__(self) -> None:
        self._prompts: dict[str, Prompt] = {}
        self._keys = count(1)

    def __call__(
        self,
        prompt_id: str = "p",
        *,
        priority: int = 0,
        part_idx: int = 0,
        file_bytes: int = 10,
        stage: PartState = PartState.QUEUED,
        attempts: int = 0,
    ) -> Computation:
        return Computation(
            key=next(self._keys),
            item=MediaItem(part_idx=part_idx, modality=Modality.MODALITY_IMAGE),
            files=(bytes(file_bytes),),
            name=None,
            prompt=self._prompts.setdefault(prompt_id, Prompt("", prompt_id, len(self._prompts), 16)),
            priority=priority,
            begun_at=0.0,
            stage=stage,
            attempts=attempts,
        )


class ForwardMaker:
    """Makes forwards of one tower, each of a computation of its own."""

    def __init__(self) -> None:
        self._make = ComputationMaker()

    def __call__(
        self,
        prompt_id: str = "p",
        *,
        priority: int = 0,
        patches: int = 1,
        tower: Tower = Tower.TOWER_VISION,
        attempts: int = 0,
    ) -> Forward:
        computation = self._make(prompt_id, priority=priority, attempts=attempts)
        computation.measure(layout(), [model_input(patches=patches, tower=tower)])
        (forward,) = computation.forwards
        return forward


def part_of(computation: Computation | None) -> Part:
    """A part that belongs to no scheduler."""
    request = Request(encode_command(), Prompt("", "p", 0, 16), None, 0.0)
    return Part(1, request, MediaItem(modality=Modality.MODALITY_IMAGE), 10, 4, 0.0, computation=computation)


class Brain:
    """A scheduler with recording hands, a clock, and children that do as the test says."""

    def __init__(
        self,
        *,
        workers: int = 1,
        engines: int = 1,
        arena_bytes: int = 8192,
        budget: int = 16,
        started: bool = True,
        hands: RecordingHands | None = None,
        **rules: float,
    ) -> None:
        self.now = 100.0
        self.hands = hands if hands is not None else RecordingHands()
        self.observer = CountingObserver()
        self.arenas = [bytearray(arena_bytes) for _ in range(engines)]
        self.engines = [
            Engine(index, "cpu", SlotTable(index, memoryview(arena)), Batcher(budgets(budget)))
            for index, arena in enumerate(self.arenas)
        ]
        self.rules = replace(RULES, **rules)  # type: ignore[arg-type] # the test names fields of Rules
        writer = ChunkWriter("1" * 32, "127.0.0.1:1")
        self.scheduler = Scheduler(self.rules, self.engines, self.hands, writer, self.observer)
        if started:
            for index in range(engines):
                self.scheduler.engine_ready(index, ENGINE_READY, self.now)
            for index in range(workers):
                self.scheduler.media_worker_ready(index, self.now)

    def submit(self, command: EncodeCommand) -> Caller:
        """Submits a request."""
        caller = Caller(command)
        self.request = self.scheduler.submit(command, caller, self.now)
        return caller

    def advance(self, seconds: float) -> None:
        """Lets time pass, and what is due happen."""
        self.now += seconds
        self.scheduler.tick(self.now)

    def measure(
        self, worker: int = 0, *, nbytes: int = 128, input_bytes: int = 64, patches: int = 4, frames: int = 0
    ) -> int:
        """The worker knows the shape of its first item that it has not measured. Returns the part."""
        task = next(task for task in self.hands.tasks[worker] if not task.measured)
        task.measured, task.nbytes = True, input_bytes
        inputs = item_inputs(input_bytes, patches, frames)
        self.scheduler.item_measured(worker, task.part, layout(nbytes), inputs, self.now)
        return task.part

    def finish(self, worker: int = 0) -> int:
        """The worker has written the input of its first item, or says that it dropped it. Returns the part."""
        task = self.hands.tasks[worker].pop(0)
        if task.comes_back:
            self.scheduler.item_dropped(worker, task.part, self.now)
        else:
            assert task.offset is not None
            self.scheduler.item_prepared(worker, task.part, 0.5, self.now)
        return task.part

    def prepare_all(
        self, *, nbytes: int = 128, input_bytes: int = 64, patches: int = 4, frames: int = 0, worker: int = 0
    ) -> None:
        """The worker prepares everything that it can get."""
        while tasks := self.hands.tasks[worker]:
            if not tasks[0].dropped and not tasks[0].measured:
                self.measure(worker, nbytes=nbytes, input_bytes=input_bytes, patches=patches, frames=frames)
            self.finish(worker)

    def lose_worker(self, worker: int = 0) -> None:
        """The worker dies."""
        self.hands.tasks[worker].clear()
        self.scheduler.media_worker_lost(worker, self.now)

    def start_batch(self, engine: int = 0) -> None:
        """The engine begins the forward of its first batch."""
        batch = self.hands.batches[engine][0]
        batch.started = True
        self.scheduler.batch_started(engine, batch.id)

    def finish_batch(self, engine: int = 0, reasons: dict[int, str] | None = None) -> RunningBatch:
        """The engine has run its first batch; ``reasons`` says which parts failed."""
        batch = self.hands.batches[engine].pop(0)
        results = [item_result(item.part, (reasons or {}).get(item.part, ""), item.partial) for item in batch.items]
        self.scheduler.batch_done(engine, BatchDone(batch=batch.id, items=results), self.now)
        return batch

    def lose_engine(self, engine: int = 0) -> None:
        """The engine dies."""
        self.hands.batches[engine].clear()
        self.hands.verifies = [query for query in self.hands.verifies if query[0] != engine]
        self.hands.stopped_engines = [other for other in self.hands.stopped_engines if other != engine]
        self.scheduler.engine_lost(engine, self.now)

    def revive_engine(self, engine: int = 0) -> None:
        """The engine takes batches again."""
        self.scheduler.engine_ready(engine, ENGINE_READY, self.now)

    def run_all(self) -> None:
        """Every child answers everything."""
        while any(self.hands.tasks.values()) or any(self.hands.batches.values()):
            for worker in self.hands.tasks:
                self.prepare_all(worker=worker)
            for engine in self.hands.batches:
                while self.hands.batches[engine]:
                    self.finish_batch(engine)

    def ready_part(self, command: EncodeCommand | None = None, **sizes: int) -> Caller:
        """Takes one request to its end."""
        caller = self.submit(command or encode_command())
        self.prepare_all(**sizes)
        while self.hands.batches[0]:
            self.finish_batch()
        return caller

    @property
    def keys(self) -> list[int]:
        """The numbers under which the children know the last request's parts."""
        return [part.computation.key for part in self.request.parts if part.computation is not None]

    def assert_empty(self) -> None:
        """Nothing is held for anybody, nor cached."""
        scheduler, admission = self.scheduler, self.scheduler.admission
        assert len(scheduler.requests) == 0
        assert len(scheduler.store) == 0
        assert not scheduler.requests.live_parts()
        assert not self.hands.sources
        assert (admission.parts, admission.media_bytes, admission.patches) == (0, 0, 0)
        assert scheduler.preparation.input_bytes_taken == 0
        assert len(scheduler.leases) == 0
        for engine in self.engines:
            assert engine.slots.live == ()
            assert (engine.slots.reserved_bytes, engine.slots.leased_bytes, engine.load) == (0, 0, 0)
            assert engine.slots.cached_bytes == 0
            assert not engine.batches
