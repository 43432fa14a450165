"""The engine as a process: what it writes into slots, what it tells, and how items and processes fail."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file, save_file

from encoder_svc.models.adapter import Adapter, Tower, TowerInput
from encoder_svc.models.registry import open_adapter
from encoder_svc.shared_memory import SharedMemory
from encoder_svc.tensors import tensor_view
from epd.encoder.v1.embedding_pb2 import ChecksumAlgorithm, MooncakeLocator, Transport
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from epd.internal.v1.engine_pb2 import (
    BatchDone,
    BatchItem,
    EngineCommand,
    EngineReady,
    EngineReport,
    ItemResult,
    RunBatch,
    VerifySlot,
)
from tests.children import Child, await_death, configure_engine, engine, held
from tests.package_path import hiding

BYTES = 32 << 20
SIZES = ((56, 56), (112, 84), (84, 224), (28, 28))


class Pixels:
    """A decoded image, as ``media/`` gives one."""

    def __init__(self, width: int, height: int, seed: int = 0, brightest: int = 255) -> None:
        self.width, self.height = width, height
        random = np.random.default_rng(seed + width * height)
        values = random.integers(0, brightest + 1, (height, width, 3), dtype=np.uint8)
        self._values = torch.from_numpy(values)

    def decode(self) -> torch.Tensor:
        return self._values


class Bench:
    """The arenas of one engine, and items whose inputs are in place."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint
        self.adapter: Adapter = open_adapter(checkpoint, "float32")
        self.input_arena = SharedMemory.create("input", BYTES)
        self.arena = SharedMemory.create("arena", BYTES)

    def item(self, part: int, probe: Pixels) -> BatchItem:
        """Prepares an item; its input and slot have a MiB of their own."""
        media = MediaItem(modality=Modality.MODALITY_IMAGE)
        layout = self.adapter.measure(media, probe)
        offset = part << 20
        for spec, tensor in zip(layout.input.tensors, self.adapter.prepare(media, probe, layout), strict=True):
            tensor_view(self.input_arena, offset, spec).copy_(tensor)
        return BatchItem(
            part=part,
            modality=Modality.MODALITY_IMAGE,
            grid_dim=layout.chunk.grid_dim,
            input=layout.input,
            input_offset=offset,
            tensors=layout.chunk.tensors,
            payload_offset=offset + 64,
            nbytes=layout.chunk.nbytes,
        )

    def rows(self, item: BatchItem) -> torch.Tensor:
        """What the engine wrote."""
        return tensor_view(self.arena, item.payload_offset, item.tensors[0])

    def expected(self, tower: Tower, items: Sequence[BatchItem]) -> list[torch.Tensor]:
        """What the tower gives for the batch in this process."""
        inputs = [
            TowerInput(
                item.modality,
                tuple(item.grid_dim),
                tuple(tensor_view(self.input_arena, item.input_offset, spec) for spec in item.input.tensors),
            )
            for item in items
        ]
        with torch.inference_mode():
            return [matrices[0] for matrices in tower.encode(inputs)]

    def digest(self, item: BatchItem) -> int:
        return xxhash.xxh3_64_intdigest(self.arena.view[item.payload_offset : item.payload_offset + item.nbytes])

    def close(self) -> None:
        self.input_arena.close()
        self.arena.close()


@pytest.fixture(scope="module")
def bench(tiny_checkpoint: Path) -> Iterator[Bench]:
    made = Bench(tiny_checkpoint)
    yield made
    made.close()


@pytest.fixture(scope="module")
def tower(bench: Bench) -> Tower:
    return bench.adapter.load_tower(torch.device("cpu"), lambda step, fraction: None)


@pytest.fixture(scope="module")
def started(bench: Bench) -> Iterator[tuple[Child[EngineReport], EngineReport]]:
    """One engine, with Mooncake, for all tests that leave it alive; and its first report."""
    configuration = configure_engine(bench.checkpoint, bench.input_arena, bench.arena)
    with engine(configuration, bench.input_arena, bench.arena) as both:
        assert both[1].WhichOneof("report") == "ready", both[1]
        yield both


@pytest.fixture(scope="module")
def child(started: tuple[Child[EngineReport], EngineReport]) -> Child[EngineReport]:
    return started[0]


@pytest.fixture(scope="module")
def ready(started: tuple[Child[EngineReport], EngineReport]) -> EngineReady:
    return started[1].ready


def send_batch(child: Child[EngineReport], batch: int, items: Sequence[BatchItem]) -> None:
    child.send(EngineCommand(run=RunBatch(batch=batch, items=items)))


