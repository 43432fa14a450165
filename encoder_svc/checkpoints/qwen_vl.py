"""Recipes of the Qwen-VL families but Qwen2.5-VL, and of the two Omni families."""

from __future__ import annotations

from typing import Any

from encoder_svc.checkpoints.language_config import architecture, experts, language
from encoder_svc.checkpoints.recipe import Json, Recipe, Vocabulary, chat_ml
from encoder_svc.checkpoints.sizes import HEAD_SIZE, Sizes

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
"""In the order of the hub's tokenizer."""

_MEDIA = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
}
_CLIP_MEAN, _CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_HALF = [0.5, 0.5, 0.5]


def vocabulary(processor: str, default_system: str = "") -> Vocabulary:
    """The vocabulary of the Qwen-VL families."""
    return Vocabulary(
        special=SPECIAL_TOKENS,
        end="<|im_end|>",
        pad="<|endoftext|>",
        chat=chat_ml(_MEDIA, default_system),
        processor=processor,
        tokenizer="Qwen2Tokenizer",
    )


def token_ids(words: Vocabulary) -> Json:
    """The fields of the config that name special tokens."""
    ids = words.ids
    return {
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
    }


def _qwen2_vl(sizes: Sizes, words: Vocabulary) -> Json:
    text = language("qwen2_vl", sizes, words, sliding_window=32768, max_window_layers=sizes.layers)
    for name in ("head_dim", "pad_token_id"):
        del text[name]
    return {
        **text,
        **architecture("Qwen2VLForConditionalGeneration", "qwen2_vl"),
        **token_ids(words),
        "attention_dropout": 0.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]},
        "use_sliding_window": False,
        "vision_token_id": words.ids["<|vision_pad|>"],
        "vision_config": {
            "depth": sizes.tower_layers,
            "embed_dim": sizes.tower_hidden,
            "mlp_ratio": 2,
            "num_heads": sizes.tower_heads,
            "in_chans": 3,
            "hidden_size": sizes.hidden,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
        },
    }


def vision3(sizes: Sizes, model_type: str, **more: Any) -> Json:
    """A vision encoder as Qwen3-VL's kin have it."""
    return {
        "model_type": model_type,
        "depth": sizes.tower_layers,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": sizes.tower_hidden,
        "in_channels": 3,
        "intermediate_size": sizes.tower_intermediate,
        "num_heads": sizes.tower_heads,
        "num_position_embeddings": 576,
        "out_hidden_size": sizes.hidden,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        **more,
    }


def deepstack(sizes: Sizes) -> list[int]:
    """Three blocks of the tower; the language model has at least as many layers."""
    step = sizes.tower_layers // 3
    return [step - 1, 2 * step - 1, 3 * step - 1]


def _mrope3() -> Json:
    return {"rope_type": "default", "mrope_section": [12, 10, 10], "mrope_interleaved": True}


def _deeper(sizes: Sizes) -> Json:
    return {"num_hidden_layers": max(sizes.layers, 4)}


def _qwen3_vl(sizes: Sizes, words: Vocabulary) -> Json:
    return {
        **architecture("Qwen3VLForConditionalGeneration", "qwen3_vl"),
        **token_ids(words),
        "text_config": language(
            "qwen3_vl_text", sizes, words, rope_scaling=_mrope3(), rope_theta=5000000, **_deeper(sizes)
        ),
        "vision_config": vision3(sizes, "qwen3_vl", deepstack_visual_indexes=deepstack(sizes)),
    }


def _qwen3_vl_moe(sizes: Sizes, words: Vocabulary) -> Json:
    return {
        **architecture("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe"),
        **token_ids(words),
        "text_config": language(
            "qwen3_vl_moe_text",
            sizes,
            words,
            rope_scaling=_mrope3(),
            rope_theta=5000000,
            **experts(sizes),
            **_deeper(sizes),
        ),
        "vision_config": vision3(sizes, "qwen3_vl_moe", deepstack_visual_indexes=deepstack(sizes)),
    }


def _qwen3_5(sizes: Sizes, words: Vocabulary) -> Json:
    return {
        **architecture("Qwen3_5ForConditionalGeneration", "qwen3_5"),
        **token_ids(words),
        "text_config": _hybrid("qwen3_5_text", sizes, words),
        "vision_config": vision3(sizes, "qwen3_5", deepstack_visual_indexes=[]),
    }


def _qwen3_5_moe(sizes: Sizes, words: Vocabulary) -> Json:
    mixture = {**experts(sizes), "shared_expert_intermediate_size": 3 * sizes.intermediate // 8}
    return {
        **architecture("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe"),
        **token_ids(words),
        "text_config": {**_hybrid("qwen3_5_moe_text", sizes, words), **mixture},
        "vision_config": vision3(sizes, "qwen3_5_moe", deepstack_visual_indexes=[]),
    }


def _hybrid(model_type: str, sizes: Sizes, words: Vocabulary) -> Json:
    """Three layers of linear attention, then one of full attention."""
    return language(
        model_type,
        sizes,
        words,
        attn_output_gate=True,
        full_attention_interval=4,
        head_dim=4 * HEAD_SIZE,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=HEAD_SIZE,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_value_head_dim=HEAD_SIZE,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        **_deeper(sizes),
    )


def _image_processor(patch: int, processor: str, mean: list[float], std: list[float], size: Json) -> Json:
    return {
        "image_processor_type": "Qwen2VLImageProcessor" if patch == 14 else "Qwen2VLImageProcessorFast",
        "processor_class": processor,
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": mean,
        "image_std": std,
        **size,
    }


def _files3(processor: str) -> dict[str, Json]:
    image = _image_processor(16, processor, _HALF, _HALF, {"size": {"longest_edge": 16777216, "shortest_edge": 65536}})
    video = {**image, "size": {"longest_edge": 25165824, "shortest_edge": 4096}}
    del video["image_processor_type"]
    return {
        "preprocessor_config.json": image,
        "video_preprocessor_config.json": {**video, "video_processor_type": "Qwen3VLVideoProcessor"},
    }


_SYSTEM = "You are a helpful assistant."
_PIXELS = {"min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}

QWEN_VL_RECIPES: dict[str, Recipe] = {
    "qwen2_vl": Recipe(
        vocabulary("Qwen2VLProcessor", _SYSTEM),
        _qwen2_vl,
        {"preprocessor_config.json": _image_processor(14, "Qwen2VLProcessor", _CLIP_MEAN, _CLIP_STD, _PIXELS)},
    ),
    "qwen3_vl": Recipe(vocabulary("Qwen3VLProcessor"), _qwen3_vl, _files3("Qwen3VLProcessor")),
    "qwen3_vl_moe": Recipe(vocabulary("Qwen3VLProcessor"), _qwen3_vl_moe, _files3("Qwen3VLProcessor")),
    **{
        family: Recipe(
            vocabulary("Qwen3VLProcessor"),
            config,
            _files3("Qwen3VLProcessor"),
            zero_centred=("_layernorm.", "language_model.norm.", "q_norm.", "k_norm."),
        )
        for family, config in (("qwen3_5", _qwen3_5), ("qwen3_5_moe", _qwen3_5_moe))
    },
}
