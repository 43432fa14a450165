"""Random Qwen2.5-VL checkpoints.

Scales are chosen so that a random model is no degenerate one: every branch adds about as much as the residual stream
holds, attention is sharp enough to look at single rows of an image, and special tokens, whose rows of ``lm_head`` are
zero, are never generated. Greedy tokens so depend on the image.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from encoder_svc.checkpoints.qwen_vl import SPECIAL_TOKENS, vocabulary
from encoder_svc.checkpoints.recipe import BYTES, MAX_POSITIONS
from encoder_svc.checkpoints.tensors import TensorPlan, linear, norm, write_shards
from encoder_svc.checkpoints.tokenizer import write_tokenizer

PATCH, MERGE, FRAMES, CHANNELS = 14, 2, 2, 3
HEAD_SIZE = 64
"""Of the language model."""
MROPE_SECTION = (8, 12, 12)
"""Halves of the head's dimensions for time, height and width: in sum HEAD_SIZE / 2."""


@dataclass(frozen=True)
class Preset:
    """The sizes of a checkpoint."""

    vision_depth: int
    vision_hidden: int
    vision_heads: int
    vision_intermediate: int
    full_attention: tuple[int, ...]
    """Vision blocks that attend over whole frames."""
    layers: int
    hidden: int
    heads: int
    key_value_heads: int
    intermediate: int
    shards: int


PRESETS: dict[str, Preset] = {
    "tiny": Preset(4, 256, 8, 704, (1, 3), 2, 256, 4, 2, 512, 3),
    "small": Preset(8, 512, 8, 1408, (3, 7), 4, 512, 8, 2, 1408, 3),
    "base": Preset(12, 768, 12, 2112, (2, 5, 8, 11), 8, 1024, 16, 4, 2816, 4),
}
"""tiny: for tests; wide enough that a wrong order of operations shows. small: for benchmarks on a CPU. base: a tower of
the size of ViT-B, for a GPU."""


def write_qwen2_5_vl(directory: Path, preset: Preset, seed: int, progress: Callable[[float], None]) -> None:
    """Writes the files of a checkpoint into a folder that exists."""
    words = vocabulary("Qwen2_5_VLProcessor", "You are a helpful assistant.")
    write_tokenizer(directory, words, MAX_POSITIONS)
    tokens = words.ids
    for name, content in (
        ("config.json", _config(preset, tokens)),
        ("generation_config.json", _generation_config(tokens)),
        ("preprocessor_config.json", _preprocessor_config()),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    special = tuple(sorted(tokens.values()))
    write_shards(directory, _tower(preset), _language(preset, special), preset.shards, seed, progress)


def _config(preset: Preset, tokens: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "attention_dropout": 0.0,
        "bos_token_id": tokens["<|endoftext|>"],
        "eos_token_id": tokens["<|im_end|>"],
        "vision_start_token_id": tokens["<|vision_start|>"],
        "vision_end_token_id": tokens["<|vision_end|>"],
        "vision_token_id": tokens["<|vision_pad|>"],
        "image_token_id": tokens["<|image_pad|>"],
        "video_token_id": tokens["<|video_pad|>"],
        "hidden_act": "silu",
        "hidden_size": preset.hidden,
        "initializer_range": 0.02,
        "intermediate_size": preset.intermediate,
        "max_position_embeddings": MAX_POSITIONS,
        "max_window_layers": preset.layers,
        "num_attention_heads": preset.heads,
        "num_hidden_layers": preset.layers,
        "num_key_value_heads": preset.key_value_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": list(MROPE_SECTION)},
        "sliding_window": MAX_POSITIONS,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
        "vision_config": {
            "depth": preset.vision_depth,
            "hidden_act": "silu",
            "hidden_size": preset.vision_hidden,
            "intermediate_size": preset.vision_intermediate,
            "num_heads": preset.vision_heads,
            "in_channels": CHANNELS,
            "out_hidden_size": preset.hidden,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "spatial_patch_size": PATCH,
            "window_size": 112,
            "fullatt_block_indexes": list(preset.full_attention),
            "tokens_per_second": 2,
            "temporal_patch_size": FRAMES,
        },
        "vocab_size": BYTES + len(SPECIAL_TOKENS),
    }


def _generation_config(tokens: dict[str, int]) -> dict[str, Any]:
    return {
        "bos_token_id": tokens["<|endoftext|>"],
        "do_sample": False,
        "eos_token_id": [tokens["<|im_end|>"], tokens["<|endoftext|>"]],
        "pad_token_id": tokens["<|endoftext|>"],
    }


def _preprocessor_config() -> dict[str, Any]:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": 28 * 28 * 1280,
        "patch_size": PATCH,
        "temporal_patch_size": FRAMES,
        "merge_size": MERGE,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    }


def _tower(preset: Preset) -> list[TensorPlan]:
    width, block_width = preset.vision_hidden, preset.vision_hidden * MERGE**2
    values = CHANNELS * FRAMES * PATCH * PATCH
    plans = [TensorPlan("visual.patch_embed.proj.weight", (width, CHANNELS, FRAMES, PATCH, PATCH), values**-0.5)]
    for number in range(preset.vision_depth):
        name = f"visual.blocks.{number}"
        plans += [
            norm(f"{name}.norm1", width),
            norm(f"{name}.norm2", width),
            *linear(f"{name}.attn.qkv", 3 * width, width, gain=1.5, bias=True),
            *linear(f"{name}.attn.proj", width, width, bias=True),
            *linear(f"{name}.mlp.gate_proj", preset.vision_intermediate, width, bias=True),
            *linear(f"{name}.mlp.up_proj", preset.vision_intermediate, width, bias=True),
            *linear(f"{name}.mlp.down_proj", width, preset.vision_intermediate, bias=True),
        ]
    return [
        *plans,
        norm("visual.merger.ln_q", width),
        *linear("visual.merger.mlp.0", block_width, block_width, bias=True),
        *linear("visual.merger.mlp.2", preset.hidden, block_width, gain=2.0, bias=True),
    ]


def _language(preset: Preset, special: tuple[int, ...]) -> list[TensorPlan]:
    width, vocabulary = preset.hidden, BYTES + len(SPECIAL_TOKENS)
    plans = [TensorPlan("model.embed_tokens.weight", (vocabulary, width), 1.0)]
    for number in range(preset.layers):
        name = f"model.layers.{number}"
        plans += [
            norm(f"{name}.input_layernorm", width),
            norm(f"{name}.post_attention_layernorm", width),
            *linear(f"{name}.self_attn.q_proj", preset.heads * HEAD_SIZE, width, gain=1.5, bias=True),
            *linear(f"{name}.self_attn.k_proj", preset.key_value_heads * HEAD_SIZE, width, gain=1.5, bias=True),
            *linear(f"{name}.self_attn.v_proj", preset.key_value_heads * HEAD_SIZE, width, gain=2.0, bias=True),
            *linear(f"{name}.self_attn.o_proj", width, preset.heads * HEAD_SIZE, gain=2.0),
            *linear(f"{name}.mlp.gate_proj", preset.intermediate, width),
            *linear(f"{name}.mlp.up_proj", preset.intermediate, width),
            *linear(f"{name}.mlp.down_proj", width, preset.intermediate),
        ]
    return [
        *plans,
        norm("model.norm", width),
        TensorPlan("lm_head.weight", (vocabulary, width), 2 * width**-0.5, zero_rows=special),
    ]
