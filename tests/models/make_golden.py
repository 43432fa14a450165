"""Writes golden_pixels.json: what transformers' torchvision-backed image processor makes of our pictures.

The reference is ``Qwen2VLImageProcessor`` of transformers 5.24 with torchvision 0.28.0. PyPI's torchvision does not
load beside a CPU build of torch, so it is no dependency and gets a Python of its own::

    python -m venv --system-site-packages /tmp/oracle
    echo "$PWD/.venv/lib/python3.11/site-packages" > /tmp/oracle/lib/python3.11/site-packages/base.pth
    /tmp/oracle/bin/pip install --no-deps torchvision==0.28.0
    /tmp/oracle/bin/python tests/models/make_golden.py > tests/models/golden_pixels.json
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

# Torchvision's Python half registers functions for these; its compiled half, which does not load here, defines them.
_operators: Any = torch.library.Library("torchvision", "DEF")
_operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

sys.path.insert(0, str(Path(__file__).parents[2]))

from PIL import Image  # noqa: E402
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor  # noqa: E402

from tests.models.pictures import PICTURES, Picture  # noqa: E402


def _digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


def golden(picture: Picture) -> dict[str, Any]:
    """Grid, and SHA-256 of pixels, of one picture."""
    processor = Qwen2VLImageProcessor(
        size={
            "shortest_edge": picture.min_pixels or Qwen2VLImageProcessor.size["shortest_edge"],
            "longest_edge": picture.max_pixels or Qwen2VLImageProcessor.size["longest_edge"],
        }
    )
    image = Image.fromarray(picture.pixels().numpy())
    normalised = processor(images=[image], return_tensors="pt")
    plain = processor(images=[image], do_rescale=False, do_normalize=False, return_tensors="pt")
    both_frames = plain["pixel_values"].to(torch.uint8).view(-1, 3, 2, 14 * 14)
    assert torch.equal(both_frames[:, :, 0], both_frames[:, :, 1])
    return {
        "grid": normalised["image_grid_thw"][0].tolist(),
        "patches_uint8": _digest(both_frames[:, :, 0]),
        "pixel_values_float32": _digest(normalised["pixel_values"]),
    }


if __name__ == "__main__":
    json.dump({picture.name: golden(picture) for picture in PICTURES}, sys.stdout, indent=2)
    sys.stdout.write("\n")