def run(child: Child[EngineReport], items: Sequence[BatchItem], batch: int = 1) -> BatchDone:
    send_batch(child, batch, items)
    assert child.receive_kind("started").started.batch == batch
    done = child.receive_kind("done").done
    assert done.batch == batch
    assert [result.part for result in done.items] == [item.part for item in items]
    return done


def test_it_tells_what_it_loaded(ready: EngineReady, bench: Bench, tower: Tower) -> None:
    assert len(bytes.fromhex(ready.boot_id)) == 16
    assert ready.model.name == bench.checkpoint.name
    assert ready.model.model_type == "qwen2_5_vl"
    assert ready.model.hidden_size == bench.adapter.hidden_size
    assert list(ready.model.tensors) == ["embedding"]
    assert ready.model.compatibility_fingerprint == tower.compatibility_fingerprint
    assert len(ready.model.cache_namespace) == 32
    assert ready.model.cache_namespace != ready.model.compatibility_fingerprint
    assert ready.model.weights == tower.weights
    assert {"encoder-svc", "torch", "transformers", "mooncake"} <= set(ready.versions)
    assert [locator.WhichOneof("location") for locator in ready.locators] == ["mooncake"]


def test_only_the_forward_is_nice(child: Child[EngineReport]) -> None:
    """The thread of the forward yields to the front; those that answer the link and serve Mooncake's readers do not."""
    niceness: dict[str, list[int]] = {}
    for task in Path(f"/proc/{child.process.pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            name, _, fields = (task / "stat").read_text().rpartition(") ")
            niceness.setdefault(name, []).append(int(fields.split()[16]))
    values = [value for group in niceness.values() for value in group]
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert os.getpriority(os.PRIO_PROCESS, child.process.pid) == own
    assert values.count(min(own + 10, 19)) >= 1, niceness
    assert values.count(own) >= 4, niceness  # main, ZeroMQ's two, and Mooncake's


def test_embeddings_are_the_towers(child: Child[EngineReport], bench: Bench, tower: Tower) -> None:
    items = [bench.item(part, Pixels(*size)) for part, size in enumerate(SIZES)]
    bench.arena.view[:] = bytes(BYTES)
    done = run(child, items)
    assert done.forward_nanoseconds > 0
    assert done.stage_nanoseconds > 0
    for item, result, expected in zip(items, done.items, bench.expected(tower, items), strict=True):
        assert not result.reason
        torch.testing.assert_close(bench.rows(item), expected, atol=1e-5, rtol=0)
        assert bench.rows(item).abs().max() > 0
        assert result.checksum.algorithm == ChecksumAlgorithm.CHECKSUM_ALGORITHM_XXH3_64
        assert result.checksum.value == bench.digest(item)
    written = bytearray(bench.arena.view)
    for item in items:
        written[item.payload_offset : item.payload_offset + item.nbytes] = bytes(item.nbytes)
    assert not any(written), "bytes outside the slots were written"


def test_batches_run_in_their_order_and_the_link_answers_meanwhile(child: Child[EngineReport], bench: Bench) -> None:
    items = [bench.item(part, Pixels(224, 224, seed=part)) for part in range(8)]
    with held(child):  # so that all batches are queued before the first one runs
        for batch in range(30):
            send_batch(child, batch, items)
        child.send(EngineCommand(verify=VerifySlot(query=7, payload_offset=64, nbytes=4096)))
    reports = [child.receive() for _ in range(61)]
    kinds = [report.WhichOneof("report") for report in reports]
    assert kinds.index("verified") < len(kinds) - 1, "the answer waited for all batches"
    started = [report.started.batch for report in reports if report.WhichOneof("report") == "started"]
    done = [report.done.batch for report in reports if report.WhichOneof("report") == "done"]
    assert started == done == list(range(30))


def test_a_slot_is_verified_as_it_is_now(child: Child[EngineReport], bench: Bench) -> None:
    item = bench.item(0, Pixels(56, 56))
    result = run(child, [item]).items[0]
    question = EngineCommand(verify=VerifySlot(query=3, payload_offset=item.payload_offset, nbytes=item.nbytes))
    child.send(question)
    verified = child.receive_kind("verified").verified
    assert (verified.query, verified.checksum) == (3, result.checksum)
    bench.arena.view[item.payload_offset + 5] ^= 1
    child.send(question)
    assert child.receive_kind("verified").verified.checksum != result.checksum


