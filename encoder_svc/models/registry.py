"""Which families can be served, and where their code is. Free of torch, so that the front can refuse at start.

To add a family, add a row to :data:`FAMILIES` (docs/models.md).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    needs_transformers: bool = True
    """Its engine imports transformers, which takes longer than all else of a start."""
    folders: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Folders of the checkpoint that have weights of their own: how the names of the towers' tensors begin in each."""
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What no checkpoint tells but the operator may (``--model-options``): the values of each, the default first."""

    def check_options(self, options: Mapping[str, str]) -> None:
        """Refuses an option that the family does not have.

        Raises:
            SetupError: there is no such option, or no such value of it.
        """
        for name, value in options.items():
            if name not in self.options:
                known = ", ".join(self.options) or "none"
                raise SetupError(f"{self.model_type} has no model option {name!r}; it has {known}")
            if value not in self.options[name]:
                raise SetupError(f"the model option {name} is {value!r}; use {' or '.join(self.options[name])}")


_VISUAL_PREFIXES = ("visual.", "model.visual.")
_LLAVA_PREFIXES = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def _image_family(
    model_type: str,
    architecture: str,
    prefixes: tuple[str, ...] = _LLAVA_PREFIXES,
    tensors: tuple[str, ...] = ("embedding",),
    verified: str = "images: pixels of the processor without torchvision, embeddings within 1e-4 of transformers 5.24, "
    "fp32",
    adapter: str = "encoder_svc.models.transformers_images:make_adapter",
    needs_transformers: bool = True,
    sees_videos: bool = False,
) -> Family:
    """A family that :mod:`encoder_svc.models.image_families` describes."""
    return Family(
        model_type=model_type,
        architectures=(architecture,),
        modalities=(Modality.MODALITY_IMAGE, *((Modality.MODALITY_VIDEO,) if sees_videos else ())),
        tensors=tensors,
        prefixes=prefixes,
        adapter=adapter,
        verified=verified,
        needs_transformers=needs_transformers,
    )


_PATCHES = "images and videos: pixels bit for bit, frames, embeddings within 1e-4 of transformers 5.24, fp32"
_PIL_IMAGES_AND_VIDEOS = (
    "images: pixels of the processor without torchvision; videos: pixels bit for bit, frames; embeddings within 1e-4 "
    "of transformers 5.24, fp32"
)
_POOLED_TENSORS = ("embedding", "pooled_embedding")


def _qwen_vl_family(model_type: str, architecture: str, levels: int = 0) -> Family:
    """A family of :mod:`encoder_svc.models.qwen_vl`, with as many levels of deepstack as its checkpoints have."""
    return Family(
        model_type=model_type,
        architectures=(architecture,),
        modalities=(Modality.MODALITY_IMAGE, Modality.MODALITY_VIDEO),
        tensors=("embedding", *(f"deepstack_{level}" for level in range(levels))),
        prefixes=_VISUAL_PREFIXES,
        adapter="encoder_svc.models.qwen_vl:make_adapter",
        verified="images and videos: pixels bit for bit, frames, embeddings within 1e-4 of transformers 5.24, fp32",
        needs_transformers=False,
    )


def _audio_family(model_type: str, architecture: str, prefixes: tuple[str, ...], adapter: str = "") -> Family:
    """A family that only hears, with a module of its own or the adapter that is named."""
    return Family(
        model_type=model_type,
        architectures=(architecture,),
        modalities=(Modality.MODALITY_AUDIO,),
        tensors=("embedding",),
        prefixes=prefixes,
        adapter=adapter or f"encoder_svc.models.{model_type}:make_adapter",
        verified="sound: samples and mel (within 1e-5), embeddings within 1e-4 of transformers 5.24, fp32",
        needs_transformers=bool(adapter),
    )


def _omni_family(model_type: str, architecture: str, levels: int = 0) -> Family:
    """A family of :mod:`encoder_svc.models.qwen_omni`, with as many levels of deepstack as its checkpoints have."""
    return Family(
        model_type=model_type,
        architectures=(architecture,),
        modalities=(Modality.MODALITY_IMAGE, Modality.MODALITY_VIDEO, Modality.MODALITY_AUDIO),
        tensors=("embedding", *(f"deepstack_{level}" for level in range(levels)), "video_audio_embedding"),
        prefixes=("thinker.visual.", "thinker.audio_tower.", "thinker.model.visual.", "thinker.model.audio_tower."),
        adapter="encoder_svc.models.qwen_omni:make_adapter",
        verified="images, videos with sound, sound: embeddings within 1e-4 of transformers 5.24, fp32",
        needs_transformers=False,
    )


_AUDIO_PREFIXES = ("audio_tower.", "multi_modal_projector.", "model.audio_tower.", "model.multi_modal_projector.")

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        _qwen_vl_family("qwen2_vl", "Qwen2VLForConditionalGeneration"),
        _qwen_vl_family("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"),
        _qwen_vl_family("qwen3_vl", "Qwen3VLForConditionalGeneration", levels=3),
        _qwen_vl_family("qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", levels=3),
        _qwen_vl_family("qwen3_5", "Qwen3_5ForConditionalGeneration"),
        _qwen_vl_family("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration"),
        _omni_family("qwen2_5_omni", "Qwen2_5OmniForConditionalGeneration"),
        _omni_family("qwen3_omni_moe", "Qwen3OmniMoeForConditionalGeneration", levels=3),
        Family(
            model_type="mimo_v2",
            architectures=("MiMoV2ForCausalLM",),
            modalities=(Modality.MODALITY_IMAGE, Modality.MODALITY_VIDEO, Modality.MODALITY_AUDIO),
            tensors=("embedding", "video_audio_embedding"),
            prefixes=("visual.", "vision_model.", "audio_", "speech_embeddings."),
            adapter="encoder_svc.models.mimo_v2:make_adapter",
            verified="images, videos with sound, sound: within 1e-4 of our own formulation; not with published weights",
            needs_transformers=False,
            folders={"audio_tokenizer": ("encoder.",)},
            options={"sink_form": ("first_key", "softmax"), "merger_norm": ("layer_norm", "rms_norm")},
        ),
        _audio_family("whisper", "WhisperForConditionalGeneration", ("model.encoder.", "encoder.")),
        _audio_family("qwen2_audio", "Qwen2AudioForConditionalGeneration", _AUDIO_PREFIXES),
        _audio_family("voxtral", "VoxtralForConditionalGeneration", _AUDIO_PREFIXES),
        *(
            _audio_family(
                model_type, architecture, _AUDIO_PREFIXES, "encoder_svc.models.transformers_audio:make_adapter"
            )
            for model_type, architecture in (
                ("audioflamingo3", "AudioFlamingo3ForConditionalGeneration"),
                ("glmasr", "GlmAsrForConditionalGeneration"),
            )
        ),
        _image_family("llava", "LlavaForConditionalGeneration"),
        _image_family(
            "llava_onevision",
            "LlavaOnevisionForConditionalGeneration",
            (*_LLAVA_PREFIXES, "image_newline", "model.image_newline"),
            verified=_PIL_IMAGES_AND_VIDEOS,
            sees_videos=True,
        ),
        _image_family(
            "internvl", "InternVLForConditionalGeneration", verified=_PIL_IMAGES_AND_VIDEOS, sees_videos=True
        ),
        _image_family("gemma3", "Gemma3ForConditionalGeneration"),
        _image_family("mistral3", "Mistral3ForConditionalGeneration"),
        *(
            _image_family(model_type, architecture, _VISUAL_PREFIXES, verified=_PATCHES, sees_videos=True)
            for model_type, architecture in (
                ("glm4v", "Glm4vForConditionalGeneration"),
                ("glm4v_moe", "Glm4vMoeForConditionalGeneration"),
                ("glm46v", "Glm46VForConditionalGeneration"),
            )
        ),
        _image_family(
            "minicpmv4_6",
            "MiniCPMV4_6ForConditionalGeneration",
            ("model.vision_tower.", "model.merger."),
            verified=_PIL_IMAGES_AND_VIDEOS,
            sees_videos=True,
        ),
        _image_family(
            "kimi_k25",
            "Kimi_K25ForConditionalGeneration",
            ("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector."),
            verified=_PATCHES,
            sees_videos=True,
        ),
        _image_family(
            "kimi_vl",
            "KimiVLForConditionalGeneration",
            ("vision_tower.", "multi_modal_projector."),
            verified="images: embeddings within 1e-4 of Kimi K2.5's tower of transformers 5.24, fp32",
            adapter="encoder_svc.models.kimi_vl:make_adapter",
            needs_transformers=False,
        ),
        _image_family("siglip", "SiglipModel", ("vision_model.",), _POOLED_TENSORS),
        _image_family("clip", "CLIPModel", ("vision_model.", "visual_projection."), _POOLED_TENSORS),
        _image_family("dinov2", "Dinov2Model", ("embeddings.", "encoder.", "layernorm."), _POOLED_TENSORS),
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


def check_servable(path: Path, options: Mapping[str, str] | None = None) -> CheckpointSummary:
    """Checks everything of a checkpoint that can be checked without torch, in milliseconds.

    Args:
        path: the checkpoint's folder.
        options: of the family, by name.

    Raises:
        SetupError: it cannot be served; the message says what to change.
    """
    checkpoint, family = _open(path)
    family.check_options(options or {})
    checkpoint.stored(family.prefixes)
    for folder, prefixes in family.folders.items():
        checkpoint.folder(folder).stored(prefixes)
    return CheckpointSummary(checkpoint.name, family.model_type, checkpoint.dtype)


def open_adapter(path: Path, dtype: str, options: Mapping[str, str] | None = None) -> Adapter:
    """Makes the adapter of a checkpoint.

    Args:
        path: the checkpoint's folder.
        dtype: ``float32``, ``bfloat16`` or ``float16`` (:func:`~encoder_svc.models.dtypes.resolve_dtype`).
        options: of the family, by name.

    Raises:
        SetupError: the checkpoint cannot be served, or there is no such dtype or option.
    """
    import torch

    if dtype not in DATA_TYPES:
        raise SetupError(f"dtype {dtype!r} is none of {', '.join(DATA_TYPES)}")
    _, family = _open(path)
    family.check_options(options or {})
    module, _, name = family.adapter.partition(":")
    factory: AdapterFactory = getattr(importlib.import_module(module), name)
    return factory(path, getattr(torch, dtype), **(options or {}))


def _open(path: Path) -> tuple[Checkpoint, Family]:
    checkpoint = open_checkpoint(path)
    family = find_family(checkpoint)
    if family.needs_preprocessor and not (checkpoint.preprocessor or checkpoint.feature_extractor):
        raise SetupError(
            f"{path} has no {PREPROCESSOR_CONFIG}, which says how {family.model_type} prepares media; download it too"
        )
    return checkpoint, family
