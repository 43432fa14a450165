"""Reads a checkpoint's tensors except the towers', and tells what it read."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from encoder_client.errors import EncoderClientError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class CheckpointError(EncoderClientError):
    """A checkpoint lacks something, or holds something that does not fit the model."""


@dataclass(frozen=True)
class WeightsRead:
    """A log of what was read. It is the proof that no tower was."""

    files: tuple[str, ...]
    """The files that tensors were read from."""
    tensors: tuple[str, ...]
    """The names of the tensors that were read."""
    nbytes: int
    """The bytes of these tensors."""
    left_out: tuple[str, ...]
    """The names of the tensors that were not."""


def read_weights(
    folder: Path, dtype: torch.dtype, leave_out: Callable[[str], bool]
) -> tuple[dict[str, torch.Tensor], WeightsRead]:
    """Reads the tensors of a checkpoint whose names are not left out. Files that hold no others are not opened.

    Args:
        folder: ``model.safetensors``, or shards with ``model.safetensors.index.json``.
        dtype: what floating point tensors are converted to.
        leave_out: says of a name that its tensor is not read.

    Returns:
        The tensors by name, in memory of their own (never a mapping of the file, which may be replaced), and the log.

    Raises:
        CheckpointError: a file or tensor is missing.
    """
    state: dict[str, torch.Tensor] = {}
    left_out: list[str] = []
    files: list[str] = []
    nbytes = 0
    for file, names in _files(folder).items():
        wanted = [name for name in names if not leave_out(name)]
        left_out += [name for name in names if leave_out(name)]
        if not wanted:
            continue
        path = folder / file
        if not path.is_file():
            raise CheckpointError(f"the checkpoint {folder} names the file {file}, which is not there; copy it again")
        files.append(file)
        with safe_open(path, framework="pt") as opened:
            held = set(opened.keys())
            for name in wanted:
                if name not in held:
                    raise CheckpointError(f"{path} lacks the tensor {name}, which the index promises")
                tensor = opened.get_tensor(name)
                nbytes += tensor.nbytes
                state[name] = tensor.to(dtype, copy=True) if tensor.is_floating_point() else tensor.clone()
    return state, WeightsRead(tuple(files), tuple(state), nbytes, tuple(left_out))


def _files(folder: Path) -> dict[str, list[str]]:
    """The names of the tensors in each file."""
    if (folder / INDEX).is_file():
        result: dict[str, list[str]] = {}
        for name, file in json.loads((folder / INDEX).read_text())["weight_map"].items():
            if Path(file).name != file:
                raise CheckpointError(f"{folder / INDEX} names a file outside its folder")
            result.setdefault(file, []).append(name)
        return result
    if (folder / SINGLE).is_file():
        with safe_open(folder / SINGLE, framework="pt") as opened:
            return {SINGLE: list(opened.keys())}
    raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}; give the folder of a checkpoint")
