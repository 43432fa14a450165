"""The recipe of MiniCPM-V 4.6."""

from __future__ import annotations

from encoder_svc.checkpoints.language_config import architecture, language
from encoder_svc.checkpoints.recipe import Json, Recipe, Vocabulary, chat_ml
from encoder_svc.checkpoints.sizes import Sizes

_HALF = [0.5, 0.5, 0.5]

_WORDS = Vocabulary(
    special=(
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        "<image>",
        "</image>",
        "<slice>",
        "</slice>",
        "<image_id>",
        "</image_id>",
        "<|image_pad|>",
        "<|video_pad|>",
    ),
    end="<|im_end|>",
    pad="<|endoftext|>",
    chat=chat_ml({"image": "<|image_pad|>\n", "video": "<|video_pad|>\n"}),
    processor="MiniCPMV4_6Processor",
    tokenizer="Qwen2Tokenizer",
    named={
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "image_start_token": "<image>",
        "image_end_token": "</image>",
        "slice_start_token": "<slice>",
        "slice_end_token": "</slice>",
        "image_id_start_token": "<image_id>",
        "image_id_end_token": "</image_id>",
    },
)


def _config(sizes: Sizes, words: Vocabulary) -> Json:
    return {
        **architecture("MiniCPMV4_6ForConditionalGeneration", "minicpmv4_6"),
        "downsample_mode": "16x",
        "image_size": 112,
        "image_token_id": words.ids["<|image_pad|>"],
        "insert_layer_id": 1,
        "merge_kernel_size": [2, 2],
        "merger_times": 1,
        "text_config": language("qwen3", sizes, words),
        "video_token_id": words.ids["<|video_pad|>"],
        "vision_config": {
            "model_type": "minicpmv4_6_vision",
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": sizes.tower_hidden,
            "image_size": 112,
            "intermediate_size": sizes.tower_intermediate,
            "num_attention_heads": sizes.tower_heads,
            "num_hidden_layers": sizes.tower_layers,
            "patch_size": 14,
        },
    }


MINICPM_RECIPES: dict[str, Recipe] = {
    "minicpmv4_6": Recipe(
        _WORDS,
        _config,
        {
            "preprocessor_config.json": {
                "do_convert_rgb": True,
                "do_normalize": True,
                "do_rescale": True,
                "downsample_mode": "16x",
                "image_mean": _HALF,
                "image_processor_type": "MiniCPMV4_6ImageProcessor",
                "image_std": _HALF,
                "max_slice_nums": 9,
                "patch_size": 14,
                "processor_class": "MiniCPMV4_6Processor",
                "scale_resolution": 112,
                "slice_mode": True,
            }
        },
    ),
}
