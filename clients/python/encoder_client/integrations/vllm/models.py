"""Models that vLLM runs with deepstack though it has not loaded their tower.

vLLM 0.32 switches deepstack off in a model whose tower it leaves out, since nobody would make the levels. Here the
encoders make them. The classes are registered in vLLM's own way for models that are not its own, by
:mod:`~encoder_client.integrations.vllm.plugin`, under names of their own; ``--hf-overrides '{"architectures":
["Qwen3VLWithoutTower"]}'`` takes one.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.models.qwen3_vl import Qwen3VLForConditionalGeneration


class Qwen3VLWithoutTower(Qwen3VLForConditionalGeneration):  # type: ignore[misc] # vLLM has no types where this is checked
    """Qwen3-VL's language half, which adds deepstack levels after its first layers.

    Args:
        vllm_config: vLLM's. ``limit_mm_per_prompt`` is 0 for images and videos.
        prefix: of the parameters' names.
    """

    def __init__(self, *, vllm_config: Any, prefix: str = "model") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = self.config
        self.use_deepstack = True
        self.deepstack_num_level = len(config.vision_config.deepstack_visual_indexes)
        self.multiscale_dim = self.visual_dim * self.deepstack_num_level
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.deepstack_input_embeds = [
            torch.zeros(tokens, config.text_config.hidden_size) for _ in range(self.deepstack_num_level)
        ]
        self.deepstack_input_embeds_num_tokens = 0
