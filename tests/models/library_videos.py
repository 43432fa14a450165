"""Videos for families with a tower of transformers, and the settings that their processors get, for us and for it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.models.video_samples import SAMPLES, Cut, Sample


def digest_of(indices: Sequence[int]) -> str:
    """SHA-256 of the indices of frames."""
    return hashlib.sha256(",".join(map(str, indices)).encode()).hexdigest()


LONG_SAMPLES = (
    Sample(7_500, 25.0),  # 300 seconds
    Sample(7_501, 25.0),
    Sample(720, 24.0),  # 30 seconds
    Sample(721, 24.0),
    Sample(3_201, 25.0),  # just over 128 seconds
    Sample(40, 0.125),
    Sample(120_000, 30.0),
)


@dataclass(frozen=True)
class LibraryCase:
    """One video processor."""

    module: str
    """Of transformers, where the processor is."""
    processor: str
    wanted: tuple[str, ...] = ()
    """The fields of a sample that it knows."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What differs from its defaults where pixels are compared."""
    bounded: bool = False
    """Its size bounds pixels."""

    @property
    def samples(self) -> list[Sample]:
        """With what it knows of their wishes, each once."""
        known = [
            Sample(sample.total, sample.rate, **{name: sample.wanted.get(name, 0) for name in self.wanted})
            for sample in (*SAMPLES, *LONG_SAMPLES)
        ]
        return list({sample.name: sample for sample in known}.values())

    def settings_of(self, cut: Cut) -> dict[str, Any]:
        """What is set for one video."""
        if not self.bounded or not cut.least:
            return {"do_sample_frames": False, **self.settings}
        return {"do_sample_frames": False, "size": {"shortest_edge": cut.least, "longest_edge": cut.greatest}}


_EVENLY = ("fps", "num_frames")

LIBRARY_CASES: dict[str, LibraryCase] = {
    "glm4v": LibraryCase("glm4v", "Glm4vVideoProcessor", ("fps",), bounded=True),
    "glm46v": LibraryCase("glm46v", "Glm46VVideoProcessor", bounded=True),
    "internvl": LibraryCase("internvl", "InternVLVideoProcessor", _EVENLY, {"size": {"height": 112, "width": 90}}),
    "llava_onevision": LibraryCase("llava_onevision", "LlavaOnevisionVideoProcessor", _EVENLY),
    "kimi_k25": LibraryCase("kimi_k25", "Kimi_K25VideoProcessor", _EVENLY, {"max_patches": 300}),
    "minicpmv4_6": LibraryCase("minicpmv4_6", "MiniCPMV4_6VideoProcessor", (), {"scale_resolution": 112}),
}
"""By ``model_type``."""
