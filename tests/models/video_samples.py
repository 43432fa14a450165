"""Videos to sample and to cut, for us and for the reference."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tests.media.videos import picture


@dataclass(frozen=True)
class Sample:
    """A video's length and rate, and how many of its frames are wanted. 0: the processor's default."""

    total: int
    rate: float
    fps: float = 0.0
    num_frames: int = 0
    min_frames: int = 0
    max_frames: int = 0

    @property
    def name(self) -> str:
        return " ".join(f"{key} {value:g}" for key, value in asdict(self).items() if value)

    @property
    def wanted(self) -> dict[str, Any]:
        """As the reference names it."""
        names = ("fps", "num_frames", "min_frames", "max_frames")
        return {name: getattr(self, name) for name in names if getattr(self, name)}


_NTSC = 30000 / 1001

SAMPLES = (
    *(Sample(total, rate, fps=2.0) for total in (2, 3, 5, 7) for rate in (0.5, 25.0)),  # shorter than the minimum
    *(Sample(total, 30.0, fps=fps) for total in (30, 61, 100, 299, 1001) for fps in (0.5, 2.0, 7.3)),
    Sample(30_000, 24.0, fps=2.0),  # longer than the maximum
    Sample(100_000, 240.0, fps=24.0),
    Sample(2_400, 240.0, fps=2.0),
    Sample(481, 240.0, fps=30.0),
    Sample(20, 0.5, fps=2.0),
    Sample(333, _NTSC, fps=2.0),
    Sample(334, _NTSC, fps=1.0),
    Sample(1_000, 23.976, fps=3.0),
    Sample(10, 10.0, fps=100.0),
    *(Sample(total, 30.0, num_frames=number) for total in (9, 31, 997) for number in (2, 3, 5, 8, 9)),
    Sample(50, 30.0, num_frames=50),
    Sample(500, 25.0, fps=4.0, min_frames=10, max_frames=24),
    Sample(500, 25.0, fps=4.0, max_frames=33),
    Sample(40, 25.0, fps=1.0, min_frames=16),
)


@dataclass(frozen=True)
class Cut:
    """A video whose frames are all taken, and bounds of its pixels. 0: the processor's default."""

    frames: int
    height: int
    width: int
    least: int = 0
    greatest: int = 0

    @property
    def name(self) -> str:
        return f"{self.frames} of {self.height}x{self.width} {self.least} {self.greatest}"

    def pixels(self) -> np.ndarray:
        """uint8, shape (frames, height, width, 3)."""
        return np.stack([picture(number, self.height, self.width) for number in range(self.frames)])


CUTS = (
    Cut(2, 96, 128),
    Cut(3, 67, 45),
    Cut(4, 300, 500, 3136, 50_000),
    Cut(7, 480, 270, 4096, 400_000),
    Cut(5, 20, 400, 50_000, 200_000),
    Cut(16, 64, 64, 4096, 30_000),
)