@pytest.mark.parametrize("position", range(4))
def test_f05_an_item_that_raises_fails_alone(
    child: Child[EngineReport], bench: Bench, tower: Tower, position: int
) -> None:
    items = [bench.item(part, Pixels(*size)) for part, size in enumerate(SIZES)]
    items[position].grid_dim[2] += 2  # more patches than its input has
    done = run(child, items)
    good = [item for index, item in enumerate(items) if index != position]
    for item, result in zip(items, done.items, strict=True):
        assert result.reason == ("FORWARD_FAILED" if item is items[position] else "")
        assert result.HasField("checksum") == (item is not items[position])
    for item, expected in zip(good, bench.expected(tower, good), strict=True):
        torch.testing.assert_close(bench.rows(item), expected, atol=1e-4, rtol=0)


READER = """
import mmap, ctypes, sys
import xxhash
from mooncake.engine import TransferEngine
session = sys.argv[1]
engine = TransferEngine()
assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
memory = mmap.mmap(-1, 32 << 20)
local = ctypes.addressof(ctypes.c_char.from_buffer(memory))
assert engine.register_memory(local, 32 << 20) == 0
for argument in sys.argv[2:]:
    address, nbytes = map(int, argument.split(":"))
    assert engine.transfer_sync_read(session, local, address, nbytes) == 0, argument
    print(xxhash.xxh3_64_intdigest(memory[:nbytes]))
"""


def mooncake(ready: EngineReady) -> MooncakeLocator:
    """Where Mooncake reads the arena."""
    (locator,) = (locator.mooncake for locator in ready.locators if locator.HasField("mooncake"))
    return locator


def read_by_mooncake(ready: EngineReady, items: Sequence[BatchItem]) -> list[int]:
    """Checksums of the slots as a process of its own reads them."""
    place = mooncake(ready)
    # A locator names the payload of the slot at the arena's start, 64 bytes behind its header.
    slots = [f"{place.address + item.payload_offset - 64}:{item.nbytes}" for item in items]
    result = subprocess.run(
        [sys.executable, "-c", READER, place.session, *slots],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"MC_LOG_LEVEL": "ERROR"},
    )
    return [int(line) for line in result.stdout.split()]


def test_f09_f14_mooncake_reads_every_slot_of_the_arena_registered_once(
    child: Child[EngineReport], ready: EngineReady, bench: Bench
) -> None:
    assert [info.transport for info in ready.transports if info.available] == [
        Transport.TRANSPORT_MOONCAKE,
        Transport.TRANSPORT_INLINE,
    ]
    items = [bench.item(part, Pixels(*SIZES[part % 4], seed=part)) for part in (0, 1, 2, 15, 31)]
    results: list[ItemResult] = []
    for batch, item in enumerate(items):  # slots all over the arena, filled after it was registered
        results += run(child, [item], batch).items
    expected = [result.checksum.value for result in results]
    assert len(set(expected)) == len(items)
    assert read_by_mooncake(ready, items) == expected


def test_f41_two_engines_on_one_address_are_two(
    child: Child[EngineReport], ready: EngineReady, bench: Bench, tiny_checkpoint: Path
) -> None:
    other = Bench(tiny_checkpoint)
    configuration = configure_engine(tiny_checkpoint, other.input_arena, other.arena)
    with engine(configuration, other.input_arena, other.arena) as (second, report):
        assert report.ready.boot_id != ready.boot_id
        assert mooncake(report.ready).session != mooncake(ready).session
        assert report.ready.model == ready.model
        mine, theirs = bench.item(1, Pixels(56, 56, seed=1)), other.item(1, Pixels(56, 56, seed=2))
        first = run(child, [mine]).items[0].checksum.value
        last = run(second, [theirs]).items[0].checksum.value
        assert first != last
        assert read_by_mooncake(ready, [mine]) == [first]
        assert read_by_mooncake(report.ready, [theirs]) == [last]
    other.close()


def test_f43_it_starts_without_mooncake_and_says_why(bench: Bench, tmp_path: Path) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text('raise ImportError("libibverbs.so.1: cannot open shared object file")')
    # Nor does this family's engine need what takes longest to import.
    (tmp_path / "transformers.py").write_text('raise ImportError("not needed")')
    configuration = configure_engine(bench.checkpoint, bench.input_arena, bench.arena)
    environment = hiding(tmp_path)
    with engine(configuration, bench.input_arena, bench.arena, environment) as (child, report):
        transports = {info.transport: info for info in report.ready.transports}
        assert transports[Transport.TRANSPORT_INLINE].available
        assert not transports[Transport.TRANSPORT_MOONCAKE].available
        assert "apt-get install libibverbs1" in transports[Transport.TRANSPORT_MOONCAKE].reason
        assert not report.ready.locators
        assert not run(child, [bench.item(0, Pixels(56, 56))]).items[0].reason


