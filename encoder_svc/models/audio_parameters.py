"""What checkpoints hold of audio encoders of the Whisper kind: names and shapes, as modules without values.

They are named as transformers names them and have no forward: :mod:`~encoder_svc.models.audio_encoder` takes the
weights from them, so an engine loads these families without importing transformers.
"""

from __future__ import annotations

from torch import nn

from encoder_svc.models.audio_config import AudioEncoderConfig


class Attention(nn.Module):
    """Queries, keys and values, and the output."""

    def __init__(self, width: int, heads: int, key_bias: bool) -> None:
        super().__init__()
        self.num_heads = heads
        self.head_dim = width // heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width, bias=key_bias)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)


class Layer(nn.Module):
    """One layer."""

    def __init__(self, config: AudioEncoderConfig, key_bias: bool) -> None:
        super().__init__()
        self.self_attn = Attention(config.width, config.heads, key_bias)
        self.self_attn_layer_norm = nn.LayerNorm(config.width)
        self.fc1 = nn.Linear(config.width, config.intermediate)
        self.fc2 = nn.Linear(config.intermediate, config.width)
        self.final_layer_norm = nn.LayerNorm(config.width)


class Layers(nn.Module):
    """The layers of an encoder.

    Args:
        config: of the encoder.
        key_bias: keys have a bias.
    """

    def __init__(self, config: AudioEncoderConfig, *, key_bias: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(config, key_bias) for _ in range(config.layers))


class ConvolutionLayers(Layers):
    """The layers behind two convolutions."""

    def __init__(self, config: AudioEncoderConfig) -> None:
        super().__init__(config)
        self.conv1 = nn.Conv1d(config.num_mel_bins, config.width, 3)
        self.conv2 = nn.Conv1d(config.width, config.width, 3)


class WhisperEncoder(ConvolutionLayers):
    """Whisper's encoder, which those of Qwen2-Audio and Voxtral are too."""

    def __init__(self, config: AudioEncoderConfig) -> None:
        super().__init__(config)
        self.embed_positions = nn.Embedding(config.max_source_positions, config.width)
        self.layer_norm = nn.LayerNorm(config.width)
