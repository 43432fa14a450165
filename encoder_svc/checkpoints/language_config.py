"""Parts of configs that many families share."""

from __future__ import annotations

from typing import Any

from encoder_svc.checkpoints.recipe import MAX_POSITIONS, Json, Vocabulary
from encoder_svc.checkpoints.sizes import HEAD_SIZE, Sizes


def language(model_type: str, sizes: Sizes, vocabulary: Vocabulary, **more: Any) -> Json:
    """The config of a language model of the Llama kind."""
    return {
        "model_type": model_type,
        "bos_token_id": vocabulary.ids[vocabulary.begin or vocabulary.pad],
        "eos_token_id": vocabulary.ids[vocabulary.end],
        "pad_token_id": vocabulary.ids[vocabulary.pad],
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.intermediate,
        "max_position_embeddings": MAX_POSITIONS,
        "num_attention_heads": sizes.heads,
        "num_hidden_layers": sizes.layers,
        "num_key_value_heads": sizes.key_value_heads,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "vocab_size": vocabulary.size,
        **more,
    }


def experts(sizes: Sizes) -> Json:
    """The fields of a mixture of experts, as the Qwen families name them."""
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 3 * sizes.intermediate // 8,
        "norm_topk_prob": True,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    }


def deepseek(sizes: Sizes, vocabulary: Vocabulary) -> Json:
    """The config of a DeepSeek-V3 language model: one dense layer, then experts."""
    more = language("deepseek_v3", sizes, vocabulary)
    del more["head_dim"]
    return more | {
        "first_k_dense_replace": 1,
        "kv_lora_rank": sizes.hidden // 4,
        "moe_intermediate_size": 3 * sizes.intermediate // 8,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "num_key_value_heads": sizes.heads,
        "q_lora_rank": sizes.hidden // 2,
        "qk_nope_head_dim": HEAD_SIZE // 2,
        "qk_rope_head_dim": HEAD_SIZE // 2,
        "routed_scaling_factor": 1.0,
        "scoring_func": "sigmoid",
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": HEAD_SIZE,
    }


def architecture(name: str, model_type: str) -> Json:
    """The first fields of a config."""
    return {"architectures": [name], "model_type": model_type, "torch_dtype": "float32", "tie_word_embeddings": False}
