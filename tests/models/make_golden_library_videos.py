"""Writes golden_library_videos.json: what the video processors of families with a tower of transformers make.

They run in the Python that make_golden.py describes::

    /tmp/oracle/bin/python tests/models/make_golden_library_videos.py > tests/models/golden_library_videos.json
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

# The first of these imports makes torchvision importable.
from tests.models.make_golden import _digest as digest  # isort: skip
from transformers.video_utils import VideoMetadata

from tests.models.library_videos import LIBRARY_CASES, LibraryCase, digest_of
from tests.models.video_samples import CUTS, Cut, Sample


def processor_class(case: LibraryCase) -> Any:
    """The processor of transformers."""
    module = importlib.import_module(f"transformers.models.{case.module}.video_processing_{case.module}")
    return getattr(module, case.processor)


def frames_of(case: LibraryCase, sample: Sample) -> str | None:
    """The digest of the indices that a processor samples; None: it fails, or finds none."""
    processor = processor_class(case)()
    wanted = sample.wanted
    if "num_frames" in wanted:
        processor.fps = None
    metadata = VideoMetadata(sample.total, fps=sample.rate, duration=sample.total / sample.rate)
    try:
        if not wanted and case.wanted and processor.fps is None:
            return digest_of(range(sample.total))
        indices = [int(index) for index in processor.sample_frames(metadata, **wanted)]
    except (ValueError, ZeroDivisionError):
        return None
    return digest_of(indices) if indices else None


def golden(case: LibraryCase, cut: Cut) -> dict[str, Any]:
    """SHA-256 of normalised pixels, and all else that a processor gives for one video."""
    processor = processor_class(case)(**case.settings_of(cut))
    metadata = VideoMetadata(cut.frames, fps=2.0, duration=cut.frames / 2.0)
    given = processor(videos=[torch.from_numpy(cut.pixels())], video_metadata=[metadata], return_tensors="pt")
    told = {
        name: torch.as_tensor(value).tolist()
        for name, value in given.items()
        if name not in ("pixel_values_videos", "video_metadata")
    }
    pixels = given["pixel_values_videos"]
    return {**told, "shape": list(pixels.shape), "pixel_values_float32": digest(pixels)}


if __name__ == "__main__":
    found = {
        family: {
            "frames": {sample.name: frames_of(case, sample) for sample in case.samples},
            "pixels": {cut.name: golden(case, cut) for cut in CUTS},
        }
        for family, case in LIBRARY_CASES.items()
    }
    json.dump(found, sys.stdout, separators=(",", ":"))
    sys.stdout.write("\n")
