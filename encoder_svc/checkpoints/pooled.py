"""Recipes of the families that make vectors of images and have no language model that reads them."""

from __future__ import annotations

from encoder_svc.checkpoints.language_config import architecture
from encoder_svc.checkpoints.recipe import Json, Recipe, Vocabulary
from encoder_svc.checkpoints.sizes import Sizes

_CLIP_MEAN, _CLIP_STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
_IMAGENET_MEAN, _IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
_HALF = [0.5, 0.5, 0.5]

_SIGLIP = Vocabulary(special=("<pad>", "</s>", "<unk>"), end="</s>", pad="</s>", processor="SiglipProcessor")
_CLIP = Vocabulary(
    special=("<|startoftext|>", "<|endoftext|>"),
    end="<|endoftext|>",
    pad="<|endoftext|>",
    begin="<|startoftext|>",
    processor="CLIPProcessor",
)


def _encoder(model_type: str, sizes: Sizes) -> Json:
    return {
        "model_type": model_type,
        "hidden_size": sizes.tower_hidden,
        "intermediate_size": sizes.tower_intermediate,
        "num_attention_heads": sizes.tower_heads,
        "num_hidden_layers": sizes.tower_layers,
    }


def _text(words: Vocabulary) -> Json:
    return {
        "bos_token_id": words.ids[words.begin or words.pad],
        "eos_token_id": words.ids[words.end],
        "pad_token_id": words.ids[words.pad],
        "vocab_size": words.size,
    }


def _siglip(sizes: Sizes, words: Vocabulary) -> Json:
    return {
        **architecture("SiglipModel", "siglip"),
        "text_config": {**_encoder("siglip_text_model", sizes), **_text(words), "max_position_embeddings": 64},
        "vision_config": {**_encoder("siglip_vision_model", sizes), "image_size": 112, "patch_size": 16},
    }


def _clip(sizes: Sizes, words: Vocabulary) -> Json:
    return {
        **architecture("CLIPModel", "clip"),
        "projection_dim": sizes.hidden,
        "text_config": {
            **_encoder("clip_text_model", sizes),
            **_text(words),
            "max_position_embeddings": 77,
            "projection_dim": sizes.hidden,
        },
        "vision_config": {
            **_encoder("clip_vision_model", sizes),
            "image_size": 112,
            "patch_size": 16,
            "projection_dim": sizes.hidden,
        },
    }


def _dinov2(sizes: Sizes, words: Vocabulary) -> Json:
    config = {**_encoder("dinov2", sizes), **architecture("Dinov2Model", "dinov2")}
    for name in ("intermediate_size", "tie_word_embeddings"):
        del config[name]
    return {**config, "hidden_act": "gelu", "image_size": 112, "mlp_ratio": 2, "patch_size": 14, "qkv_bias": True}


def _processor(kind: str, processor: str | None, mean: list[float], std: list[float], resample: int) -> Json:
    named = {"processor_class": processor} if processor is not None else {}
    return {
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": mean,
        "image_processor_type": kind,
        "image_std": std,
        "resample": resample,
        "rescale_factor": 1 / 255,
        **named,
    }


POOLED_RECIPES: dict[str, Recipe] = {
    "siglip": Recipe(
        _SIGLIP,
        _siglip,
        {
            "preprocessor_config.json": {
                **_processor("SiglipImageProcessor", "SiglipProcessor", _HALF, _HALF, 3),
                "size": {"height": 112, "width": 112},
            }
        },
        shards=1,
    ),
    "clip": Recipe(
        _CLIP,
        _clip,
        {
            "preprocessor_config.json": {
                **_processor("CLIPImageProcessor", "CLIPProcessor", _CLIP_MEAN, _CLIP_STD, 3),
                "crop_size": {"height": 112, "width": 112},
                "do_center_crop": True,
                "do_convert_rgb": True,
                "size": {"shortest_edge": 112},
            }
        },
        shards=1,
    ),
    "dinov2": Recipe(
        None,
        _dinov2,
        {
            "preprocessor_config.json": {
                **_processor("BitImageProcessor", None, _IMAGENET_MEAN, _IMAGENET_STD, 3),
                "crop_size": {"height": 98, "width": 98},
                "do_center_crop": True,
                "do_convert_rgb": True,
                "size": {"shortest_edge": 112},
            }
        },
        shards=1,
    ),
}
