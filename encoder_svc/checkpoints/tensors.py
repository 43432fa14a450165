"""Random tensors and their files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from encoder_svc.models.checkpoint import INDEX, SINGLE_FILE


@dataclass(frozen=True)
class TensorPlan:
    """One tensor to be drawn from a normal distribution."""

    name: str
    """As on the hub."""
    shape: tuple[int, ...]
    deviation: float
    mean: float = 0.0
    zero_rows: tuple[int, ...] = ()
    """Rows that become zero."""

    def draw(self, seed: int) -> torch.Tensor:
        """The tensor, float32. It depends on the seed and the name only, not on what was drawn before."""
        digest = hashlib.sha256(f"{seed}:{self.name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
        tensor = torch.empty(self.shape).normal_(self.mean, self.deviation, generator=generator)
        if self.zero_rows:
            tensor[list(self.zero_rows)] = 0.0
        return tensor


def linear(name: str, outputs: int, inputs: int, gain: float = 1.0, bias: bool = False) -> list[TensorPlan]:
    """A linear layer that keeps the scale of its input, times ``gain``."""
    plans = [TensorPlan(f"{name}.weight", (outputs, inputs), gain * inputs**-0.5)]
    if bias:
        plans.append(TensorPlan(f"{name}.bias", (outputs,), 0.1))
    return plans


def norm(name: str, width: int) -> TensorPlan:
    """The weight of a norm, near 1."""
    return TensorPlan(f"{name}.weight", (width,), 0.1, 1.0)


def write_shards(
    directory: Path,
    towers: Sequence[TensorPlan],
    language: Sequence[TensorPlan],
    shards: int,
    seed: int,
    progress: Callable[[float], None],
) -> None:
    """Draws tensors and writes ``shards`` files and their index, or ``model.safetensors`` alone if it is one.

    Every file holds tensors of the towers and of the language model, as files on the hub do.
    """
    count = len(towers) + len(language)
    weight_map: dict[str, str] = {}
    total_bytes = 0
    for number in range(shards):
        file = SINGLE_FILE if shards == 1 else f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for plan in (*_share(towers, number, shards), *_share(language, number, shards)):
            tensors[plan.name] = plan.draw(seed)
            weight_map[plan.name] = file
            total_bytes += tensors[plan.name].nbytes
            progress(len(weight_map) / count)
        save_file(tensors, directory / file, metadata={"format": "pt"})
    if shards > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _share(plans: Sequence[TensorPlan], number: int, shards: int) -> Sequence[TensorPlan]:
    return plans[len(plans) * number // shards : len(plans) * (number + 1) // shards]
