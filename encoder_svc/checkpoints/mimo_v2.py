"""Random MiMo-V2 checkpoints: three shards, and the folder of the audio tokenizer.

Language model and towers have all that the published ones have, in fewer and narrower layers; the language model's
layout is MiMo-V2-Flash's, as far as transformers knows it. Codebooks are random points of about the size that the
encoder's features have, so codes depend on the sound.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from encoder_svc.checkpoints.language_config import architecture, language
from encoder_svc.checkpoints.recipe import MAX_POSITIONS, Json, Vocabulary, chat_ml
from encoder_svc.checkpoints.sizes import HEAD_SIZE, Sizes
from encoder_svc.checkpoints.tensors import TensorPlan, linear, norm, write_shards
from encoder_svc.checkpoints.tokenizer import write_tokenizer
from encoder_svc.models.checkpoint import CONFIG

SHARDS = 3
PATCH, MERGE, FRAMES, CHANNELS = 16, 2, 2, 3
MELS, GROUP, CODEBOOKS = 128, 4, (256, 256, 128, 64)
LOCAL_LAYERS = 2
EXPERTS = 4
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<|audio_pad|>",
    "<|mimo_video_start|>",
    "<|mimo_video_end|>",
    "<|mimo_audio_start|>",
    "<|mimo_audio_end|>",
)


@dataclass(frozen=True)
class CentredPlan(TensorPlan):
    """The sum of each row is zero: the mean level of a mel, which is far from zero, would drown what changes in it."""

    def draw(self, seed: int) -> torch.Tensor:
        """See :meth:`TensorPlan.draw`."""
        tensor = super().draw(seed)
        return tensor - tensor.flatten(1).mean(dim=1)[:, None, None]


def vocabulary() -> Vocabulary:
    """Its special tokens."""
    media = {
        "image": "<|vision_start|><|image_pad|><|vision_end|>",
        "video": "<|video_pad|>",
        "audio": "<|mimo_audio_start|><|audio_pad|><|mimo_audio_end|>",
    }
    return Vocabulary(special=SPECIAL, end="<|im_end|>", pad="<|endoftext|>", chat=chat_ml(media))


def write_mimo_v2(directory: Path, sizes: Sizes, seed: int, progress: Callable[[float], None]) -> None:
    """Writes the files of a checkpoint into a folder that exists."""
    words = vocabulary()
    write_tokenizer(directory, words, MAX_POSITIONS)
    ids = words.ids
    generation = {
        "bos_token_id": ids["<|endoftext|>"],
        "do_sample": False,
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
    }
    for name, content in (
        (CONFIG, _config(sizes, words)),
        ("generation_config.json", generation),
        ("preprocessor_config.json", _preprocessor_config()),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    towers = _vision(sizes) + _audio(sizes)
    write_shards(directory, towers, _language(sizes, words), SHARDS, seed, lambda done: progress(0.7 * done))
    folder = directory / "audio_tokenizer"
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(_tokenizer_config(sizes), indent=2) + "\n")
    write_shards(folder, _tokenizer(sizes), [], 1, seed, lambda done: progress(0.7 + 0.3 * done))


def _config(sizes: Sizes, words: Vocabulary) -> Json:
    ids = words.ids
    depth = sizes.tower_layers + 2
    return {
        **language("mimo_v2", sizes, words),
        **architecture("MiMoV2ForCausalLM", "mimo_v2"),
        "attention_bias": False,
        "attention_value_scale": 0.707,
        "layer_types": [
            "full_attention" if _is_first(number) else "sliding_attention" for number in range(sizes.layers)
        ],
        "mlp_layer_types": ["dense" if _is_first(number) else "sparse" for number in range(sizes.layers)],
        "moe_intermediate_size": 3 * sizes.intermediate // 8,
        "n_group": 1,
        "n_routed_experts": EXPERTS,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
            for kind, theta in (("full_attention", 5e6), ("sliding_attention", 1e4))
        },
        "sliding_window": 24,
        "topk_group": 1,
        "v_head_dim": HEAD_SIZE,
        "vision_config": {
            "model_type": "mimovl",
            "depth": depth,
            # Every kind of block, in every order: whole frames first and last, rows, columns, rows after columns.
            "fullatt_block_indexes": [0, depth - 1],
            "hidden_act": "silu",
            "hidden_size": sizes.tower_hidden,
            "in_chans": CHANNELS,
            "intermediate_size": sizes.tower_intermediate,
            "num_heads": sizes.tower_heads * 2,
            "num_key_value_heads": sizes.tower_heads // 2,
            "out_hidden_size": sizes.hidden,
            "patch_size": PATCH,
            "qk_channels": HEAD_SIZE,
            "spatial_merge_size": MERGE,
            "spatial_patch_size": PATCH,
            "temporal_patch_size": FRAMES,
            "tokens_per_second": 2,
            "use_sink": True,
            "visual_token_window_size": 12,
            "vit_window_attn_types": [-1, *(number % 2 for number in range(depth - 2)), -1],
            "window_size": 128,
        },
        "audio_config": {
            "add_post_norm": True,
            "audio_channels": len(CODEBOOKS),
            "audio_segment_size": 6000,
            "group_size": GROUP,
            "input_full_attention": True,
            "input_local_attn_heads": sizes.tower_heads,
            "input_local_dim": sizes.tower_hidden,
            "input_local_head_dim": HEAD_SIZE,
            "input_local_hidden_dropout": 0.0,
            "input_local_intermediate_size": sizes.tower_intermediate,
            "input_local_layers": LOCAL_LAYERS,
            "out_hidden_size": sizes.hidden,
            "partial_rotary_factor": 1.0,
            "projection_layers": 2,
            "rope_theta": 640000,
            # Texts, as published.
            "speech_vocab_size": str(max(CODEBOOKS) + 1),
            "speech_zeroemb_idx": str(max(CODEBOOKS)),
        },
        "processor_config": {
            "audio_avg_pooler": 2,
            "audio_channels": len(CODEBOOKS),
            "audio_end_token_id": ids["<|mimo_audio_end|>"],
            "audio_group_size": GROUP,
            "audio_input_id_per_second": 25.0,
            "audio_sampling_rate": 24000,
            "audio_start_token_id": ids["<|mimo_audio_start|>"],
            "audio_token_id": ids["<|audio_pad|>"],
            "fps": 1.0,
            "image_token_id": ids["<|image_pad|>"],
            "max_frames": 3600,
            "merge_size": MERGE,
            "min_frames": None,
            "num_frames": None,
            "pad_token_id": ids["<|endoftext|>"],
            "patch_size": PATCH,
            "rope_type": "rope",
            "temporal_compression_ratio": 1,
            "temporal_patch_size": FRAMES,
            "use_video_timestamps": True,
            "video_audio_interleave_length": 0,
            "video_end_token_id": ids["<|mimo_video_end|>"],
            "video_max_pixels": 8388608,
            "video_min_pixels": 8192,
            "video_start_token_id": ids["<|mimo_video_start|>"],
            "video_token_id": ids["<|video_pad|>"],
            "video_total_max_pixels": 268435456,
            "vision_end_token_id": ids["<|vision_end|>"],
            "vision_start_token_id": ids["<|vision_start|>"],
        },
    }


def _preprocessor_config() -> Json:
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "min_pixels": 8192,
        "max_pixels": 8388608,
        "patch_size": PATCH,
        "temporal_patch_size": FRAMES,
        "merge_size": MERGE,
        "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    }


def _tokenizer_config(sizes: Sizes) -> Json:
    return {
        "model_type": "mimo_audio_tokenizer",
        "activation_function": "gelu",
        "avg_pooler": 2,
        "codebook_size": list(CODEBOOKS),
        "d_model": sizes.tower_hidden,
        "encoder_attention_heads": sizes.tower_heads,
        "encoder_attn_window_size": [16, 0],
        "encoder_causal": True,
        "encoder_ffn_dim": sizes.tower_intermediate,
        "encoder_layers": sizes.tower_layers,
        "encoder_skip_layer_id": 2,
        "fmax": None,
        "fmin": 0,
        "hop_length": 240,
        "hybrid_attention": True,
        "hybrid_block_size": 8,
        "kernel_size": 3,
        "ln_type": "LayerNorm",
        "max_audio_seconds": 300,
        "n_mels": MELS,
        "nfft": 960,
        "num_quantizers": len(CODEBOOKS),
        "position_embedding_type": "rope",
        "rope_theta": 10000,
        "rope_type": "default",
        "sampling_rate": 24000,
        "scale_embedding": False,
        "stride_size": 2,
        "swa_per_block": 2,
        "window_size": 960,
    }


def _vision(sizes: Sizes) -> list[TensorPlan]:
    width, merged = sizes.tower_hidden, sizes.tower_hidden * MERGE**2
    heads, key_heads, depth = sizes.tower_heads * 2, sizes.tower_heads // 2, sizes.tower_layers + 2
    values = CHANNELS * FRAMES * PATCH * PATCH
    plans = [TensorPlan("visual.patch_embed.proj.weight", (width, CHANNELS, FRAMES, PATCH, PATCH), values**-0.5)]
    for number in range(depth):
        name = f"visual.blocks.{number}"
        plans += [
            norm(f"{name}.norm1", width),
            norm(f"{name}.norm2", width),
            *linear(f"{name}.attn.qkv", (heads + 2 * key_heads) * HEAD_SIZE, width, gain=1.5, bias=True),
            *linear(f"{name}.attn.proj", width, heads * HEAD_SIZE, gain=2.0, bias=True),
            *linear(f"{name}.mlp.gate_proj", sizes.tower_intermediate, width, bias=True),
            *linear(f"{name}.mlp.up_proj", sizes.tower_intermediate, width, bias=True),
            *linear(f"{name}.mlp.down_proj", width, sizes.tower_intermediate, bias=True),
        ]
        if 0 < number < depth - 1:
            plans.append(TensorPlan(f"{name}.attn.sinks", (heads,), 2.0))
    return [
        *plans,
        norm("visual.merger.ln_q", width),
        *linear("visual.merger.mlp.0", merged, merged),
        *linear("visual.merger.mlp.2", sizes.hidden, merged, gain=2.0),
    ]


def _audio(sizes: Sizes) -> list[TensorPlan]:
    width, group = sizes.tower_hidden, sizes.tower_hidden * GROUP
    entries = max(CODEBOOKS) + 1
    plans = [
        TensorPlan(f"speech_embeddings.{channel}.weight", (entries, width), 0.5) for channel in range(len(CODEBOOKS))
    ]
    for number in range(LOCAL_LAYERS):
        name = f"audio_encoder.input_local_transformer.layers.{number}"
        plans += [norm(f"{name}.input_layernorm", width), norm(f"{name}.post_attention_layernorm", width)]
        for kind, gain in (("q", 1.5), ("k", 1.5), ("v", 2.0)):
            plans += linear(f"{name}.self_attn.{kind}_proj", width, width, gain=gain, bias=True)
        plans += [
            *linear(f"{name}.self_attn.o_proj", width, width),
            *linear(f"{name}.mlp.gate_proj", sizes.tower_intermediate, width),
            *linear(f"{name}.mlp.up_proj", sizes.tower_intermediate, width),
            *linear(f"{name}.mlp.down_proj", width, sizes.tower_intermediate),
        ]
    return [
        *plans,
        norm("audio_encoder.input_local_transformer.norm", width),
        *linear("audio_encoder.projection.mlp.0", 4 * group, group),
        *linear("audio_encoder.projection.mlp.2", sizes.hidden, 4 * group, gain=2.0),
    ]


def _tokenizer(sizes: Sizes) -> list[TensorPlan]:
    width = sizes.tower_hidden
    plans = [
        CentredPlan("encoder.conv1.weight", (width, MELS, 3), 2 * (3 * MELS) ** -0.5),
        TensorPlan("encoder.conv1.bias", (width,), 0.1),
        TensorPlan("encoder.conv2.weight", (width, width, 3), (3 * width) ** -0.5),
        TensorPlan("encoder.conv2.bias", (width,), 0.1),
        *_layer_norm("encoder.layer_norm", width),
        TensorPlan("encoder.down_sample_layer.0.weight", (width, width, 2), (2 * width) ** -0.5),
        *_layer_norm("encoder.down_sample_norm", width),
    ]
    for number in range(sizes.tower_layers):
        name = f"encoder.layers.{number}"
        plans += [
            *linear(f"{name}.self_attn.q_proj", width, width, gain=1.5, bias=True),
            *linear(f"{name}.self_attn.k_proj", width, width, gain=1.5),
            *linear(f"{name}.self_attn.v_proj", width, width, gain=2.0, bias=True),
            *linear(f"{name}.self_attn.out_proj", width, width, gain=2.0, bias=True),
            *_layer_norm(f"{name}.self_attn_layer_norm", width),
            *linear(f"{name}.fc1", sizes.tower_intermediate, width, bias=True),
            *linear(f"{name}.fc2", width, sizes.tower_intermediate, bias=True),
            *_layer_norm(f"{name}.final_layer_norm", width),
        ]
    # Each codebook is finer than the one before, as those that were trained are.
    plans += [
        TensorPlan(f"encoder.quantizer.vq.layers.{number}._codebook.embed", (size, width), 0.6 * 0.7**number)
        for number, size in enumerate(CODEBOOKS)
    ]
    return plans


def _layer_norm(name: str, width: int) -> list[TensorPlan]:
    return [norm(name, width), TensorPlan(f"{name}.bias", (width,), 0.1)]


def _is_first(layer: int) -> bool:
    """The first layer attends to everything and has no experts; the others have windows, sinks, and experts."""
    return layer == 0


def _language(sizes: Sizes, words: Vocabulary) -> list[TensorPlan]:
    width, special = sizes.hidden, tuple(words.ids.values())
    plans = [TensorPlan("model.embed_tokens.weight", (words.size, width), 1.0)]
    for number in range(sizes.layers):
        name = f"model.layers.{number}"
        heads = sizes.heads * HEAD_SIZE
        key_heads = sizes.key_value_heads * HEAD_SIZE * (1 if _is_first(number) else 2)
        plans += [
            norm(f"{name}.input_layernorm", width),
            norm(f"{name}.post_attention_layernorm", width),
            *linear(f"{name}.self_attn.q_proj", heads, width, gain=1.5),
            *linear(f"{name}.self_attn.k_proj", key_heads, width, gain=1.5),
            *linear(f"{name}.self_attn.v_proj", key_heads, width, gain=2.0),
            *linear(f"{name}.self_attn.o_proj", width, heads, gain=2.0),
        ]
        if _is_first(number):
            plans += _perceptron(f"{name}.mlp", width, sizes.intermediate)
            continue
        plans += [
            TensorPlan(f"{name}.self_attn.attention_sink_bias", (sizes.heads,), 1.0),
            *linear(f"{name}.mlp.gate", EXPERTS, width),
            TensorPlan(f"{name}.mlp.gate.e_score_correction_bias", (EXPERTS,), 0.1),
        ]
        for expert in range(EXPERTS):
            plans += _perceptron(f"{name}.mlp.experts.{expert}", width, 3 * sizes.intermediate // 8)
    return [
        *plans,
        norm("model.norm", width),
        # Of the layers that predict more than one token, only what belongs to no other layer.
        norm("mtp.layers.0.token_layernorm", width),
        *linear("mtp.layers.0.eh_proj", width, 2 * width),
        TensorPlan("lm_head.weight", (words.size, width), 2 * width**-0.5, zero_rows=special),
    ]


def _perceptron(name: str, width: int, inner: int) -> list[TensorPlan]:
    return [
        *linear(f"{name}.gate_proj", inner, width),
        *linear(f"{name}.up_proj", inner, width),
        *linear(f"{name}.down_proj", width, inner, gain=2.0),
    ]
