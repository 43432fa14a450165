"""Measures what each lever of the tower gains: ``python -m tests.models.measure_towers CHECKPOINT``.

In every round each way encodes the same batch once, so that what else the machine does reaches all of them alike. Times
are CPU times of one thread. What is shown is the median, over the rounds, of a way's time over that of the whole tower:
a lever gains what the tower without it takes longer.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as an engine does, before torch is imported

import torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from encoder_svc.models import linear, qwen_vision_tower
from encoder_svc.models.adapter import TowerInput
from encoder_svc.models.packing import PackedBatch, SegmentGroup, Segments, pack
from encoder_svc.models.registry import open_adapter
from epd.encoder.v1.media_pb2 import Modality
from tests.models.encoding import embed, pixel_values, whole_model

BATCHES = ((56, 1), (56, 32), (224, 1), (224, 8), (448, 2))
"""Sides in pixels and images."""
VALUES = 588


def pictures(side: int, count: int) -> list[TowerInput]:
    grid = (1, side // 14, side // 14)
    return [
        TowerInput(Modality.MODALITY_IMAGE, grid, (torch.randint(0, 256, (grid[1] * grid[2], VALUES)).byte(),))
        for _ in range(count)
    ]


def normalise_as_transformers(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = hidden.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(hidden.dtype)


def rotate_as_transformers(fused: torch.Tensor, by: torch.Tensor) -> None:
    """With halves apart, as a tower is loaded whose rows are not paired."""
    cos, sin = (part.repeat(1, 1, 2) for part in (by.real, by.imag))
    for tensor in fused[:, :2].unbind(1):
        wide = tensor.float()
        first, second = wide.chunk(2, dim=-1)
        tensor.copy_(wide * cos + torch.cat((-second, first), dim=-1) * sin)


def attend_one_by_one(fused: torch.Tensor, segments: Segments) -> torch.Tensor:
    """One call of attention for each segment, as transformers does without FlashAttention."""
    assert isinstance(segments, tuple)
    out = fused.new_empty(len(fused), fused[0, 0].numel())
    for group in segments:
        for index in places_of(group).view(group.count, group.length):
            span = slice(int(index[0]), int(index[-1]) + 1) if group.index is None else index
            query, key, value = (part.transpose(0, 1)[None] for part in fused[span].unbind(1))
            out[span] = functional.scaled_dot_product_attention(query, key, value)[0].transpose(0, 1).flatten(1)
    return out


def pack_with_copies(*arguments: Any) -> PackedBatch:
    """As :func:`pack`, but every frame is gathered, as if none stood in its place."""
    plan = pack(*arguments)
    assert isinstance(plan.frames, tuple)
    return replace(plan, frames=tuple(replace(group, start=0, index=places_of(group)) for group in plan.frames))


def places_of(group: SegmentGroup) -> torch.Tensor:
    return torch.arange(group.start, group.start + group.count * group.length) if group.index is None else group.index


def never_packed(_device: torch.device, _dtype: torch.dtype) -> bool:
    return False


def unpaired(heads: int, size: int) -> torch.Tensor:
    return torch.arange(3 * heads * size)


LEVERS: dict[str, list[tuple[Any, str, Any]]] = {
    "packed weights, fused × and +": [(linear, "has_packed_kernels", never_packed)],
    "one operator for a norm": [(qwen_vision_tower, "_normalise", normalise_as_transformers)],
    "rotation in place": [
        (qwen_vision_tower, "rotate", rotate_as_transformers),
        (qwen_vision_tower, "pair_halves", unpaired),
    ],
    "segments of a length in one call": [(qwen_vision_tower, "attend", attend_one_by_one)],
    "frames without a copy": [(qwen_vision_tower, "pack", pack_with_copies)],
}


@contextmanager
def without(lever: str) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, plain in LEVERS[lever]:
            stack.enter_context(mock.patch.object(owner, name, plain))
        yield


class Ways:
    """The tower, the tower without each lever, and transformers' own."""

    def __init__(self, checkpoint: Path, dtype: str) -> None:
        adapter = open_adapter(checkpoint, dtype)

        def load() -> Any:
            return adapter.load_tower(torch.device("cpu"), lambda _step, _fraction: None)

        self.tower = load()
        self.towers = {}
        for lever in LEVERS:
            with without(lever):
                self.towers[lever] = load()
        self.unplanned = load()
        self.unplanned.vision._plan = self.unplanned.vision._make_plan
        self.dtype = getattr(torch, dtype)
        self.visual = whole_model(checkpoint, self.dtype).model.visual

    def of(self, items: list[TowerInput]) -> dict[str, Callable[[], list[torch.Tensor]]]:
        ways: dict[str, Callable[[], list[torch.Tensor]]] = {"the tower": lambda: self.encode(self.tower, items)}
        for lever, tower in self.towers.items():
            ways[f"without: {lever}"] = lambda lever=lever, tower=tower: self.encode(tower, items, lever)  # type: ignore[misc]
        ways["without: plans kept"] = lambda: self.encode(self.unplanned, items)
        pixels = [pixel_values(item.tensors[0]).to(self.dtype) for item in items]
        grids = torch.tensor([item.grid for item in items])
        together = torch.cat(pixels)
        ways["transformers, in a batch"] = lambda: [self.transformers(together, grids)]
        if len(items) > 1:
            ways["transformers, one at a time"] = lambda: [
                self.transformers(own, grid[None]) for own, grid in zip(pixels, grids, strict=True)
            ]
        return ways

    def encode(self, tower: Any, items: list[TowerInput], lever: str = "") -> list[torch.Tensor]:
        if not lever:
            return embed(tower, items)
        with without(lever):
            return embed(tower, items)

    @torch.inference_mode()
    def transformers(self, pixels: torch.Tensor, grids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.visual(pixels, grids).pooler_output
        return rows


def measure(ways: dict[str, Callable[[], list[torch.Tensor]]], seconds: float) -> dict[str, float]:
    """Times of each way over those of the tower; and ``the tower`` itself in seconds."""
    exact = torch.cat(ways["the tower"]())
    for name, work in ways.items():
        rows = torch.cat(work())
        tolerance = 1e-4 if rows.dtype == torch.float32 else 0.3
        assert (rows - exact).abs().max() <= tolerance, name
    times: dict[str, list[float]] = {name: [] for name in ways}
    ends = time.monotonic() + seconds
    for number in itertools.count():
        if time.monotonic() > ends and number >= 5:
            break
        for name, work in ways.items():
            begun = time.thread_time()
            work()
            times[name].append(time.thread_time() - begun)
    own = times["the tower"]
    return {
        name: statistics.median(own)
        if name == "the tower"
        else statistics.median(taken / reference for taken, reference in zip(values, own, strict=True))
        for name, values in times.items()
    }


def main() -> None:
    """Measures and shows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=45.0, help="for each batch")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ways = Ways(arguments.checkpoint, arguments.dtype)
    results: dict[str, dict[str, float]] = {}
    for side, count in BATCHES:
        results[f"{count} × {side} px"] = measure(ways.of(pictures(side, count)), arguments.seconds)
        print(results, file=sys.stderr)
    table = Table("", *results, title=f"{arguments.dtype}: time over that of the tower")
    for name in dict.fromkeys(name for result in results.values() for name in result):
        shown = ("" if name not in result else f"{result[name]:.3f}" for result in results.values())
        table.add_row(name + (" (seconds)" if name == "the tower" else ""), *shown)
    Console().print(table)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
