"""Recipes of the families that see images through a tower of their own and a projector."""

from __future__ import annotations

from encoder_svc.checkpoints.language_config import architecture, language
from encoder_svc.checkpoints.recipe import Chat, Json, Recipe, Vocabulary, chat_ml
from encoder_svc.checkpoints.sizes import HEAD_SIZE, Sizes

_CLIP_MEAN, _CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_IMAGENET_MEAN, _IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_HALF = [0.5, 0.5, 0.5]

_LLAVA = Vocabulary(
    special=("<unk>", "<s>", "</s>", "<image>", "<pad>"),
    end="</s>",
    pad="<pad>",
    begin="<s>",
    chat=Chat(
        system=("", " "),
        user=("USER: ", " "),
        assistant=("ASSISTANT:", "</s>"),
        media={"image": "<image>\n"},
        begin="<s>",
    ),
    processor="LlavaProcessor",
    named={"image_token": "<image>"},
)
_ONEVISION = Vocabulary(
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>", "<video>"),
    end="<|im_end|>",
    pad="<|endoftext|>",
    chat=chat_ml({"image": "<image>\n", "video": "<video>\n"}),
    processor="LlavaOnevisionProcessor",
    tokenizer="Qwen2Tokenizer",
    named={"image_token": "<image>", "video_token": "<video>"},
)
_INTERNVL = Vocabulary(
    special=("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
    end="<|im_end|>",
    pad="<|endoftext|>",
    chat=chat_ml({"image": "<IMG_CONTEXT>\n", "video": "<video>\n"}),
    processor="InternVLProcessor",
    tokenizer="Qwen2Tokenizer",
    named={
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    },
)
_GEMMA3 = Vocabulary(
    special=(
        "<pad>",
        "<eos>",
        "<bos>",
        "<start_of_turn>",
        "<end_of_turn>",
        "<start_of_image>",
        "<end_of_image>",
        "<image_soft_token>",
    ),
    end="<eos>",
    pad="<pad>",
    begin="<bos>",
    chat=Chat(
        system=("<start_of_turn>user\n", "<end_of_turn>\n"),
        user=("<start_of_turn>user\n", "<end_of_turn>\n"),
        assistant=("<start_of_turn>model\n", "<end_of_turn>\n"),
        media={"image": "<start_of_image>"},
        begin="<bos>",
    ),
    processor="Gemma3Processor",
    named={
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    },
)
_MISTRAL3 = Vocabulary(
    special=("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]"),
    end="</s>",
    pad="<pad>",
    begin="<s>",
    chat=Chat(
        system=("[INST]", "[/INST]"),
        user=("[INST]", "[/INST]"),
        assistant=("", "</s>"),
        media={"image": "[IMG]"},
        begin="<s>",
    ),
    processor="PixtralProcessor",
)

_ONEVISION_EDGE = 130
"""Of a tile: no multiple of the patch, as 384 is none."""


def _without_head_size(config: Json) -> Json:
    del config["head_dim"]
    return config


def _siglip(sizes: Sizes, edge: int, patch: int) -> Json:
    return {
        "model_type": "siglip_vision_model",
        "hidden_size": sizes.tower_hidden,
        "image_size": edge,
        "intermediate_size": sizes.tower_intermediate,
        "num_attention_heads": sizes.tower_heads,
        "num_hidden_layers": sizes.tower_layers,
        "patch_size": patch,
        "vision_use_head": False,
    }


def _llava(sizes: Sizes, words: Vocabulary) -> Json:
    return {
        **architecture("LlavaForConditionalGeneration", "llava"),
        "image_seq_length": 64,
        "image_token_index": words.ids["<image>"],
        "pad_token_id": words.ids["<pad>"],
        "projector_hidden_act": "gelu",
        "text_config": _without_head_size(language("llama", sizes, words)),
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": sizes.tower_hidden,
            "image_size": 112,
            "intermediate_size": sizes.tower_intermediate,
            "num_attention_heads": sizes.tower_heads,
            "num_hidden_layers": sizes.tower_layers,
            "patch_size": 14,
            "projection_dim": sizes.hidden,
            "vocab_size": 32000,
        },
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }


