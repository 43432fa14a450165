"""Which families can be served, and where their code is. Free of torch, so that the front can refuse at start.

To add a family, add a row to :data:`FAMILIES` (docs/models.md).
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from encoder_svc.errors import SetupError
from encoder_svc.models.checkpoint import PREPROCESSOR_CONFIG, Checkpoint, open_checkpoint
from encoder_svc.models.dtypes import DATA_TYPES
from epd.encoder.v1.media_pb2 import Modality

if TYPE_CHECKING:
    from encoder_svc.models.adapter import Adapter, AdapterFactory


@dataclass(frozen=True)
class Family:
    """A row of the table."""

    model_type: str
    """``model_type`` of the checkpoint's config."""
    architectures: tuple[str, ...]
    """Names in ``architectures`` that mean this family where ``model_type`` is not known."""
    modalities: tuple[Modality, ...]
    """What is encoded."""
    tensors: tuple[str, ...]
    """The tensors of an embedding."""
    prefixes: tuple[str, ...]
    """How the names of the towers' tensors begin. All others belong to the language side."""
    adapter: str
    """``module:name`` of the :data:`~encoder_svc.models.adapter.AdapterFactory`, imported when it is needed."""
    verified: str
    """What was compared with the reference, in a few words."""
    needs_preprocessor: bool = True
    """The folder must hold ``preprocessor_config.json``: transformers' defaults are not those of every checkpoint."""


FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="qwen2_5_vl",
            architectures=("Qwen2_5_VLForConditionalGeneration",),
            modalities=(Modality.MODALITY_IMAGE,),
            tensors=("embedding",),
            prefixes=("visual.", "model.visual."),
            adapter="encoder_svc.models.qwen2_5_vl:make_adapter",
            verified="images: pixels bit for bit and embeddings within 1e-4 of transformers 5.24, fp32",
        ),
    )
}
"""The families that can be served, by ``model_type``."""


@dataclass(frozen=True)
class CheckpointSummary:
    """What the front knows of a checkpoint that can be served."""

    name: str
    """The last part of its path."""
    model_type: str
    dtype: str
    """The dtype that its config names; empty if it names none."""


def find_family(checkpoint: Checkpoint) -> Family:
    """The family of a checkpoint.

    Raises:
        SetupError: no family of the table fits; the message lists them.
    """
    family = FAMILIES.get(checkpoint.model_type)
    if family is not None:
        return family
    for candidate in FAMILIES.values():
        if set(candidate.architectures) & set(checkpoint.architectures):
            return candidate
    named = checkpoint.model_type or ", ".join(checkpoint.architectures) or "none"
    raise SetupError(
        f"the checkpoint {checkpoint.path} is of model type {named!r}, which cannot be served; these can: "
        f"{', '.join(sorted(FAMILIES))} (`encoder-svc models` tells more)"
    )


def check_servable(path: Path) -> CheckpointSummary:
    """Checks everything of a checkpoint that can be checked without torch, in milliseconds.

    Raises:
        SetupError: it cannot be served; the message says what to change.
    """
    checkpoint, family = _open(path)
    checkpoint.stored(family.prefixes)
    return CheckpointSummary(checkpoint.name, family.model_type, checkpoint.dtype)


def open_adapter(path: Path, dtype: str) -> Adapter:
    """Makes the adapter of a checkpoint.

    Args:
        path: the checkpoint's folder.
        dtype: ``float32``, ``bfloat16`` or ``float16`` (:func:`~encoder_svc.models.dtypes.resolve_dtype`).

    Raises:
        SetupError: the checkpoint cannot be served, or there is no such dtype.
    """
    import torch

    if dtype not in DATA_TYPES:
        raise SetupError(f"dtype {dtype!r} is none of {', '.join(DATA_TYPES)}")
    _, family = _open(path)
    module, _, name = family.adapter.partition(":")
    factory: AdapterFactory = getattr(importlib.import_module(module), name)
    return factory(path, getattr(torch, dtype))


def _open(path: Path) -> tuple[Checkpoint, Family]:
    checkpoint = open_checkpoint(path)
    family = find_family(checkpoint)
    if family.needs_preprocessor and not checkpoint.preprocessor:
        raise SetupError(
            f"{path} has no {PREPROCESSOR_CONFIG}, which says how {family.model_type} prepares media; download it too"
        )
    return checkpoint, family
