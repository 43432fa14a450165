"""The runner by itself: how a batch is split when items fail, and what reaches the slots.

The towers here are few lines long, so that any item can be made to raise, to exhaust memory, or to give NaN.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_svc.engine.forward_thread import run_batches
from encoder_svc.engine.runner import Runner, is_out_of_memory
from encoder_svc.engine.staging import HostFence, HostStaging
from encoder_svc.errors import Reason, ServiceError
from encoder_svc.models.adapter import MATRIX_ALIGNMENT, TowerInput
from encoder_svc.shared_memory import SharedMemory
from encoder_svc.tensors import tensor_view
from epd.encoder.v1.embedding_pb2 import DataType, TensorSpec
from epd.encoder.v1.encoder_service_pb2 import WeightsInfo
from epd.encoder.v1.media_pb2 import Modality
from epd.internal.v1.engine_pb2 import BatchItem, EngineReport, RunBatch
from epd.internal.v1.media_worker_pb2 import ModelInput

SOUND, RAISES, EXHAUSTS, REFUSES, NAN, INFINITE, SHORT = range(7)
REASONS = {
    SOUND: "",
    RAISES: Reason.FORWARD_FAILED,
    EXHAUSTS: Reason.OUT_OF_MEMORY,
    REFUSES: Reason.MEDIA_UNSUPPORTED,
    NAN: Reason.OUTPUT_NOT_FINITE,
    INFINITE: Reason.OUTPUT_NOT_FINITE,
    SHORT: Reason.FORWARD_FAILED,
}
HIDDEN, LEVELS = 6, 2


class FragileTower:
    """Gives for an item of n bytes n rows, each filled with its byte; the item's grid tells what it does instead."""

    weights = WeightsInfo()
    compatibility_fingerprint = bytes(32)

    def __init__(self, width: int, dtype: torch.dtype = torch.float32, most: int = 1 << 30) -> None:
        self._width, self._dtype, self._most = width, dtype, most
        self.batches: list[int] = []

    def encode(self, items: Sequence[TowerInput]) -> list[tuple[torch.Tensor, ...]]:
        self.batches.append(len(items))
        if len(items) > self._most:
            raise torch.OutOfMemoryError
        encoded: list[tuple[torch.Tensor, ...]] = []
        for item in items:
            fate = item.grid[0]
            if fate == RAISES:
                raise RuntimeError("a secret of the kernel")
            if fate == EXHAUSTS:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            if fate == REFUSES:
                raise ServiceError(Reason.MEDIA_UNSUPPORTED, "not this one")
            found = item.tensors[0].to(self._dtype)[:, None].repeat(1, self._width)
            found[:, -1] += torch.arange(len(found))
            if fate == NAN:
                found[-1, -1] = torch.nan
            if fate == INFINITE:
                found[0, 0] = -torch.inf
            encoded.append((found[:-1] if fate == SHORT else found,))
        return encoded


@pytest.fixture(scope="module")
def arenas() -> Iterator[tuple[SharedMemory, SharedMemory]]:
    pair = SharedMemory.create("input", 1 << 20), SharedMemory.create("arena", 1 << 20)
    yield pair
    for block in pair:
        block.close()


def item(input_arena: SharedMemory, part: int, rows: int, fate: int, width: int, dtype: DataType) -> BatchItem:
    size = 4 if dtype == DataType.DATA_TYPE_FLOAT32 else 2
    offset = part * 8192
    input_arena.array(offset, rows)[:] = part + 1
    hidden = width // (1 + LEVELS) if width % (1 + LEVELS) == 0 else width
    return BatchItem(
        part=part,
        modality=Modality.MODALITY_IMAGE,
        grid_dim=[fate],
        input=ModelInput(
            tensors=[TensorSpec(name="x", dtype=DataType.DATA_TYPE_UINT8, shape=[rows], strides=[1])], nbytes=rows
        ),
        input_offset=offset,
        tensors=[
            TensorSpec(
                name="embedding" if column == 0 else f"deepstack_{column // hidden - 1}",
                dtype=dtype,
                shape=[rows, hidden],
                strides=[width * size, size],
                byte_offset=column * size,
            )
            for column in range(0, width, hidden)
        ],
        payload_offset=offset + 64,
        nbytes=rows * width * size,
    )


