"""What vLLM calls in each of its processes, by an entry point of the group ``vllm.general_plugins``."""

from __future__ import annotations

MODELS = {"Qwen3VLWithoutTower": "encoder_client.integrations.vllm.models:Qwen3VLWithoutTower"}
"""By the architecture that selects them."""
WITHOUT_TOWER = {"Qwen3VLForConditionalGeneration": "Qwen3VLWithoutTower"}
"""What a language-only engine runs in the place of what a checkpoint names."""


def register() -> None:
    """Adds the models to those that vLLM knows."""
    from vllm import ModelRegistry

    for architecture, path in MODELS.items():
        ModelRegistry.register_model(architecture, path)
