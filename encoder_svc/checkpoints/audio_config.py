"""Parts of configs of towers of the Whisper kind."""

from __future__ import annotations

from typing import Any

from encoder_svc.checkpoints.recipe import Json
from encoder_svc.checkpoints.sizes import Sizes


def audio_encoder(model_type: str, sizes: Sizes, **more: Any) -> Json:
    """The config of an encoder under the names of Whisper's."""
    return {
        "model_type": model_type,
        "activation_function": "gelu",
        "d_model": sizes.tower_hidden,
        "encoder_attention_heads": sizes.tower_heads,
        "encoder_ffn_dim": sizes.tower_intermediate,
        "encoder_layers": sizes.tower_layers,
        "max_source_positions": 1500,
        "num_mel_bins": 128,
        "scale_embedding": False,
        **more,
    }


def feature_extractor(processor: str, seconds: int = 30, bins: int = 128, **more: Any) -> Json:
    """``preprocessor_config.json`` of a Whisper feature extractor."""
    return {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": processor,
        "chunk_length": seconds,
        "dither": 0.0,
        "feature_size": bins,
        "hop_length": 160,
        "n_fft": 400,
        "n_samples": 16000 * seconds,
        "nb_max_frames": 100 * seconds,
        "padding_side": "right",
        "padding_value": 0.0,
        "return_attention_mask": True,
        "sampling_rate": 16000,
        **more,
    }
