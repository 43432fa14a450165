"""A whole Kimi-VL of transformers, which has no class of that name: Kimi K2.5's, which is the same for still images.

Both are MoonViT, a projector of the same three layers, and DeepSeek-V3's language model; for one frame Kimi K2.5's
temporal positions and mean change nothing. So a Kimi-VL checkpoint is renamed and loaded as a Kimi K2.5.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from encoder_svc.models.checkpoint import open_checkpoint

_PROJECTOR = {"linear_1": "proj.0", "linear_2": "proj.2", "pre_norm": "pre_norm"}


def load_whole_kimi_vl(checkpoint: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The model with every weight of the checkpoint, in evaluation mode."""
    from transformers import Kimi_K25Config, Kimi_K25ForConditionalGeneration

    config = open_checkpoint(checkpoint).config
    vision = config["vision_config"]
    sides = {f"pos_emb_{side}": vision[f"init_pos_emb_{side}"] for side in ("height", "width")}
    loaded: Any = Kimi_K25ForConditionalGeneration.from_pretrained(
        None,
        config=Kimi_K25Config(
            text_config=config["text_config"],
            vision_config={**vision, **sides, "model_type": "kimi_k25_vision"},
            projection_hidden_size=vision["hidden_size"],
            image_token_id=config["media_placeholder_token_id"],
        ),
        state_dict={_renamed(name): tensor for name, tensor in _tensors(checkpoint).items()},
        dtype=dtype,
        output_loading_info=True,
    )
    model, report = loaded
    assert not any(report.values()), report
    return model.eval()


def _renamed(name: str) -> str:
    tower, _, rest = name.partition(".")
    if tower != "multi_modal_projector":
        return name
    layer, _, kind = rest.partition(".")
    return f"mm_projector.{_PROJECTOR[layer]}.{kind}"


def _tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in checkpoint.glob("*.safetensors"):
        found |= load_file(file)
    return found