@settings(max_examples=60, deadline=None)
@given(batch=st.lists(st.tuples(st.sampled_from(sorted(REASONS)), st.integers(2, 40)), min_size=1, max_size=17))
def test_f05_f37_every_bad_item_fails_alone(
    arenas: tuple[SharedMemory, SharedMemory], batch: list[tuple[int, int]]
) -> None:
    input_arena, arena = arenas
    arena.view[:] = bytes(arena.size)
    width = HIDDEN * (1 + LEVELS)
    tower = FragileTower(width)
    items = [
        item(input_arena, part, rows, fate, width, DataType.DATA_TYPE_FLOAT32)
        for part, (fate, rows) in enumerate(batch)
    ]
    outcome = Runner(tower, torch.device("cpu"), input_arena, arena, HostStaging()).run(items)
    assert [result.part for result in outcome.results] == list(range(len(batch)))
    for asked, result, (fate, rows) in zip(items, outcome.results, batch, strict=True):
        assert result.reason == REASONS[fate]
        payload = arena.array(asked.payload_offset, asked.nbytes)
        if fate == SOUND:
            assert result.checksum.value == xxhash.xxh3_64_intdigest(payload.tobytes())
            for spec in asked.tensors[:-1]:
                assert (tensor_view(arena, asked.payload_offset, spec) == asked.part + 1).all()
            last = tensor_view(arena, asked.payload_offset, asked.tensors[-1])
            assert torch.equal(last[:, -1], torch.arange(rows) + asked.part + 1.0)
        else:
            assert not result.HasField("checksum")
            assert result.message
            assert "secret" not in result.message
            assert not payload.any(), "a failed item wrote its slot"


def test_f03_a_batch_that_exhausts_memory_is_split_until_it_fits(arenas: tuple[SharedMemory, SharedMemory]) -> None:
    tower = FragileTower(HIDDEN, most=2)
    items = [item(arenas[0], part, 4, SOUND, HIDDEN, DataType.DATA_TYPE_FLOAT32) for part in range(8)]
    outcome = Runner(tower, torch.device("cpu"), *arenas, HostStaging()).run(items)
    assert not any(result.reason for result in outcome.results)
    assert tower.batches == [8, 4, 2, 2, 4, 2, 2]


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.bfloat16, DataType.DATA_TYPE_BFLOAT16), (torch.float16, DataType.DATA_TYPE_FLOAT16)],
)
@pytest.mark.parametrize("fate", [SOUND, NAN, INFINITE])
def test_half_precision_is_written_and_checked(
    arenas: tuple[SharedMemory, SharedMemory], dtype: torch.dtype, kind: DataType, fate: int
) -> None:
    asked = item(arenas[0], 3, 5, fate, HIDDEN, kind)
    outcome = Runner(FragileTower(HIDDEN, dtype), torch.device("cpu"), *arenas, HostStaging()).run([asked])
    assert outcome.results[0].reason == REASONS[fate]
    if fate == SOUND:
        assert (tensor_view(arenas[1], asked.payload_offset, asked.tensors[0])[:, 0] == 4).all()


def test_f13_rows_of_another_dtype_than_the_layouts_are_not_written(arenas: tuple[SharedMemory, SharedMemory]) -> None:
    asked = item(arenas[0], 0, 5, SOUND, HIDDEN, DataType.DATA_TYPE_FLOAT32)
    runner = Runner(FragileTower(HIDDEN, torch.bfloat16), torch.device("cpu"), *arenas, HostStaging())
    assert runner.run([asked]).results[0].reason == Reason.FORWARD_FAILED


class StoppedError(Exception):
    """Ends a loop that has no end."""


class DeviceStaging(HostStaging):
    """A device that is given one batch ahead."""

    ahead = 1


@pytest.mark.parametrize(
    ("staging", "told"),
    [
        (HostStaging(), ["started 0", "done 0", "started 1", "done 1", "started 2", "done 2"]),
        (DeviceStaging(), ["started 0", "started 1", "done 0", "started 2", "done 1", "done 2"]),
    ],
)
def test_a_device_gets_the_next_batch_before_the_last_is_staged(
    arenas: tuple[SharedMemory, SharedMemory], staging: HostStaging, told: list[str]
) -> None:
    batches: queue.SimpleQueue[RunBatch] = queue.SimpleQueue()
    for number in range(3):
        items = [item(arenas[0], number, 5, SOUND, HIDDEN, DataType.DATA_TYPE_FLOAT32)]
        batches.put(RunBatch(batch=number, items=items))
    seen: list[str] = []

    def report(message: EngineReport) -> None:
        kind = message.WhichOneof("report")
        assert kind in ("started", "done")
        seen.append(f"{kind} {getattr(message, kind).batch}")
        if message.done.batch == 2:
            assert not message.done.items[0].reason
            raise StoppedError

    with pytest.raises(StoppedError):
        run_batches(Runner(FragileTower(HIDDEN), torch.device("cpu"), *arenas, staging), batches, report)
    assert seen == told


