"""Loads the towers of a checkpoint, and nothing of its language model.

The tensors are chosen by the prefix of their names and read one by one; the model is built from the family's base class
on the ``meta`` device, where nothing is allocated, and its language model is thrown away before weights are put in. So
no language weight is ever read and none is ever allocated. The log, :class:`~epd.encoder.v1.WeightsInfo` and the checks
here say so with names and bytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from encoder_svc.errors import SetupError
from encoder_svc.models.adapter import Progress
from encoder_svc.models.checkpoint import Checkpoint
from epd.encoder.v1.encoder_service_pb2 import WeightsInfo

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TowerTensor:
    """The identity of one tensor that was read."""

    name: str
    dtype: str
    """As stored, in torch's words."""
    shape: tuple[int, ...]
    digest: str
    """XXH3-128 of the stored bytes, in hex."""
    nbytes: int


@dataclass(frozen=True)
class TowerWeights:
    """The tensors of the towers."""

    state: dict[str, torch.Tensor]
    """By the names of the checkpoint, on the host, in the dtype that was asked for. Memory of this process alone."""
    tensors: tuple[TowerTensor, ...]
    files: tuple[str, ...]

    @property
    def info(self) -> WeightsInfo:
        """What was read."""
        return WeightsInfo(
            files=self.files,
            tensors=len(self.tensors),
            bytes=sum(tensor.nbytes for tensor in self.tensors),
            parameters=sum(tensor.numel() for tensor in self.state.values()),
        )


def read_towers(
    checkpoint: Checkpoint, prefixes: Sequence[str], dtype: torch.dtype, progress: Progress
) -> TowerWeights:
    """Reads the tensors whose names begin with one of ``prefixes``.

    Args:
        checkpoint: where from.
        prefixes: such as ``visual.``.
        dtype: what floating point tensors become.
        progress: told after each tensor.

    Raises:
        SetupError: a file is missing, damaged or lacks a tensor.
    """
    shards = checkpoint.shards(prefixes)
    total = sum(len(names) for names in shards.values())
    state: dict[str, torch.Tensor] = {}
    tensors: list[TowerTensor] = []
    for file, names in shards.items():
        try:
            with safe_open(checkpoint.path / file, framework="pt") as reader:
                for name in names:
                    stored = reader.get_tensor(name)
                    tensors.append(_identify(name, stored))
                    # A copy even if the dtype stays: `stored` lies in a mapping of the file, and whoever replaced or
                    # cut the file would kill this process at its next touch.
                    state[name] = stored.to(dtype, copy=True) if stored.is_floating_point() else stored.clone()
                    log.debug("read %s from %s: %d bytes", name, file, tensors[-1].nbytes)
                    progress("reading weights", len(tensors) / total)
        except (SafetensorError, OSError):
            raise SetupError(
                f"cannot read the towers' tensors from {checkpoint.path / file}; it is damaged or lacks a tensor that "
                "the index puts there: download it again"
            ) from None
    weights = TowerWeights(state, tuple(tensors), tuple(shards))
    log.info(
        "read %d tensors, %d bytes, from %s; the other %d tensors of the checkpoint were not read",
        len(tensors),
        weights.info.bytes,
        ", ".join(shards),
        len(checkpoint.files) - len(tensors),
    )
    return weights


def _identify(name: str, tensor: torch.Tensor) -> TowerTensor:
    stored = tensor.contiguous().reshape(-1).view(torch.uint8)
    buffer: Any = stored.numpy()
    return TowerTensor(
        name=name,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
        digest=xxhash.xxh3_128_hexdigest(buffer),
        nbytes=stored.numel(),
    )


