"""Loads everything of a checkpoint but its towers."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from encoder_client.errors import EncoderClientError
from encoder_client.language.families import family_of
from encoder_client.language.family import Family
from encoder_client.language.weights import CheckpointError, WeightsRead, read_weights

logger = logging.getLogger("encoder_client")

_NOT_ITS_OWN = ("model_type", "architectures", "vision_config", "audio_config")
"""Fields of a checkpoint's config that its language model's config must not have."""


@dataclass(frozen=True)
class Loaded:
    """The language half of a checkpoint."""

    family: Family
    model: Any
    """The model of transformers, on the host, in evaluation mode."""
    tokenizer: Any
    checkpoint: Mapping[str, Any]
    """``config.json``."""
    weights: WeightsRead


def load(folder: Path, dtype: torch.dtype) -> Loaded:
    """Loads a checkpoint's language half.

    Raises:
        CheckpointError: a file or tensor is missing, or does not fit.
        EncoderClientError: the family is not known here, or has no language side.
    """
    try:
        checkpoint = json.loads((folder / "config.json").read_text())
        model_type = checkpoint["model_type"]
    except (OSError, ValueError, KeyError):
        raise CheckpointError(f"{folder} holds no config.json with a model_type; give a checkpoint") from None
    family = family_of(model_type)
    state, weights = read_weights(folder, dtype, family.is_left_out)
    state = {name.removeprefix(family.language_prefix): tensor for name, tensor in state.items()}
    base = getattr(transformers, family.model_class)
    model, report = _without_towers(base, family).from_pretrained(
        None, config=_config(folder, checkpoint, base, family), state_dict=state, dtype=dtype, output_loading_info=True
    )
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if faults := set(report[kind]) - set(family.tower_modules):
            shown = ", ".join(str(fault) for fault in sorted(faults)[:3])
            raise CheckpointError(f"{folder} does not fit {family.model_class}: {kind.replace('_', ' ')}: {shown}")
    if (folder / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    logger.info(
        "read %d tensors, %d bytes, from %d files; left %d tensors of the towers out",
        len(weights.tensors), weights.nbytes, len(weights.files), len(weights.left_out),
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return Loaded(family, model.eval(), tokenizer, checkpoint, weights)


def _config(folder: Path, checkpoint: Mapping[str, Any], base: type[Any], family: Family) -> Any:
    if family.has_own_config:
        fields = {name: value for name, value in checkpoint.items() if name not in _NOT_ITS_OWN}
        return base.config_class(**fields)
    if family.config_field is not None:
        return base.config_class(**checkpoint[family.config_field])
    return transformers.AutoConfig.from_pretrained(folder)


class _EmptyTower(nn.Module):
    """Stands where a tower was."""

    device = torch.device("cpu")
    """Asked for by models that then do nothing with it."""


def _without_towers(base: type[Any], family: Family) -> type[Any]:
    """A subclass whose towers are empty modules.

    transformers builds a model on the meta device before it fills it, so the towers that the base class makes never
    hold memory; they are gone before parameters are counted, filled or tied.
    """
    bases = (base,) if family.positions is None else (family.positions, base)

    class LanguageOnly(*bases):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            for path in family.tower_modules:
                owner, name = self.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
                held = [owner._parameters[name]] if name in owner._parameters else getattr(owner, name).parameters()
                if any(parameter is not None and not parameter.is_meta for parameter in held):
                    raise EncoderClientError("transformers allocated a tower; this version is not supported")
                # A parameter must stay one: transformers initialises what a checkpoint does not fill.
                setattr(owner, name, nn.Parameter(torch.empty(0)) if name in owner._parameters else _EmptyTower())

    # transformers renames a checkpoint's tensors by the class's name, and only for classes of its own modules.
    LanguageOnly.__name__, LanguageOnly.__module__ = base.__name__, base.__module__
    return LanguageOnly
