"""Writes a random checkpoint of any family that can be written.

What needs torch or transformers is imported when something is written: the command line lists the families at once.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from encoder_svc.checkpoints.audio import AUDIO_RECIPES
from encoder_svc.checkpoints.glm import GLM_RECIPES
from encoder_svc.checkpoints.images import IMAGE_RECIPES
from encoder_svc.checkpoints.kimi import KIMI_RECIPES
from encoder_svc.checkpoints.minicpm import MINICPM_RECIPES
from encoder_svc.checkpoints.omni import OMNI_RECIPES
from encoder_svc.checkpoints.pooled import POOLED_RECIPES
from encoder_svc.checkpoints.qwen_vl import QWEN_VL_RECIPES
from encoder_svc.checkpoints.recipe import MAX_POSITIONS, Recipe
from encoder_svc.checkpoints.sizes import PRESET_NAMES, SIZES, PresetName, Sizes
from encoder_svc.errors import SetupError
from encoder_svc.models.checkpoint import CONFIG

RECIPES: dict[str, Recipe] = {
    **QWEN_VL_RECIPES,
    **OMNI_RECIPES,
    **AUDIO_RECIPES,
    **IMAGE_RECIPES,
    **GLM_RECIPES,
    **KIMI_RECIPES,
    **MINICPM_RECIPES,
    **POOLED_RECIPES,
}
"""The families but Qwen2.5-VL and MiMo-V2, by ``model_type``."""

FAMILY_NAMES: tuple[str, ...] = tuple(sorted(("mimo_v2", "qwen2_5_vl", *RECIPES)))
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
        if family == "qwen2_5_vl":
            from encoder_svc.checkpoints.qwen2_5_vl import PRESETS, write_qwen2_5_vl

            write_qwen2_5_vl(directory, PRESETS[preset], seed, progress)
        elif family == "mimo_v2":
            from encoder_svc.checkpoints.mimo_v2 import write_mimo_v2

            write_mimo_v2(directory, SIZES[preset], seed, progress)
        else:
            _write(directory, RECIPES[family], SIZES[preset], seed, progress)
    except OSError as error:
        raise SetupError(f"cannot write into {directory}: {error.strerror}") from None


def _write(directory: Path, recipe: Recipe, sizes: Sizes, seed: int, progress: Callable[[float], None]) -> None:
    from encoder_svc.checkpoints.library_tensors import plan_tensors
    from encoder_svc.checkpoints.tensors import write_shards
    from encoder_svc.checkpoints.tokenizer import write_tokenizer

    words = recipe.vocabulary
    files = {CONFIG: recipe.config(sizes, words), **recipe.files}
    if words is not None:
        write_tokenizer(directory, words, MAX_POSITIONS)
        files["generation_config.json"] = {
            "bos_token_id": words.ids[words.begin or words.pad],
            "do_sample": False,
            "eos_token_id": words.ids[words.end],
            "pad_token_id": words.ids[words.pad],
            **recipe.generation,
        }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    plans = plan_tensors(recipe, sizes, directory)
    # Each file takes every n-th name, so that every file holds tensors of the towers and of the language model.
    spread = [plan for number in range(recipe.shards) for plan in plans[number :: recipe.shards]]
    write_shards(directory, spread, [], recipe.shards, seed, progress)
