"""Writes golden_videos.json: what transformers' video processors, which need torchvision, make of our videos.

As ``make_golden``, whose text says how to make a Python that has it::

    /tmp/oracle/bin/python tests/models/make_golden_videos.py > tests/models/golden_videos.json
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

# As in make_golden: torchvision's compiled half does not load here.
_operators: Any = torch.library.Library("torchvision", "DEF")
_operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

sys.path.insert(0, str(Path(__file__).parents[2]))

from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor  # noqa: E402
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor  # noqa: E402
from transformers.video_utils import VideoMetadata  # noqa: E402

from tests.models.video_samples import CUTS, SAMPLES, Cut, Sample  # noqa: E402

PROCESSORS: dict[str, Any] = {"qwen2_vl": Qwen2VLVideoProcessor, "qwen3_vl": Qwen3VLVideoProcessor}


def _digest(values: Any) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


def frames_of(processor_class: Any, sample: Sample) -> list[int]:
    """The indices that a processor samples."""
    wanted = sample.wanted
    bounds = {name: wanted.pop(name) for name in ("min_frames", "max_frames") if name in wanted}
    processor = processor_class(**bounds)
    if "num_frames" in wanted:
        processor.fps = None
    metadata = VideoMetadata(total_num_frames=sample.total, fps=sample.rate)
    if processor_class is Qwen2VLVideoProcessor:
        wanted |= {"min_frames": processor.min_frames, "max_frames": processor.max_frames}
    indices: list[int] = processor.sample_frames(metadata, **wanted).tolist()
    return indices


def golden(processor_class: Any, cut: Cut) -> dict[str, Any]:
    """Grid, and SHA-256 of patches, of one video."""
    defaults = processor_class.size
    processor = processor_class(
        size={
            "shortest_edge": cut.least or defaults["shortest_edge"],
            "longest_edge": cut.greatest or defaults["longest_edge"],
        },
        do_sample_frames=False,
    )
    video = torch.from_numpy(cut.pixels())
    normalised = processor(videos=[video], return_tensors="pt")
    plain = processor(videos=[video], do_rescale=False, do_normalize=False, return_tensors="pt")
    return {
        "grid": normalised["video_grid_thw"][0].tolist(),
        "patches_uint8": _digest(plain["pixel_values_videos"].to(torch.uint8)),
        "pixel_values_float32": _digest(normalised["pixel_values_videos"]),
    }


if __name__ == "__main__":
    json.dump(
        {
            name: {
                "frames": {sample.name: frames_of(processor_class, sample) for sample in SAMPLES},
                "pixels": {cut.name: golden(processor_class, cut) for cut in CUTS},
            }
            for name, processor_class in PROCESSORS.items()
        },
        sys.stdout,
        separators=(",", ":"),
    )
    sys.stdout.write("\n")