def _pinpoints() -> list[list[int]]:
    return [[_ONEVISION_EDGE * h, _ONEVISION_EDGE * w] for h in range(1, 4) for w in range(1, 4)]


def _llava_onevision(sizes: Sizes, words: Vocabulary) -> Json:
    return {
        **architecture("LlavaOnevisionForConditionalGeneration", "llava_onevision"),
        "image_grid_pinpoints": _pinpoints(),
        "image_token_index": words.ids["<image>"],
        "projector_hidden_act": "gelu",
        "text_config": _without_head_size(language("qwen2", sizes, words)),
        "video_token_index": words.ids["<video>"],
        "vision_aspect_ratio": "anyres_max_9",
        "vision_config": _siglip(sizes, _ONEVISION_EDGE, 14),
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }


def _internvl(sizes: Sizes, words: Vocabulary) -> Json:
    return {
        **architecture("InternVLForConditionalGeneration", "internvl"),
        "downsample_ratio": 0.5,
        "image_seq_length": 16,
        "image_token_id": words.ids["<IMG_CONTEXT>"],
        "projector_hidden_act": "gelu",
        "text_config": _without_head_size(language("qwen2", sizes, words)),
        "vision_config": {
            "model_type": "internvl_vision",
            "attention_bias": True,
            "hidden_act": "gelu",
            "hidden_size": sizes.tower_hidden,
            "image_size": [112, 112],
            "intermediate_size": sizes.tower_intermediate,
            "layer_norm_eps": 1e-06,
            "layer_scale_init_value": 0.1,
            "norm_type": "layer_norm",
            "num_attention_heads": sizes.tower_heads,
            "num_channels": 3,
            "num_hidden_layers": sizes.tower_layers,
            "patch_size": [14, 14],
            "use_absolute_position_embeddings": True,
            "use_mask_token": False,
            "use_mean_pooling": True,
            "use_qk_norm": False,
        },
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "default",
    }


def _gemma3(sizes: Sizes, words: Vocabulary) -> Json:
    ids = words.ids
    return {
        **architecture("Gemma3ForConditionalGeneration", "gemma3"),
        "boi_token_index": ids["<start_of_image>"],
        "eoi_token_index": ids["<end_of_image>"],
        "eos_token_id": [ids["<eos>"], ids["<end_of_turn>"]],
        "image_token_index": ids["<image_soft_token>"],
        "mm_tokens_per_image": 16,
        "text_config": language(
            "gemma3_text",
            sizes,
            words,
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=HEAD_SIZE,
            sliding_window=64,
            sliding_window_pattern=2,
            tie_word_embeddings=True,
        ),
        "tie_word_embeddings": True,
        "vision_config": _siglip(sizes, 224, 14),
    }


def _mistral3(sizes: Sizes, words: Vocabulary) -> Json:
    return {
        **architecture("Mistral3ForConditionalGeneration", "mistral3"),
        "image_token_index": words.ids["[IMG]"],
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": language("mistral", sizes, words, sliding_window=None),
        "vision_config": {
            "model_type": "pixtral",
            "attention_dropout": 0.0,
            "head_dim": HEAD_SIZE,
            "hidden_act": "silu",
            "hidden_size": sizes.tower_hidden,
            "image_size": 1540,
            "intermediate_size": sizes.tower_intermediate,
            "num_attention_heads": sizes.tower_heads,
            "num_channels": 3,
            "num_hidden_layers": sizes.tower_layers,
            "patch_size": 14,
            "rope_theta": 10000.0,
        },
        "vision_feature_layer": -1,
    }


def _normalised(mean: list[float], std: list[float], kind: str, processor: str, resample: int) -> Json:
    return {
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": mean,
        "image_processor_type": kind,
        "image_std": std,
        "processor_class": processor,
        "resample": resample,
        "rescale_factor": 1 / 255,
    }


