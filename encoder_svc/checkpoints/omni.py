"""Recipes of the Omni families. Their talkers, which make speech, are left out, as their configs allow."""

from __future__ import annotations

from encoder_svc.checkpoints.audio_config import audio_encoder, feature_extractor
from encoder_svc.checkpoints.language_config import architecture, experts, language
from encoder_svc.checkpoints.qwen_vl import deepstack, vision3
from encoder_svc.checkpoints.recipe import Json, Recipe, Vocabulary, chat_ml
from encoder_svc.checkpoints.sizes import Sizes

_SPECIAL_2_5 = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|AUDIO|>",
    "<|audio_bos|>",
    "<|audio_eos|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_bos|>",
    "<|vision_eos|>",
    "<|vision_pad|>",
    "<|IMAGE|>",
    "<|VIDEO|>",
)
_NAMED_2_5 = {
    "image_token": "<|IMAGE|>",
    "audio_token": "<|AUDIO|>",
    "video_token": "<|VIDEO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}
_SPECIAL_3 = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<|audio_pad|>",
)
_NAMED_3 = {
    "image_token": "<|image_pad|>",
    "audio_token": "<|audio_pad|>",
    "video_token": "<|video_pad|>",
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_start|>",
    "audio_eos_token": "<|audio_end|>",
}


def _words(special: tuple[str, ...], named: dict[str, str], processor: str) -> Vocabulary:
    vision, audio = (named[f"{kind}_bos_token"] + "{}" + named[f"{kind}_eos_token"] for kind in ("vision", "audio"))
    media = {
        "image": vision.format(named["image_token"]),
        "video": vision.format(named["video_token"]),
        "audio": audio.format(named["audio_token"]),
    }
    return Vocabulary(
        special=special,
        end="<|im_end|>",
        pad="<|endoftext|>",
        chat=chat_ml(media, "You are a helpful assistant."),
        processor=processor,
        tokenizer="Qwen2Tokenizer",
        named=named,
    )


def _qwen2_5_omni(sizes: Sizes, words: Vocabulary) -> Json:
    ids = words.ids
    text = language("qwen2_5_omni_text", sizes, words, rope_scaling={"type": "default", "mrope_section": [8, 12, 12]})
    del text["head_dim"]
    return {
        **architecture("Qwen2_5OmniForConditionalGeneration", "qwen2_5_omni"),
        "enable_audio_output": False,
        "thinker_config": {
            "model_type": "qwen2_5_omni_thinker",
            "audio_token_index": ids["<|AUDIO|>"],
            "image_token_index": ids["<|IMAGE|>"],
            "video_token_index": ids["<|VIDEO|>"],
            "audio_start_token_id": ids["<|audio_bos|>"],
            "audio_end_token_id": ids["<|audio_eos|>"],
            "vision_start_token_id": ids["<|vision_bos|>"],
            "vision_end_token_id": ids["<|vision_eos|>"],
            "user_token_id": ord("u"),
            "position_id_per_seconds": 25,
            "seconds_per_chunk": 2,
            "tie_word_embeddings": False,
            "audio_config": audio_encoder("qwen2_5_omni_audio_encoder", sizes, n_window=100, output_dim=sizes.hidden),
            "text_config": text,
            "vision_config": {
                "model_type": "qwen2_5_omni_vision_encoder",
                "depth": sizes.tower_layers,
                "fullatt_block_indexes": [sizes.tower_layers - 2],
                "hidden_act": "silu",
                "hidden_size": sizes.tower_hidden,
                "in_channels": 3,
                "in_chans": 3,
                "intermediate_size": sizes.tower_intermediate,
                "num_heads": sizes.tower_heads,
                "out_hidden_size": sizes.hidden,
                "patch_size": 14,
                "spatial_merge_size": 2,
                "spatial_patch_size": 14,
                "temporal_patch_size": 2,
                "tokens_per_second": 25,
                "window_size": 112,
            },
        },
    }


def _qwen3_omni_moe(sizes: Sizes, words: Vocabulary) -> Json:
    ids = words.ids
    return {
        **architecture("Qwen3OmniMoeForConditionalGeneration", "qwen3_omni_moe"),
        "enable_audio_output": False,
        "im_start_token_id": ids["<|im_start|>"],
        "im_end_token_id": ids["<|im_end|>"],
        "user_token_id": ord("u"),
        "assistant_token_id": ord("a"),
        "system_token_id": ord("s"),
        "thinker_config": {
            "model_type": "qwen3_omni_moe_thinker",
            "audio_token_id": ids["<|audio_pad|>"],
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids["<|video_pad|>"],
            "audio_start_token_id": ids["<|audio_start|>"],
            "audio_end_token_id": ids["<|audio_end|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
            "user_token_id": ord("u"),
            "position_id_per_seconds": 13,
            "seconds_per_chunk": 2,
            "tie_word_embeddings": False,
            "audio_config": audio_encoder(
                "qwen3_omni_moe_audio_encoder",
                sizes,
                conv_chunksize=500,
                downsample_hidden_size=sizes.tower_hidden // 4,
                n_window=50,
                n_window_infer=800,
                output_dim=sizes.hidden,
            ),
            "text_config": language(
                "qwen3_omni_moe_text",
                sizes,
                words,
                rope_scaling={"rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True},
                **experts(sizes),
                num_hidden_layers=max(sizes.layers, 4),
            ),
            "vision_config": vision3(sizes, "qwen3_omni_moe_vision_encoder", deepstack_visual_indexes=deepstack(sizes)),
        },
    }


def _preprocessor(processor: str, patch: int, mean: list[float], std: list[float]) -> Json:
    return feature_extractor(
        processor,
        300,
        image_processor_type="Qwen2VLImageProcessor",
        image_mean=mean,
        image_std=std,
        min_pixels=3136,
        max_pixels=12845056,
        merge_size=2,
        patch_size=patch,
        temporal_patch_size=2,
    )


OMNI_RECIPES: dict[str, Recipe] = {
    "qwen2_5_omni": Recipe(
        _words(_SPECIAL_2_5, _NAMED_2_5, "Qwen2_5OmniProcessor"),
        _qwen2_5_omni,
        {
            "preprocessor_config.json": _preprocessor(
                "Qwen2_5OmniProcessor",
                14,
                [0.48145466, 0.4578275, 0.40821073],
                [0.26862954, 0.26130258, 0.27577711],
            )
        },
    ),
    "qwen3_omni_moe": Recipe(
        _words(_SPECIAL_3, _NAMED_3, "Qwen3OmniMoeProcessor"),
        _qwen3_omni_moe,
        {"preprocessor_config.json": _preprocessor("Qwen3OmniMoeProcessor", 16, [0.5] * 3, [0.5] * 3)},
    ),
}
