"""The families, by ``model_type``, and those that have no language side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from encoder_client.errors import EncoderClientError
from encoder_client.language import expansion, sound_in_video
from encoder_client.language.family import Entrance, Expansion, Family, Placeholder, Value
from encoder_client.language.omni_positions import MixedSoundPositions
from epd.encoder.v1.media_pb2 import Modality

IMAGE, VIDEO, AUDIO = Modality.MODALITY_IMAGE, Modality.MODALITY_VIDEO, Modality.MODALITY_AUDIO

_IMAGE_GRID = Value("image_grid_thw", ("image_grid_thw",))
_VIDEO_GRID = Value("video_grid_thw", ("video_grid_thw",))
_OMNI_SECONDS = Value("video_second_per_grid", ("video_second_per_grid", "second_per_grid_ts"))
_QWEN_SECONDS = Value("second_per_grid_ts", ("second_per_grid_ts",))


def _image(expand: Expansion = expansion.rows_alone, *values: Value) -> Placeholder:
    return Placeholder("image_token_id", expand, 1, values=values)


def _video(expand: Expansion = expansion.rows_alone, *values: Value) -> Placeholder:
    return Placeholder("video_token_id", expand, 2, values=values)


def _audio(mel_frames_argument: str | None = None) -> Placeholder:
    return Placeholder("audio_token_id", expansion.rows_alone, 3, mel_frames_argument=mel_frames_argument)


_GRID_IMAGE = _image(expansion.rows_alone, _IMAGE_GRID)
_TIMED_VIDEO = _video(expansion.timed(expansion.seconds_before), _VIDEO_GRID)


def _qwen_vl(model_class: str, video: Placeholder, entrance: Entrance = Entrance.EMBEDDINGS) -> Family:
    return Family(
        model_class=model_class,
        tower_prefixes=("visual.", "model.visual."),
        tower_modules=("model.visual",),
        placeholders={IMAGE: _GRID_IMAGE, VIDEO: video},
        entrance=entrance,
        type_ids_argument="mm_token_type_ids",
    )


def _qwen3_5(model_class: str) -> Family:
    return replace(_qwen_vl(model_class, _TIMED_VIDEO), unused_prefixes=("mtp.", "model.mtp."))


def _omni(model_class: str, unused: str, entrance: Entrance, video: Expansion) -> Family:
    return Family(
        model_class=model_class,
        tower_prefixes=("thinker.visual.", "thinker.audio_tower."),
        tower_modules=("model.visual", "model.audio_tower"),
        placeholders={
            IMAGE: _GRID_IMAGE,
            VIDEO: replace(
                _video(video, _VIDEO_GRID, _OMNI_SECONDS),
                mel_frames_argument="audio_feature_lengths",
                marks=sound_in_video.OMNI_MARKS,
                sound_row_field="audio_token_id",
            ),
            AUDIO: _audio("audio_feature_lengths"),
        },
        entrance=entrance,
        sound_argument="use_audio_in_video",
        positions=MixedSoundPositions,
        config_field="thinker_config",
        unused_prefixes=("talker.", unused),
    )


def _glm(model_class: str, video: Expansion) -> Family:
    # A video's rows fill the token of images; the marks tell them apart.
    frames = Placeholder("image_token_id", video, 2, shown_as="<|video|>", values=(_VIDEO_GRID,))
    return replace(_qwen_vl(model_class, frames), tower_prefixes=("visual.", "model.visual."))


def _projected(model_class: str, placeholders: Mapping[Modality, Placeholder], *more: str) -> Family:
    """A tower and a projector beside the language model, as LLaVA has them."""
    return Family(
        model_class=model_class,
        tower_prefixes=(
            "vision_tower.",
            "multi_modal_projector.",
            "model.vision_tower.",
            "model.multi_modal_projector.",
            *more,
            *(f"model.{name}" for name in more),
        ),
        tower_modules=("model.vision_tower", "model.multi_modal_projector", *(f"model.{name}" for name in more)),
        placeholders=placeholders,
    )


def _heard(model_class: str) -> Family:
    """A tower for sound and a projector beside the language model."""
    return Family(
        model_class=model_class,
        tower_prefixes=(
            "audio_tower.",
            "multi_modal_projector.",
            "model.audio_tower.",
            "model.multi_modal_projector.",
        ),
        tower_modules=("model.audio_tower", "model.multi_modal_projector"),
        placeholders={AUDIO: _audio()},
    )


FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": _qwen_vl("Qwen2VLForConditionalGeneration", _video(expansion.rows_alone, _VIDEO_GRID)),
    "qwen2_5_vl": _qwen_vl(
        "Qwen2_5_VLForConditionalGeneration", _video(expansion.rows_alone, _VIDEO_GRID, _QWEN_SECONDS)
    ),
    "qwen3_vl": _qwen_vl("Qwen3VLForConditionalGeneration", _TIMED_VIDEO, Entrance.TOWER_OUTPUTS),
    "qwen3_vl_moe": _qwen_vl("Qwen3VLMoeForConditionalGeneration", _TIMED_VIDEO, Entrance.TOWER_OUTPUTS),
    "qwen3_5": _qwen3_5("Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe": _qwen3_5("Qwen3_5MoeForConditionalGeneration"),
    "qwen2_5_omni": _omni(
        "Qwen2_5OmniThinkerForConditionalGeneration", "token2wav.", Entrance.EMBEDDINGS, sound_in_video.in_chunks
    ),
    "qwen3_omni_moe": _omni(
        "Qwen3OmniMoeThinkerForConditionalGeneration", "code2wav.", Entrance.TOWER_OUTPUTS, sound_in_video.in_time
    ),
    "mimo_v2": Family(
        model_class="MiMoV2FlashForCausalLM",
        tower_prefixes=("visual.", "vision_model.", "audio_", "speech_embeddings."),
        tower_modules=(),
        placeholders={
            IMAGE: _image(),
            VIDEO: replace(
                _video(sound_in_video.in_units),
                marks=sound_in_video.MIMO_MARKS,
                sound_row_field="audio_token_id",
            ),
            AUDIO: _audio(),
        },
        has_own_config=True,
        unused_prefixes=("mtp", "model.mtp"),
    ),
    "qwen2_audio": _heard("Qwen2AudioForConditionalGeneration"),
    "voxtral": _heard("VoxtralForConditionalGeneration"),
    "audioflamingo3": _heard("AudioFlamingo3ForConditionalGeneration"),
    "glmasr": _heard("GlmAsrForConditionalGeneration"),
    "whisper": Family(
        model_class="WhisperForConditionalGeneration",
        tower_prefixes=("model.encoder.",),
        tower_modules=("model.encoder",),
        placeholders={AUDIO: _audio()},
        entrance=Entrance.CROSS_ATTENTION,
    ),
    "kimi_k25": Family(
        model_class="Kimi_K25ForConditionalGeneration",
        tower_prefixes=("vision_tower.", "mm_projector.", "model.vision_tower.", "model.mm_projector."),
        tower_modules=("model.vision_tower", "model.mm_projector"),
        placeholders={IMAGE: _image(), VIDEO: _video(expansion.timed(expansion.clock_before))},
    ),
    "kimi_vl": Family(
        model_class="DeepseekV3ForCausalLM",
        tower_prefixes=("vision_tower.", "multi_modal_projector."),
        tower_modules=(),
        placeholders={IMAGE: Placeholder("media_placeholder_token_id", expansion.rows_alone, 1)},
        config_field="text_config",
        language_prefix="language_model.",
    ),
    "minicpmv4_6": Family(
        model_class="MiniCPMV4_6ForConditionalGeneration",
        tower_prefixes=("model.vision_tower.", "model.merger."),
        tower_modules=("model.vision_tower", "model.merger"),
        placeholders={
            IMAGE: _image(expansion.sliced("target_sizes", "grids")),
            VIDEO: _video(expansion.sliced("target_sizes_videos", "grids_videos")),
        },
    ),
    "internvl": _projected(
        "InternVLForConditionalGeneration",
        {
            IMAGE: _image(expansion.between("<img>", "</img>")),
            VIDEO: Placeholder("image_token_id", expansion.numbered_frames("<img>", "</img>"), 2, shown_as="<video>"),
        },
    ),
    "llava": _projected("LlavaForConditionalGeneration", {IMAGE: _image()}),
    "llava_onevision": _projected(
        "LlavaOnevisionForConditionalGeneration", {IMAGE: _image(), VIDEO: _video()}, "image_newline"
    ),
    "gemma3": replace(
        _projected(
            "Gemma3ForConditionalGeneration",
            {IMAGE: Placeholder("image_token_id", expansion.crops, 1, shown_as="<start_of_image>")},
        ),
        entrance=Entrance.JOINED_TOWER_OUTPUTS,
        type_ids_argument="token_type_ids",
    ),
    "mistral3": _projected(
        "Mistral3ForConditionalGeneration", {IMAGE: _image(expansion.lines("[IMG_BREAK]", "[IMG_END]"))}
    ),
    "glm4v": _glm("Glm4vForConditionalGeneration", expansion.timed(expansion.whole_seconds_after)),
    "glm4v_moe": _glm("Glm4vMoeForConditionalGeneration", expansion.timed(expansion.whole_seconds_after)),
    "glm46v": _glm("Glm46VForConditionalGeneration", expansion.timed(expansion.seconds_after)),
}

WITHOUT_LANGUAGE: Mapping[str, str] = {
    "siglip": "its text tower makes vectors to compare images with",
    "clip": "its text tower makes vectors to compare images with",
    "dinov2": "it knows images only",
}
"""Families whose embeddings no language model reads, and why."""


def family_of(model_type: str) -> Family:
    """The row of a ``model_type``.

    Raises:
        EncoderClientError: there is none.
    """
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    if model_type in WITHOUT_LANGUAGE:
        raise EncoderClientError(
            f"a checkpoint of {model_type} has no language side: {WITHOUT_LANGUAGE[model_type]}; use the embeddings as "
            "they are"
        )
    known = ", ".join(sorted(FAMILIES))
    raise EncoderClientError(f"the language side knows no model_type {model_type!r}; it knows {known}")