class LateDevice(FragileTower):
    """Gives rows that are not computed yet: they are when somebody waits for a fence behind them."""

    ahead = 1

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self._given: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What it has been given to compute and has not: where the result goes, and the result."""

    def encode(self, items: Sequence[TowerInput]) -> list[tuple[torch.Tensor, ...]]:
        encoded = super().encode(items)
        unborn = [(torch.full_like(rows, -1.0),) for (rows,) in encoded]
        self._given += [(empty, rows) for (empty,), (rows,) in zip(unborn, encoded, strict=True)]
        return list(unborn)

    def fence(self) -> LateFence:
        return LateFence(self, len(self._given))

    def come_to(self, place: int) -> None:
        for empty, rows in self._given[:place]:
            empty.copy_(rows)

    def copy(self, rows: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]) -> None:
        HostStaging().copy(rows, slots)


class LateFence(HostFence):
    """A place in what a late device has been given."""

    def __init__(self, device: LateDevice, place: int) -> None:
        super().__init__()
        self._device, self._place = device, place

    def wait(self) -> None:
        self._device.come_to(self._place)


def test_f15_rows_are_read_behind_the_fence_of_their_own_batch(arenas: tuple[SharedMemory, SharedMemory]) -> None:
    batches: queue.SimpleQueue[RunBatch] = queue.SimpleQueue()
    asked = [item(arenas[0], number, 5, SOUND, HIDDEN, DataType.DATA_TYPE_FLOAT32) for number in range(3)]
    for number, one in enumerate(asked):
        batches.put(RunBatch(batch=number, items=[one]))
    device = LateDevice(HIDDEN)

    def report(message: EngineReport) -> None:
        if message.WhichOneof("report") != "done":
            return
        number = message.done.batch
        payload = arenas[1].array(asked[number].payload_offset, asked[number].nbytes)
        assert (
            tensor_view(arenas[1], asked[number].payload_offset, asked[number].tensors[0])[:, 0] == number + 1
        ).all()
        assert message.done.items[0].checksum.value == xxhash.xxh3_64_intdigest(payload.tobytes())
        if number == len(asked) - 1:
            raise StoppedError

    with pytest.raises(StoppedError):
        run_batches(Runner(device, torch.device("cpu"), *arenas, device), batches, report)


class PooledTower(FragileTower):
    """Gives beside its rows their mean, as one row of a second matrix."""

    def encode(self, items: Sequence[TowerInput]) -> list[tuple[torch.Tensor, ...]]:
        return [(rows, rows.mean(dim=0, keepdim=True)) for (rows,) in super().encode(items)]


def test_a_second_matrix_begins_behind_the_first(arenas: tuple[SharedMemory, SharedMemory]) -> None:
    input_arena, arena = arenas
    width = 7
    arena.view[:] = bytes(arena.size)
    asked = item(input_arena, 0, 3, SOUND, width, DataType.DATA_TYPE_FLOAT32)
    first = asked.nbytes
    asked.tensors.append(
        TensorSpec(
            name="pooled",
            dtype=DataType.DATA_TYPE_FLOAT32,
            shape=[1, width],
            strides=[width * 4, 4],
            byte_offset=-(-first // MATRIX_ALIGNMENT) * MATRIX_ALIGNMENT,
        )
    )
    asked.nbytes = asked.tensors[1].byte_offset + width * 4
    runner = Runner(PooledTower(width), torch.device("cpu"), input_arena, arena, HostStaging())
    (result,) = runner.run([asked]).results
    rows, pooled = (tensor_view(arena, asked.payload_offset, spec) for spec in asked.tensors)
    assert torch.equal(pooled[0], rows.mean(dim=0))
    assert result.checksum.value == xxhash.xxh3_64_intdigest(arena.array(asked.payload_offset, asked.nbytes).tobytes())

    asked.tensors[1].byte_offset += 4
    assert runner.run([asked]).results[0].reason == Reason.FORWARD_FAILED, "a gap was not noticed"


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_items_fill_one_slot_and_the_last_sums_it_up(
    arenas: tuple[SharedMemory, SharedMemory], order: tuple[int, int]
) -> None:
    input_arena, arena = arenas
    arena.view[:] = bytes(arena.size)
    halves = [
        item(input_arena, part, rows, SOUND, HIDDEN, DataType.DATA_TYPE_FLOAT32) for part, rows in ((0, 3), (1, 5))
    ]
    pictures, sound = halves
    begin = -(-pictures.nbytes // MATRIX_ALIGNMENT) * MATRIX_ALIGNMENT
    for spec in sound.tensors:
        spec.byte_offset += begin
    specs, whole = [*pictures.tensors, *sound.tensors], begin + sound.nbytes
    for number, half in enumerate(halves):
        half.input.matrices, half.first_matrix, half.partial = 1, number, number == order[0]
        del half.tensors[:]
        half.tensors.extend(specs)
        half.payload_offset, half.nbytes = 64, whole
    runner = Runner(FragileTower(HIDDEN), torch.device("cpu"), input_arena, arena, HostStaging())
    first, last = (runner.run([halves[number]]).results[0] for number in order)
    assert (first.reason, first.HasField("checksum")) == ("", False)
    assert last.checksum.value == xxhash.xxh3_64_intdigest(arena.array(64, whole).tobytes())
    for number, spec in enumerate((specs[0], specs[LEVELS + 1])):
        assert (tensor_view(arena, 64, spec)[:, 0] == number + 1).all()

    sound.input.tensors[0].shape[0] -= 1
    assert runner.run([sound]).results[0].reason == Reason.FORWARD_FAILED, "the half of another size was not noticed"


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: not enough memory"),
        RuntimeError("std::bad_alloc"),
        RuntimeError("CUDA error: out of memory"),
    ],
)
def test_f03_too_little_memory_is_known_by_every_name(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_f03_the_allocator_of_the_cpu_is_among_them() -> None:
    with pytest.raises((RuntimeError, MemoryError)) as raised:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)
