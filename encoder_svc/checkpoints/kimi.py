"""Recipes of the families with MoonViT: Kimi-VL, which transformers does not know, and Kimi K2.5."""

from __future__ import annotations

from encoder_svc.checkpoints.language_config import architecture, deepseek
from encoder_svc.checkpoints.recipe import Chat, Json, Recipe, Vocabulary
from encoder_svc.checkpoints.sizes import Sizes

_HALF = [0.5, 0.5, 0.5]


def _words(image: str, video: str, *more: str) -> Vocabulary:
    return Vocabulary(
        special=(
            "[BOS]",
            "[EOS]",
            "<|im_end|>",
            "<|im_user|>",
            "<|im_assistant|>",
            "<|im_system|>",
            "<|im_middle|>",
            *more,
            "<|media_content|>",
            "<|media_end|>",
            "<|media_pad|>",
            "[PAD]",
        ),
        end="<|im_end|>",
        pad="[PAD]",
        begin="[BOS]",
        chat=Chat(
            system=("<|im_system|>system<|im_middle|>", "<|im_end|>"),
            user=("<|im_user|>user<|im_middle|>", "<|im_end|>"),
            assistant=("<|im_assistant|>assistant<|im_middle|>", "<|im_end|>"),
            media={"image": image, "video": video} if video else {"image": image},
        ),
    )


_KIMI_VL = _words("<|media_start|>image<|media_content|><|media_pad|><|media_end|>", "", "<|media_start|>")
_KIMI_K25 = _words(
    "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\n",
    "<|kimi_k25_video_placeholder|>",
    "<|media_begin|>",
    "<|kimi_k25_video_placeholder|>",
)


def _kimi_vl(sizes: Sizes, words: Vocabulary) -> Json:
    ids = words.ids
    return {
        **architecture("KimiVLForConditionalGeneration", "kimi_vl"),
        "bos_token_id": ids["[BOS]"],
        "eos_token_id": ids["<|im_end|>"],
        "ignore_index": -100,
        "media_placeholder_token_id": ids["<|media_pad|>"],
        "pad_token_id": ids["[PAD]"],
        "text_config": deepseek(sizes, words),
        "vision_config": {
            "model_type": "moonvit",
            "hidden_size": sizes.tower_hidden,
            "init_pos_emb_height": 16,
            "init_pos_emb_width": 16,
            "intermediate_size": sizes.tower_intermediate,
            "merge_kernel_size": [2, 2],
            "num_attention_heads": sizes.tower_heads,
            "num_hidden_layers": sizes.tower_layers,
            "patch_size": 14,
        },
        "vocab_size": words.size,
    }


def _kimi_vl_towers(sizes: Sizes) -> dict[str, tuple[int, ...]]:
    width, inner = sizes.tower_hidden, sizes.tower_intermediate
    linears = {"mlp.fc0": (inner, width), "mlp.fc1": (width, inner), "wqkv": (3 * width, width), "wo": (width, width)}
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.pos_emb.weight": (16, 16, width),
        "vision_tower.patch_embed.proj.weight": (width, 3, 14, 14),
        "vision_tower.patch_embed.proj.bias": (width,),
    }
    for number in range(sizes.tower_layers):
        block = f"vision_tower.encoder.blocks.{number}"
        for name in ("norm0", "norm1"):
            shapes |= {f"{block}.{name}.weight": (width,), f"{block}.{name}.bias": (width,)}
        for name, shape in linears.items():
            shapes |= {f"{block}.{name}.weight": shape, f"{block}.{name}.bias": shape[:1]}
    shapes |= {f"vision_tower.encoder.final_layernorm.{kind}": (width,) for kind in ("weight", "bias")}
    shapes |= {f"multi_modal_projector.pre_norm.{kind}": (width,) for kind in ("weight", "bias")}
    merged = 4 * width
    for name, shape in (("linear_1", (merged, merged)), ("linear_2", (sizes.hidden, merged))):
        shapes |= {f"multi_modal_projector.{name}.weight": shape, f"multi_modal_projector.{name}.bias": shape[:1]}
    return shapes


def _kimi_k25(sizes: Sizes, words: Vocabulary) -> Json:
    ids = words.ids
    return {
        **architecture("Kimi_K25ForConditionalGeneration", "kimi_k25"),
        "bos_token_id": ids["[BOS]"],
        "eos_token_id": ids["<|im_end|>"],
        "image_token_id": ids["<|media_pad|>"],
        "pad_token_id": ids["[PAD]"],
        "projection_hidden_size": sizes.tower_hidden,
        "projection_layer_norm_eps": 1e-05,
        "text_config": deepseek(sizes, words),
        "video_token_id": ids["<|kimi_k25_video_placeholder|>"],
        "vision_config": {
            "model_type": "kimi_k25_vision",
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": sizes.tower_hidden,
            "intermediate_size": sizes.tower_intermediate,
            "merge_kernel_size": [2, 2],
            "num_attention_heads": sizes.tower_heads,
            "num_hidden_layers": sizes.tower_layers,
            "patch_size": 14,
            "pos_emb_height": 16,
            "pos_emb_time": 4,
            "pos_emb_width": 16,
        },
        "vision_end_token_id": ids["<|media_end|>"],
        "vision_start_token_id": ids["<|media_begin|>"],
    }


def _processor(kind: str, patches: int) -> Json:
    return {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": _HALF,
        "image_std": _HALF,
        "max_patches": patches,
        "merge_size": 2,
        "patch_size": 14,
        "processor_class": "Kimi_K25Processor",
        "size": {"max_height": 512, "max_width": 512},
        f"{kind}_processor_type": f"Kimi_K25{kind.capitalize()}Processor",
    }


KIMI_RECIPES: dict[str, Recipe] = {
    "kimi_k25": Recipe(
        _KIMI_K25,
        _kimi_k25,
        {
            "preprocessor_config.json": _processor("image", 16384),
            "video_preprocessor_config.json": {
                **_processor("video", 4096),
                "do_sample_frames": True,
                "fps": 2,
                "temporal_patch_size": 4,
            },
        },
        renames={
            "vision_tower.encoder.patch_embed.": "vision_tower.patch_embed.",
            "model.mm_projector.": "mm_projector.",
            "language_model.model.blocks.": "language_model.model.layers.",
        },
    ),
    "kimi_vl": Recipe(
        _KIMI_VL,
        _kimi_vl,
        {
            "preprocessor_config.json": {
                "image_mean": _HALF,
                "image_processor_type": "KimiVLImageProcessor",
                "image_std": _HALF,
                "in_token_limit": 4096,
                "merge_kernel_size": [2, 2],
                "num_pooled_tokens": 1024,
                "pad_input": True,
                "patch_size": 14,
            }
        },
        prefix="language_model.",
        add=_kimi_vl_towers,
        architecture="DeepseekV3ForCausalLM",
        architecture_config="text_config",
    ),
}