@pytest.fixture(scope="module")
def fragile_checkpoint(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose first channel overflows where a bright pixel stands beside a black one, and only there."""
    folder = tmp_path_factory.mktemp("fragile") / "checkpoint"
    shutil.copytree(tiny_checkpoint, folder)
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(name for name in index if name.endswith("patch_embed.proj.weight"))
    tensors = load_file(folder / index[name])
    tensors[name][0] = 0
    tensors[name][0, 0, 0, 0, 0] = 1.5e38
    tensors[name][0, 0, 0, 0, 1] = -1.5e38
    save_file(tensors, folder / index[name], {"format": "pt"})
    return folder


@pytest.mark.parametrize("position", [0, 1, 2])
def test_f37_an_embedding_that_is_not_finite_fails_alone(
    fragile: tuple[Bench, Child[EngineReport]], position: int
) -> None:
    bench, child = fragile
    dim = [Pixels(56, 56, seed=part, brightest=100) for part in range(3)]
    dim[position].decode()[0, :2, :] = torch.tensor([[255], [0]])
    items = [bench.item(part, pixels) for part, pixels in enumerate(dim)]
    done = run(child, items)
    for index, (item, result) in enumerate(zip(items, done.items, strict=True)):
        assert result.reason == ("OUTPUT_NOT_FINITE" if index == position else "")
        assert result.HasField("checksum") == (index != position)
        if index != position:
            assert bool(torch.isfinite(bench.rows(item)).all())


@pytest.fixture(scope="module")
def fragile(fragile_checkpoint: Path) -> Iterator[tuple[Bench, Child[EngineReport]]]:
    bench = Bench(fragile_checkpoint)
    configuration = configure_engine(bench.checkpoint, bench.input_arena, bench.arena, mooncake=False)
    with engine(configuration, bench.input_arena, bench.arena) as (child, report):
        reasons = {info.transport: info.reason for info in report.ready.transports}
        assert "mooncake" in reasons[Transport.TRANSPORT_MOONCAKE]
        yield bench, child
    bench.close()


def test_f43_a_broken_torchvision_is_told(tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")')
    program = "from encoder_svc.engine.loading import check_transformers; check_transformers()"
    told = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | hiding(tmp_path),
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 1
    assert "encoder-svc doctor" in told.stderr


def test_a_device_that_is_not_there_is_told(bench: Bench) -> None:
    configuration = configure_engine(bench.checkpoint, bench.input_arena, bench.arena, device="cuda:63")
    with engine(configuration, bench.input_arena, bench.arena) as (child, report):
        assert "cuda:63" in report.child_failed.message
        assert "cpu" in report.child_failed.message
        assert child.process.wait() == 1


FRONT = """
import sys
from pathlib import Path
from epd.internal.v1.engine_pb2 import EngineCommand
from encoder_svc.shared_memory import SharedMemory
from safetensors.torch import load_file, save_file
from tests.children import engine
configuration, batch = (EngineCommand.FromString(Path(file).read_bytes()) for file in sys.argv[1:3])
asked = configuration.configure
input_arena = SharedMemory(asked.input_arena_fd, asked.input_arena_bytes)
arena = SharedMemory(asked.arena_fd, asked.arena_bytes)
with engine(configuration, input_arena, arena) as (child, _):
    for _ in range(1000):
        child.send(batch)
    child.receive_kind("started")
    shared_files = Path(f"/proc/{child.process.pid}/maps").read_text().count("/dev/shm")
    print(child.process.pid, shared_files, flush=True)
    while True:
        child.receive()
"""


def test_it_dies_with_the_front_during_a_forward(bench: Bench, tmp_path: Path) -> None:
    configuration, batch = tmp_path / "configuration", tmp_path / "batch"
    configuration.write_bytes(
        configure_engine(bench.checkpoint, bench.input_arena, bench.arena, mooncake=False).SerializeToString()
    )
    items = [bench.item(part, Pixels(224, 224)) for part in range(8)]
    batch.write_bytes(EngineCommand(run=RunBatch(batch=1, items=items)).SerializeToString())
    with subprocess.Popen(
        [sys.executable, "-c", FRONT, str(configuration), str(batch)],
        pass_fds=[bench.input_arena.descriptor, bench.arena.descriptor],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as front:
        assert front.stdout is not None
        engine_pid, shared_files = map(int, front.stdout.readline().split())
        os.kill(engine_pid, 0)
        front.kill()
    await_death(engine_pid)
    assert shared_files == 0