_VISION_MODEL = {"vision_tower.": "vision_tower.vision_model."}

IMAGE_RECIPES: dict[str, Recipe] = {
    "llava": Recipe(
        _LLAVA,
        _llava,
        {
            "preprocessor_config.json": {
                **_normalised(_CLIP_MEAN, _CLIP_STD, "CLIPImageProcessor", "LlavaProcessor", 3),
                "crop_size": {"height": 112, "width": 112},
                "do_center_crop": True,
                "size": {"shortest_edge": 112},
            },
            "processor_config.json": {
                "image_token": "<image>",
                "num_additional_image_tokens": 1,
                "patch_size": 14,
                "processor_class": "LlavaProcessor",
                "vision_feature_select_strategy": "default",
            },
        },
        renames=_VISION_MODEL,
    ),
    "llava_onevision": Recipe(
        _ONEVISION,
        _llava_onevision,
        {
            "preprocessor_config.json": {
                **_normalised(_HALF, _HALF, "LlavaOnevisionImageProcessor", "LlavaOnevisionProcessor", 3),
                "do_pad": True,
                "image_grid_pinpoints": _pinpoints(),
                "size": {"height": _ONEVISION_EDGE, "width": _ONEVISION_EDGE},
            },
            "video_preprocessor_config.json": {
                **_normalised(_HALF, _HALF, "LlavaOnevisionVideoProcessor", "LlavaOnevisionProcessor", 3),
                "size": {"height": _ONEVISION_EDGE, "width": _ONEVISION_EDGE},
                "video_processor_type": "LlavaOnevisionVideoProcessor",
            },
            "processor_config.json": {
                "image_token": "<image>",
                "num_image_tokens": 81,
                "processor_class": "LlavaOnevisionProcessor",
                "video_token": "<video>",
                "vision_aspect_ratio": "anyres_max_9",
                "vision_feature_select_strategy": "full",
            },
        },
        renames=_VISION_MODEL,
    ),
    "internvl": Recipe(
        _INTERNVL,
        _internvl,
        {
            "preprocessor_config.json": {
                **_normalised(_IMAGENET_MEAN, _IMAGENET_STD, "GotOcr2ImageProcessorFast", "InternVLProcessor", 3),
                "crop_to_patches": False,
                "max_patches": 12,
                "min_patches": 1,
                "size": {"height": 112, "width": 112},
            },
            "processor_config.json": {"image_seq_length": 16, "processor_class": "InternVLProcessor"},
        },
    ),
    "gemma3": Recipe(
        _GEMMA3,
        _gemma3,
        {
            "preprocessor_config.json": {
                **_normalised(_HALF, _HALF, "Gemma3ImageProcessor", "Gemma3Processor", 2),
                "do_pan_and_scan": None,
                "pan_and_scan_max_num_crops": None,
                "pan_and_scan_min_crop_size": None,
                "pan_and_scan_min_ratio_to_activate": None,
                "image_seq_length": 16,
                "size": {"height": 224, "width": 224},
            },
            "processor_config.json": {"image_seq_length": 16, "processor_class": "Gemma3Processor"},
        },
        renames=_VISION_MODEL,
        zero_centred=("layernorm.", "q_norm.", "k_norm.", "model.norm.", "mm_soft_emb_norm."),
        tied=True,
        scaled_embeddings=True,
    ),
    "mistral3": Recipe(
        _MISTRAL3,
        _mistral3,
        {
            "preprocessor_config.json": {
                **_normalised(_CLIP_MEAN, _CLIP_STD, "PixtralImageProcessorFast", "PixtralProcessor", 3),
                "patch_size": 14,
                "size": {"longest_edge": 1540},
            },
            "processor_config.json": {
                "image_break_token": "[IMG_BREAK]",
                "image_end_token": "[IMG_END]",
                "image_token": "[IMG]",
                "patch_size": 14,
                "processor_class": "PixtralProcessor",
                "spatial_merge_size": 2,
            },
        },
    ),
}
