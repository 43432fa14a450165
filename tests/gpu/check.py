"""Checks one device in a few minutes: ``python tests/gpu/check.py [--device cuda:0] [--json FILE]``.

Needs the installed project and nothing else; the checkpoint is a random one, written into a temporary folder. On a GPU
it takes the preset ``base``, elsewhere ``tiny``. It ends with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from PIL import Image
from rich.console import Console
from rich.table import Table
from transformers import Qwen2_5_VLForConditionalGeneration

from encoder_client import ClientSettings, EncoderClient, image
from encoder_svc.bench.service import Service
from encoder_svc.checkpoints import write_checkpoint
from encoder_svc.engine.batch_budget import MOST, measure_tower
from encoder_svc.engine.runner import BatchOutcome, LaunchedBatch, Runner
from encoder_svc.engine.staging import Staging, make_staging
from encoder_svc.models.adapter import Adapter, Tower, TowerInput
from encoder_svc.models.dtypes import DATA_TYPES, ELEMENT_BYTES
from encoder_svc.models.registry import open_adapter
from encoder_svc.shared_memory import SharedMemory
from encoder_svc.tensors import tensor_view
from epd.encoder.v1.embedding_pb2 import DataType, TensorSpec
from epd.encoder.v1.media_pb2 import Modality
from epd.internal.v1.engine_pb2 import BatchItem
from epd.internal.v1.media_worker_pb2 import ModelInput
from epd.rdma_devices import rdma_fault

PATCH, VALUES, MERGE = 14, 588, 2
MEAN = torch.tensor((0.48145466, 0.4578275, 0.40821073))
DEVIATION = torch.tensor((0.26862954, 0.26130258, 0.27577711))
ATOL = 1e-4
HALF_ATOL = 8e-2
MIXED = ((1, 16, 16), (1, 4, 4), (1, 10, 6), (1, 32, 32), (1, 16, 24), (1, 8, 8))
"""Grids with whole and cut windows."""
ALONE = 32
"""Images of a round of the bare loop that takes one at a time."""
UNWRITTEN = 0xFF
SLOT_HEADER = 64


@dataclass
class Check:
    """What was asked, and what came of it."""

    name: str
    passed: bool
    figures: dict[str, float | str] = field(default_factory=dict)


@dataclass
class Bench:
    """A device with the towers of one type, its arenas, and transformers' own tower beside it."""

    device: torch.device
    dtype: str
    adapter: Adapter
    tower: Tower
    reference: Any
    input_arena: SharedMemory
    arena: SharedMemory
    staging: Staging

    @classmethod
    def open(cls, checkpoint: Path, device: torch.device, dtype: str, arena_bytes: int) -> Bench:
        adapter = open_adapter(checkpoint, dtype)
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
        reference = model.model.visual.eval().to(device)
        tower = adapter.load_tower(device, lambda _step, _fraction: None)
        input_arena, arena = (SharedMemory.create(name, arena_bytes) for name in ("input", "arena"))
        staging = make_staging(device, input_arena, arena)
        return cls(device, dtype, adapter, tower, reference, input_arena, arena, staging)

    def runner(self, tower: Tower | None = None) -> Runner:
        return Runner(tower or self.tower, self.device, self.input_arena, self.arena, self.staging)

    @torch.inference_mode()
    def transformers_rows(self, inputs: Sequence[TowerInput]) -> list[torch.Tensor]:
        """What transformers gives for a batch, on the device."""
        patches = torch.cat([one.tensors[0] for one in inputs]).to(self.device)
        values = patches.view(-1, 3, 1, PATCH * PATCH).float() / 255
        mean, deviation = (constant.to(self.device).view(1, 3, 1, 1) for constant in (MEAN, DEVIATION))
        pixels = ((values - mean) / deviation).expand(-1, 3, 2, -1).reshape(-1, 2 * VALUES)
        grids = torch.tensor([one.grid for one in inputs], device=self.device)
        rows: torch.Tensor = self.reference(pixels.to(getattr(torch, self.dtype)), grids).pooler_output
        return list(rows.split([rows_of(one.grid) for one in inputs]))

    def items(self, inputs: Sequence[TowerInput], first: int = 0) -> list[BatchItem]:
        """Puts inputs into the input arena, and gives each a slot that nobody has written."""
        width, element = self.adapter.hidden_size, ELEMENT_BYTES[self.dtype]
        items = []
        for part, one in enumerate(inputs, first):
            patches, rows = len(one.tensors[0]), rows_of(one.grid)
            room = -(-max(patches * VALUES, rows * width * element + SLOT_HEADER) // 4096) * 4096
            spec = TensorSpec(name="patches", dtype=DataType.DATA_TYPE_UINT8, shape=(patches, VALUES))
            spec.strides.extend((VALUES, 1))
            tensor_view(self.input_arena, part * room, spec).copy_(one.tensors[0])
            nbytes = rows * width * element
            payload = part * room + SLOT_HEADER
            self.arena.array(payload, nbytes)[:] = UNWRITTEN
            matrix = TensorSpec(name="embedding", dtype=DATA_TYPES[self.dtype], shape=(rows, width))
            matrix.strides.extend((width * element, element))
            items.append(
                BatchItem(
                    part=part, modality=one.modality, grid_dim=one.grid, input_offset=part * room,
                    input=ModelInput(tensors=[spec], nbytes=patches * VALUES, patches=patches),
                    tensors=[matrix], payload_offset=payload, nbytes=nbytes,
                )
            )  # fmt: skip
        return items

    def digest(self, item: BatchItem) -> int:
        return xxhash.xxh3_64_intdigest(self.arena.view[item.payload_offset : item.payload_offset + item.nbytes])


def embed(tower: Tower, inputs: Sequence[TowerInput]) -> list[torch.Tensor]:
    """The rows of each item of a batch."""
    return [matrices[0] for matrices in tower.encode(inputs)]


def rows_of(grid: Sequence[int]) -> int:
    return grid[0] * grid[1] * grid[2] // MERGE**2


def pictures(grids: Sequence[tuple[int, int, int]], seed: int = 0) -> list[TowerInput]:
    """Noise of these grids."""
    random = torch.Generator().manual_seed(seed)
    return [
        TowerInput(
            Modality.MODALITY_IMAGE,
            grid,
            (torch.randint(0, 256, (grid[1] * grid[2], VALUES), dtype=torch.uint8, generator=random),),
        )
        for grid in grids
    ]


def check_float32(bench: Bench) -> Check:
    """Rows equal transformers' within 1e-4, and those of a batch equal those of its items alone."""
    inputs = pictures(MIXED)
    rows = embed(bench.tower, inputs)
    to_reference = farthest(rows, bench.transformers_rows(inputs))
    to_single = farthest(rows, [embed(bench.tower, [one])[0] for one in inputs])
    return Check(
        "float32 equals transformers",
        max(to_reference, to_single) <= ATOL,
        {"max error": to_reference, "batch against single": to_single},
    )


def check_half(exact: Bench, half: Bench) -> Check:
    """In half precision rows are as near to float32's as transformers' own are."""
    inputs = pictures(MIXED)
    truth = torch.cat(exact.transformers_rows(inputs))
    theirs = (torch.cat(half.transformers_rows(inputs)).float() - truth).abs().mean().item()
    rows = torch.cat(embed(half.tower, inputs)).float()
    ours = (rows - truth).abs().mean().item()
    cosine = torch.nn.functional.cosine_similarity(rows, truth).min().item()
    return Check(
        f"{half.dtype} is as near as transformers'",
        ours <= 1.5 * theirs and cosine > 0.99,
        {"mean error": ours, "transformers'": theirs, "least cosine": cosine},
    )


def check_order(bench: Bench, grid: tuple[int, int, int], batch: int, batches: int) -> Check:
    """Whatever is reported is in its slot: sums of the slot, taken at once and later, are the one that was reported."""
    runner = bench.runner()
    flights = [bench.items(pictures([grid] * batch, number), number * batch) for number in range(batches)]
    wrong = 0

    def look(items: Sequence[BatchItem], outcome: BatchOutcome) -> None:
        nonlocal wrong
        for item, result in zip(items, outcome.results, strict=True):
            wrong += bool(result.reason) or result.checksum.value != bench.digest(item)

    expected = []
    for items in flights:
        look(items, runner.run(items))
        for item in items:
            expected.append(tensor_view(bench.arena, item.payload_offset, item.tensors[0]).clone())
            bench.arena.array(item.payload_offset, item.nbytes)[:] = UNWRITTEN
    outcomes = pipelined(runner, flights, look)
    for items, outcome in zip(flights, outcomes, strict=True):
        look(items, outcome)
    slots = [tensor_view(bench.arena, item.payload_offset, item.tensors[0]) for items in flights for item in items]
    distance = farthest(slots, expected)
    wrong += not distance <= HALF_ATOL  # NaN, which unwritten bytes are, is not
    return Check("no slot is told before its bytes", not wrong, {"slots": len(slots), "wrong": wrong})


def pipelined(
    runner: Runner,
    flights: Sequence[list[BatchItem]],
    look: Callable[[Sequence[BatchItem], BatchOutcome], None] = lambda _items, _outcome: None,
) -> list[BatchOutcome]:
    """Runs batches as an engine does that always has one more."""
    launched: list[LaunchedBatch] = []
    outcomes: list[BatchOutcome] = []

    def finish() -> None:
        first = launched.pop(0)
        outcomes.append(runner.finish(first))
        look(first.items, outcomes[-1])

    for items in flights:
        launched.append(runner.launch(items))
        while len(launched) > runner.ahead:
            finish()
    while launched:
        finish()
    return outcomes


def check_speed(bench: Bench, side: int, budget: int, rounds: int) -> Check:
    """Images a second into the arena, against transformers' tower in a bare loop; all in turns, medians."""
    grid = (1, side // PATCH, side // PATCH)
    count = max(1, budget // (grid[1] * grid[2]))
    inputs = pictures([grid] * count)
    some = inputs[:ALONE]
    flights = [bench.items(inputs, number * count) for number in range(3)]
    runner = bench.runner()
    ways: dict[str, tuple[int, Callable[[], object]]] = {
        "one at a time": (len(some), lambda: [bench.transformers_rows([one])[0].cpu() for one in some]),
        "in batches": (count, lambda: torch.cat(bench.transformers_rows(inputs)).cpu()),
        "waiting": (3 * count, lambda: [runner.run(items) for items in flights]),
        "ours": (3 * count, lambda: pipelined(runner, flights)),
    }
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, (images, work) in ways.items():
            begun = time.perf_counter()
            work()
            if number:  # the first round warms up
                rates[name].append(images / (time.perf_counter() - begun))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    return Check(
        f"throughput, {bench.dtype}, {side} px, {count} a batch",
        medians["ours"] >= medians["one at a time"],
        {
            "images/s": medians["ours"],
            "over transformers, one at a time": medians["ours"] / medians["one at a time"],
            "over transformers, in batches": medians["ours"] / medians["in batches"],
            "over no batch ahead": medians["ours"] / medians["waiting"],
        },
    )


class SmallMemory:
    """A tower on a device that has memory for so many items."""

    def __init__(self, tower: Tower, device: torch.device, most: int) -> None:
        self._tower, self._device, self._most = tower, device, most
        self.weights, self.compatibility_fingerprint = tower.weights, tower.compatibility_fingerprint
        self.refused = 0

    def encode(self, items: Sequence[TowerInput]) -> list[tuple[torch.Tensor, ...]]:
        if len(items) > self._most:
            self.refused += 1
            torch.empty(1 << 50, dtype=torch.uint8, device=self._device)  # raises what the device's allocator does
        return self._tower.encode(items)


def check_memory(bench: Bench) -> Check:
    """A batch that does not fit is split until it does, and every item is encoded."""
    tower = SmallMemory(bench.tower, bench.device, 2)
    inputs = pictures([(1, 16, 16)] * 8)
    items = bench.items(inputs)
    outcome = bench.runner(tower).run(items)
    rows = [tensor_view(bench.arena, item.payload_offset, item.tensors[0]).to(bench.device) for item in items]
    distance = farthest(rows, [embed(bench.tower, [one])[0] for one in inputs])
    failed = sum(bool(result.reason) for result in outcome.results)
    return Check(
        "a batch without memory is split",
        not failed and tower.refused == 3 and distance <= ATOL,
        {"failed items": failed, "splits": tower.refused, "max error": distance},
    )


def check_budget(bench: Bench) -> Check:
    """The size of a batch that the device is found to gain from, as an engine finds it when it starts."""
    warm_up = bench.adapter.warm_up()
    begun = time.monotonic()
    cost = measure_tower(bench.tower, warm_up, bench.device)
    figures: dict[str, float | str] = {"patches": float(cost), "seconds": time.monotonic() - begun}
    return Check("batch budget", warm_up.cost <= cost < 2 * MOST, figures)


async def check_reads(bench: Bench, checkpoint: Path) -> list[Check]:
    """A served image comes whole through each transport; by RDMA only where this host has a device for it."""
    fault = rdma_fault("")
    checks = await check_reads_by(bench, checkpoint, {})
    if fault:
        return [*checks, Check("read by mooncake over RDMA", True, {"left out": fault})]
    # RDMA needs an address of a network; the arena is pinned for CUDA already, and now for the device of the network.
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        host = probe.getsockname()[0]
    by_rdma = await check_reads_by(bench, checkpoint, {"mooncake_protocol": "rdma", "mooncake_host": host})
    return [*checks, *(Check(f"{check.name} over RDMA", check.passed, check.figures) for check in by_rdma[1:])]


async def check_reads_by(bench: Bench, checkpoint: Path, mooncake: dict[str, str]) -> list[Check]:
    """A read in band, and one by Mooncake as it is set up."""
    pixels = torch.randint(0, 256, (8 * MERGE * PATCH, 6 * MERGE * PATCH, 3), dtype=torch.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels.numpy()).save(file, "PNG")
    settings = {"model": str(checkpoint), "device": str(bench.device), "dtype": bench.dtype, "mooncake": "on"}
    settings |= mooncake
    checks = []
    with Service(settings | {"arena_bytes": "64MiB", "input_arena_bytes": "64MiB"}) as service:
        rows: dict[str, torch.Tensor] = {}
        for transport in ("inline", "mooncake"):
            async with EncoderClient(service.target, ClientSettings(transports=(transport,))) as client:
                async with client.encode([image(file.getvalue())], prompt_id=transport, timeout=60) as call:
                    [embedding] = await call.embeddings()
                rows[transport] = embedding.torch().clone()
                read = embedding.transport
                embedding.release()
            same = torch.equal(rows[transport], rows["inline"]) and bool(rows[transport].isfinite().all())
            checks.append(
                Check(f"read by {transport}", same and read == transport, {"bytes": rows[transport].nbytes, "by": read})
            )
    return checks


def farthest(rows: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    return max((one.float() - other.float()).abs().max().item() for one, other in zip(rows, others, strict=True))


def run_checks(device: torch.device, folder: Path, show: Callable[[Check], None]) -> list[Check]:
    """All checks; each is shown as soon as it is known."""
    large = device.type == "cuda"
    write_checkpoint("qwen2_5_vl", folder / "checkpoint", preset="base" if large else "tiny")
    exact, half = (
        Bench.open(folder / "checkpoint", device, dtype, (1 << 30) if large else (64 << 20))
        for dtype in ("float32", "bfloat16")
    )
    budget, rounds = (16384, 5) if large else (64, 1)
    checks: list[Check] = []

    def add(*done: Check) -> None:
        for check in done:
            checks.append(check)
            show(check)

    add(check_float32(exact))
    add(check_half(exact, half))
    add(check_order(half, (1, 32, 32) if large else (1, 8, 8), 16 if large else 2, 6 if large else 3))
    add(check_memory(exact))
    add(check_budget(half))
    for side in (56, 224, 448) if large else (56,):
        add(check_speed(half, side, budget, rounds))
    add(check_speed(exact, 224 if large else 56, budget, rounds))
    add(*asyncio.run(check_reads(half, folder / "checkpoint")))
    return checks


def main() -> int:
    """Runs the checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0", help="such as cuda:1; cpu runs all in a reduced form")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE too")
    arguments = parser.parse_args()
    transformers.logging.disable_progress_bar()
    device = torch.device(arguments.device)
    name = "CPU"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        name = torch.cuda.get_device_name(device)
    console = Console()
    table = Table("check", "", "figures", title=f"{name}, torch {torch.__version__}")

    def show(check: Check) -> None:
        figures = (
            f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
            for key, value in check.figures.items()
        )
        table.add_row(check.name, "[green]passed[/]" if check.passed else "[red]FAILED[/]", ", ".join(figures))
        console.print(f"{'passed' if check.passed else 'FAILED'}: {check.name}")

    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="encoder-svc-check-") as folder:
        checks = run_checks(device, Path(folder), show)
    console.print(table)
    passed = all(check.passed for check in checks)
    if arguments.json is not None:
        result = {
            "device": name, "torch": torch.__version__, "passed": passed,
            "seconds": time.monotonic() - begun, "checks": [asdict(check) for check in checks],
        }  # fmt: skip
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