def read_config(config_class: type[Any], checkpoint: Checkpoint) -> Any:
    """The config of a checkpoint as transformers reads it.

    Raises:
        SetupError: transformers refuses it.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        return config_class.from_dict(checkpoint.config)
    except (StrictDataclassError, TypeError, ValueError, KeyError, AttributeError):
        log.debug("transformers refuses the config", exc_info=True)
        raise SetupError(
            f"transformers cannot read config.json of {checkpoint.path} as {checkpoint.model_type}: a field has a "
            "wrong type or value; --log-level debug tells which"
        ) from None


def build_towers(
    name: str,
    config: Any,
    weights: TowerWeights,
    dtype: torch.dtype,
    absent: Sequence[str] = ("language_model",),
) -> Any:
    """Builds a family's base model without its language model and puts the towers' weights in.

    Transformers renames the keys of older checkpoints and rebuilds the buffers that checkpoints do not hold.

    Args:
        name: of the family's base class in transformers, such as ``Qwen2_5_VLModel`` (not
            ``...ForConditionalGeneration``, which has an ``lm_head``).
        config: its configuration. It is changed: nothing is tied, because there is nothing to tie to.
        weights: what was read.
        dtype: of the parameters.
        absent: the attributes of the base class that hold the language model and what else is no part of the towers.

    Returns:
        The model, in evaluation mode, on the host.

    Raises:
        SetupError: a weight is missing, has no place in the model, or has the wrong shape; or no model can be built.
    """
    # Not at the top: families whose modules are our own load without transformers.
    import transformers
    from transformers.utils import logging as transformers_logging

    base_class = getattr(transformers, name, None)
    if base_class is None:
        raise SetupError(f"this version of transformers has no {name}; install the one that pyproject.toml pins")
    config.tie_word_embeddings = False
    shows_progress = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        model, report = _without(base_class, absent).from_pretrained(
            None,
            config=config,
            state_dict=weights.state,
            dtype=dtype,
            output_loading_info=True,
            # Wrong shapes come back in the report, so that the message is ours.
            ignore_mismatched_sizes=True,
        )
    except (ValueError, TypeError, RuntimeError, ArithmeticError, LookupError, AttributeError):
        log.debug("transformers cannot build the model", exc_info=True)
        raise SetupError(
            f"transformers cannot build {name} as config.json asks: two sizes in it contradict each "
            "other, or one is impossible; --log-level debug tells which"
        ) from None
    finally:
        if shows_progress:
            transformers_logging.enable_progress_bar()
    check_fit(report)
    language = [name for name, _ in model.named_parameters() if name.split(".")[0] in absent]
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if language or missing:
        raise AssertionError(f"language weights {language[:3]} or weights without values {missing[:3]} in the towers")
    held = sum(parameter.numel() for parameter in model.parameters())
    if held != weights.info.parameters:
        raise AssertionError(f"{held} parameters are allocated, {weights.info.parameters} were read")
    return model.eval().requires_grad_(False)


def _without(base_class: type[Any], absent: Sequence[str]) -> type[Any]:
    """A subclass whose language model is an empty module as soon as it is built, before it has memory."""

    def build(self: Any, config: Any) -> None:
        base_class.__init__(self, config)
        for name in absent:
            delattr(self, name)
            setattr(self, name, torch.nn.Module())

    # Transformers finds the renamings of a model's keys by its class's name, and only for classes of its own modules.
    return type(base_class.__name__, (base_class,), {"__init__": build, "__module__": base_class.__module__})


def check_fit(report: Mapping[str, Any]) -> None:
    """Refuses weights that do not fit a model.

    Args:
        report: ``mismatched_keys``, each with the shape that was read and the one that the config asks for;
            ``missing_keys``; ``unexpected_keys``: as transformers' loading info.

    Raises:
        SetupError: there is one; it is named.
    """
    faults: list[tuple[str, Callable[[Any], str]]] = [
        ("mismatched_keys", lambda key: f"{key[0]} has shape {tuple(key[1])}, the config asks for {tuple(key[2])}"),
        ("missing_keys", lambda key: f"{key} is not in the checkpoint"),
        ("unexpected_keys", lambda key: f"{key} has no place in the model"),
    ]
    for kind, describe in faults:
        keys = sorted(report[kind])
        if keys:
            more = f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
            raise SetupError(
                f"the weights do not fit config.json: {describe(keys[0])}{more}; config and weights must come from the "
                "same checkpoint"
            )


def fingerprint(
    weights: TowerWeights, model_type: str, dtype: torch.dtype, preprocessing: Mapping[str, Any], width: int
) -> bytes:
    """What makes embeddings of two encoders fit together: SHA-256 over a canonical JSON text of its arguments.

    Args:
        weights: name, stored dtype, shape and XXH3-128 of each tensor count.
        model_type: of the config.
        dtype: that the tower runs in.
        preprocessing: its constants and version.
        width: of a row.

    Returns:
        32 bytes.
    """
    tensors = sorted((tensor.name, tensor.dtype, tensor.shape, tensor.digest) for tensor in weights.tensors)
    text = json.dumps(
        {
            "model_type": model_type,
            "dtype": str(dtype).removeprefix("torch."),
            "preprocessing": dict(preprocessing),
            "width": width,
            "tensors": tensors,
        },
        sort_keys=True,
        separators=(",", ":"),
    )
    return hashlib.sha256(text.encode()).digest()
