"""Plans for the tensors of a model that transformers knows, under their names on the hub.

transformers tells names and shapes: the model is made without memory, and its own rules for saving turn the names of
its modules back into those of the hub. Scales follow from names and shapes. They keep a random model from being a
degenerate one: every branch adds about as much as the residual stream holds, attention is sharp enough to look at
single rows of an item, and special tokens, whose rows of ``lm_head`` are zero, are never generated.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

from encoder_svc.checkpoints.recipe import Recipe
from encoder_svc.checkpoints.sizes import Sizes
from encoder_svc.checkpoints.tensors import TensorPlan
from encoder_svc.models.checkpoint import CONFIG

_SHARP = re.compile(r"qkv|(q|k|query|key)(_[ab])?(_proj(_with_mqa)?)?\.(weight|bias)$")
"""Layers that make queries and keys."""
_STRONG = re.compile(r"(v_proj|value|o_proj|out_proj|down_proj)\.weight$|experts\.down_proj$|merger|projector")
"""Layers whose output joins the residual stream, or makes the rows."""
_POSITIONS = re.compile(r"pos(ition)?_emb|embed_positions")
_VOCABULARY = re.compile(r"(embed_tokens|token_embedding)\.weight$")
_HEAD = re.compile(r"(lm_head|proj_out)\.weight$")


def plan_tensors(recipe: Recipe, sizes: Sizes, directory: Path) -> list[TensorPlan]:
    """The tensors of a checkpoint whose config lies in ``directory``, in the order of their names."""
    shapes = {_hub_name(name, recipe): shape for name, shape in _stored_shapes(recipe, directory).items()}
    if recipe.add is not None:
        shapes |= recipe.add(sizes)
    return [_plan(name, shape, recipe) for name, shape in sorted(shapes.items())]


def _hub_name(name: str, recipe: Recipe) -> str:
    for saved, hub in recipe.renames.items():
        if name.startswith(saved):
            return hub + name.removeprefix(saved)
    return recipe.prefix + name


def _stored_shapes(recipe: Recipe, directory: Path) -> dict[str, tuple[int, ...]]:
    content = json.loads((directory / CONFIG).read_text())
    model_class = getattr(transformers, recipe.architecture or content["architectures"][0])
    if recipe.architecture_config is None:
        config = transformers.AutoConfig.from_pretrained(directory)
    else:
        config = model_class.config_class(**content[recipe.architecture_config])
    with torch.device("meta"):
        model = model_class(config)
    state = model.state_dict()
    for name in getattr(model, "all_tied_weights_keys", {}):
        state.pop(name, None)
    return {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, state).items()}


def _plan(name: str, shape: tuple[int, ...], recipe: Recipe) -> TensorPlan:
    special = tuple(recipe.vocabulary.ids.values()) if recipe.vocabulary is not None else ()
    if _VOCABULARY.search(name):
        tied = recipe.tied
        deviation = shape[1] ** -0.5 if recipe.scaled_embeddings else 1.0
        return TensorPlan(name, shape, deviation, zero_rows=special if tied else ())
    if _HEAD.search(name):
        return TensorPlan(name, shape, 2 * shape[1] ** -0.5, zero_rows=special)
    if _POSITIONS.search(name):
        return TensorPlan(name, shape, 0.5)
    if math.prod(shape) == max(shape, default=1):
        return _vector(name, shape, recipe)
    fan_in = shape[-1] if len(shape) == 2 else math.prod(shape[1:])
    if "experts" in name and len(shape) == 3:
        fan_in = shape[1]
    gain = 1.5 if _SHARP.search(name) else 2.0 if _STRONG.search(name) else 1.0
    return TensorPlan(name, shape, gain * fan_in**-0.5)


def _vector(name: str, shape: tuple[int, ...], recipe: Recipe) -> TensorPlan:
    if name.endswith("bias"):
        return TensorPlan(name, shape, 0.1)
    if name.endswith(("weight", "gamma", "lambda_1", "lambda_2", "lambda1")):
        zero_centred = any(part in name for part in recipe.zero_centred)
        return TensorPlan(name, shape, 0.1, 0.0 if zero_centred else 1.0)
    return TensorPlan(name, shape, 0.5)
