"""Recipes of the GLM-V families."""

from __future__ import annotations

from encoder_svc.checkpoints.language_config import architecture, language
from encoder_svc.checkpoints.recipe import Chat, Json, Recipe, Vocabulary
from encoder_svc.checkpoints.sizes import HEAD_SIZE, Sizes

_CLIP_MEAN, _CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]


def _words(processor: str) -> Vocabulary:
    return Vocabulary(
        special=(
            "<|endoftext|>",
            "[gMASK]",
            "<sop>",
            "<|system|>",
            "<|user|>",
            "<|assistant|>",
            "<|begin_of_image|>",
            "<|end_of_image|>",
            "<|begin_of_video|>",
            "<|end_of_video|>",
            "<|image|>",
            "<|video|>",
        ),
        end="<|user|>",
        pad="<|endoftext|>",
        chat=Chat(
            system=("<|system|>\n", ""),
            user=("<|user|>\n", ""),
            assistant=("<|assistant|>\n", ""),
            media={
                "image": "<|begin_of_image|><|image|><|end_of_image|>",
                "video": "<|begin_of_video|><|video|><|end_of_video|>",
            },
            begin="[gMASK]<sop>",
        ),
        processor=processor,
        named={"image_token": "<|image|>", "video_token": "<|video|>"},
    )


def _token_ids(words: Vocabulary) -> Json:
    ids = words.ids
    return {
        "image_end_token_id": ids["<|end_of_image|>"],
        "image_start_token_id": ids["<|begin_of_image|>"],
        "image_token_id": ids["<|image|>"],
        "video_end_token_id": ids["<|end_of_video|>"],
        "video_start_token_id": ids["<|begin_of_video|>"],
        "video_token_id": ids["<|video|>"],
    }


def _vision(model_type: str, sizes: Sizes) -> Json:
    return {
        "model_type": model_type,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "depth": sizes.tower_layers,
        "hidden_act": "silu",
        "hidden_size": sizes.tower_hidden,
        "image_size": 336,
        "in_channels": 3,
        "intermediate_size": sizes.tower_intermediate,
        "num_heads": sizes.tower_heads,
        "out_hidden_size": sizes.hidden,
        "patch_size": 14,
        "rms_norm_eps": 1e-05,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def _dense(sizes: Sizes, words: Vocabulary) -> Json:
    text = language(
        "glm4v_text",
        sizes,
        words,
        attention_bias=True,
        rope_scaling={"rope_type": "default", "mrope_section": [8, 12, 12]},
        rope_theta=10000,
    )
    del text["head_dim"]
    return text


def _glm4v(sizes: Sizes, words: Vocabulary) -> Json:
    return {
        **architecture("Glm4vForConditionalGeneration", "glm4v"),
        **_token_ids(words),
        "text_config": _dense(sizes, words),
        "vision_config": _vision("glm4v", sizes),
    }


def _glm46v(sizes: Sizes, words: Vocabulary) -> Json:
    return {
        **architecture("Glm46VForConditionalGeneration", "glm46v"),
        **_token_ids(words),
        "text_config": _dense(sizes, words),
        "vision_config": _vision("glm4v_vision", sizes),
    }


def _glm4v_moe(sizes: Sizes, words: Vocabulary) -> Json:
    return {
        **architecture("Glm4vMoeForConditionalGeneration", "glm4v_moe"),
        **_token_ids(words),
        "text_config": language(
            "glm4v_moe_text",
            sizes,
            words,
            attention_bias=True,
            first_k_dense_replace=1,
            head_dim=2 * HEAD_SIZE,
            moe_intermediate_size=3 * sizes.intermediate // 8,
            n_group=1,
            n_routed_experts=4,
            n_shared_experts=1,
            norm_topk_prob=True,
            num_experts_per_tok=2,
            partial_rotary_factor=0.5,
            rope_scaling={"rope_type": "default", "mrope_section": [8, 12, 12]},
            rope_theta=10000.0,
            routed_scaling_factor=1.0,
            topk_group=1,
        ),
        "vision_config": _vision("glm4v_moe", sizes),
    }


def _files(version: str) -> dict[str, Json]:
    shared: Json = {
        "do_convert_rgb": True,
        "do_rescale": True,
        "image_mean": _CLIP_MEAN,
        "image_std": _CLIP_STD,
        "merge_size": 2,
        "patch_size": 14,
        "processor_class": f"{version}Processor",
        "temporal_patch_size": 2,
    }
    return {
        "preprocessor_config.json": {
            **shared,
            "image_processor_type": f"{version}ImageProcessor",
            "size": {"shortest_edge": 12544, "longest_edge": 9633792},
        },
        "video_preprocessor_config.json": {
            **shared,
            "do_sample_frames": True,
            "fps": 2,
            "max_duration": 300,
            "num_frames": 16,
            "size": {"shortest_edge": 12544, "longest_edge": 47040000},
            "video_processor_type": f"{version}VideoProcessor",
        },
    }


GLM_RECIPES: dict[str, Recipe] = {
    "glm4v": Recipe(_words("Glm4vProcessor"), _glm4v, _files("Glm4v")),
    "glm46v": Recipe(_words("Glm46VProcessor"), _glm46v, _files("Glm46V")),
    "glm4v_moe": Recipe(_words("Glm4vProcessor"), _glm4v_moe, _files("Glm4v")),
}
