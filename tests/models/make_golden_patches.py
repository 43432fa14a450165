"""Writes golden_patches.json: what the torchvision-backed processors of GLM-4V and Kimi K2.5 make of our pictures.

They run in the Python that make_golden.py describes::

    /tmp/oracle/bin/python tests/models/make_golden_patches.py > tests/models/golden_patches.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from PIL import Image

# The first of these imports makes torchvision importable.
from tests.models.make_golden import _digest as digest  # isort: skip
from transformers.models.glm4v.image_processing_glm4v import Glm4vImageProcessor
from transformers.models.kimi_k25.image_processing_kimi_k25 import Kimi_K25ImageProcessor

from tests.models.pictures import PICTURES


def golden(processor: Any, pixels: torch.Tensor) -> dict[str, Any]:
    """Grid, and SHA-256 of pixels, of one picture."""
    given = processor(
        images=[Image.fromarray(pixels.numpy())], do_rescale=False, do_normalize=False, return_tensors="pt"
    )
    patches = given["pixel_values"].to(torch.uint8)
    if patches.dim() == 2:
        frames = patches.view(len(patches), 3, 2, 14 * 14)
        assert torch.equal(frames[:, :, 0], frames[:, :, 1])
        patches = frames[:, :, 0]
    return {"grid": given["image_grid_thw"][0].tolist(), "patches_uint8": digest(patches)}


if __name__ == "__main__":
    pictures = [picture for picture in PICTURES if not picture.min_pixels and not picture.max_pixels]
    processors = {"glm4v": Glm4vImageProcessor(), "kimi_k25": Kimi_K25ImageProcessor()}
    found = {
        family: {picture.name: golden(processor, picture.pixels()) for picture in pictures}
        for family, processor in processors.items()
    }
    json.dump(found, sys.stdout, indent=2)
    sys.stdout.write("\n")
