"""What a checkpoint holds of the towers of an Omni model: names and shapes, as modules without values."""

from __future__ import annotations

import torch
from torch import nn

from encoder_svc.models.qwen2_5_omni_audio import Qwen25OmniAudioConfig, Qwen25OmniAudioEncoder
from encoder_svc.models.qwen3_omni_audio import Qwen3OmniAudioConfig, Qwen3OmniAudioEncoder
from encoder_svc.models.qwen_vision_config import VisionConfig
from encoder_svc.models.qwen_vision_parameters import VisionTower


class SeparateAttention(nn.Module):
    """Attention of Qwen2.5-Omni's vision tower: that of Qwen2.5-VL with queries, keys and values apart."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.head_dim = width // heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)

    @property
    def qkv(self) -> nn.Linear:
        """All three in one layer."""
        apart = self.q, self.k, self.v
        with torch.device("meta"):
            together = nn.Linear(self.q.in_features, 3 * self.q.out_features)
        together.weight, together.bias = (
            nn.Parameter(torch.cat([getattr(layer, name) for layer in apart]), requires_grad=False)
            for name in ("weight", "bias")
        )
        return together


class Qwen25OmniTowers(nn.Module):
    """The towers of Qwen2.5-Omni.

    Args:
        vision: ``vision_config``.
        audio: ``audio_config``.
    """

    def __init__(self, vision: VisionConfig, audio: Qwen25OmniAudioConfig) -> None:
        super().__init__()
        self.visual = VisionTower(vision)
        for block in self.visual.blocks:
            block.attn = SeparateAttention(vision.tower_width, vision.num_heads)
        self.audio_tower = Qwen25OmniAudioEncoder(audio)


class Qwen3OmniTowers(nn.Module):
    """The towers of Qwen3-Omni.

    Args:
        vision: ``vision_config``.
        audio: ``audio_config``.
    """

    def __init__(self, vision: VisionConfig, audio: Qwen3OmniAudioConfig) -> None:
        super().__init__()
        self.visual = VisionTower(vision, of_omni=True)
        self.audio_tower = Qwen3OmniAudioEncoder(audio)
