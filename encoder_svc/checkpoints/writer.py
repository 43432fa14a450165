"""Writes a random checkpoint of any family that can be written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from encoder_svc.checkpoints.qwen2_5_vl import PRESETS, write_qwen2_5_vl
from encoder_svc.errors import SetupError

PresetName = Literal["tiny", "small", "base"]

PRESET_NAMES: tuple[PresetName, ...] = get_args(PresetName)

FAMILY_NAMES: tuple[str, ...] = ("qwen2_5_vl",)
"""The ``model_type`` of what can be written."""


def write_checkpoint(
    family: str,
    directory: Path,
    preset: PresetName = "tiny",
    seed: int = 0,
    force: bool = False,
    progress: Callable[[float], None] = lambda _: None,
) -> None:
    """Writes a random checkpoint in the layout of the hub. Equal arguments give equal files.

    Args:
        family: the ``model_type``.
        directory: made if it does not exist.
        preset: how large it is.
        seed: of its weights.
        force: write into a folder that is not empty; files of the same names are replaced.
        progress: told how much is done, from 0 to 1.

    Raises:
        SetupError: no such family or preset, or the folder is not empty.
    """
    if family not in FAMILY_NAMES:
        raise SetupError(f"cannot write a checkpoint of {family!r}; families: {', '.join(FAMILY_NAMES)}")
    if preset not in PRESET_NAMES:
        raise SetupError(f"preset {preset!r} is unknown; use {', '.join(PRESET_NAMES)}")
    if directory.exists() and not directory.is_dir():
        raise SetupError(f"{directory} is a file; name a folder")
    if directory.is_dir() and any(directory.iterdir()) and not force:
        raise SetupError(f"{directory} is not empty; name another folder, or give --force to write into it")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_qwen2_5_vl(directory, PRESETS[preset], seed, progress)
    except OSError as error:
        raise SetupError(f"cannot write into {directory}: {error.strerror}") from None
