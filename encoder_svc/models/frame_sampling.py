"""Which frames of a video a model looks at, and the times that it is told for them.

Index for index those of transformers' video processors: the arithmetic below is theirs, down to the number type that
rounds, since one frame more or less changes the grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
import torch

from encoder_svc.errors import Reason, ServiceError
from epd.encoder.v1.media_pb2 import VideoOptions

CLOCK_TOLERANCE = 1e-3
"""Seconds. Matroska rounds times to milliseconds; a rate that is constant but for that is constant."""

DEFAULT_RATE = 2.0
"""Frames a second of a video that came as images and does not say its rate, where the checkpoint has none either: what
the Qwen-VL families were trained with."""


@dataclass(frozen=True)
class FrameSampling:
    """How many frames are wanted."""

    fps: float | None
    """Frames a second. None: not by rate."""
    num_frames: int | None
    """So many frames. None: not by number. With neither, all frames."""
    min_frames: int
    max_frames: int
    temporal_patch_size: int
    """Frames of a patch."""


def choose_sampling(defaults: FrameSampling, samples: bool, options: VideoOptions) -> FrameSampling:
    """What an item asks for, where it says nothing what the checkpoint does.

    Args:
        defaults: of the checkpoint.
        samples: whether the checkpoint samples frames; else it takes them all, unless the item asks otherwise.
        options: the item's; ``fps`` and ``num_frames`` exclude each other.

    Raises:
        ServiceError: the options contradict each other or the defaults.
    """
    by_number, by_rate = defaults.num_frames, defaults.fps
    if options.num_frames:
        by_number, by_rate = options.num_frames, None
    elif options.fps:
        by_number, by_rate = None, options.fps
    elif not samples:
        by_number, by_rate = None, None
    bounds = options.min_frames or options.max_frames
    if bounds and options.num_frames:
        raise _invalid("num_frames", "num_frames is exact; leave min_frames and max_frames out")
    if bounds and by_rate is None:
        raise _invalid("fps", "min_frames and max_frames bound what fps samples; set fps too")
    least, most = options.min_frames or defaults.min_frames, options.max_frames or defaults.max_frames
    if least > most:
        given = "min_frames" if options.min_frames else "max_frames"
        raise _invalid(
            given,
            f"min_frames {least} is greater than max_frames {most} (0 takes the model's default: {defaults.min_frames} "
            f"and {defaults.max_frames}); set both so that they fit",
        )
    return FrameSampling(by_rate, by_number, least, most, defaults.temporal_patch_size)


Sampler = Callable[[FrameSampling, int, float], Sequence[int]]
"""From what is wanted, the number of frames there are and their rate, to ascending indices."""


def sample_in_steps(wanted: FrameSampling, total: int, fps: float) -> Sequence[int]:
    """``Qwen2VLVideoProcessor.sample_frames``: equal steps from the first frame on, a whole number of patches.

    Where that cannot be (fewer frames than a patch has), all frames.

    Raises:
        ServiceError: more frames are asked for than there are, or fewer than a patch has.
    """
    unit = wanted.temporal_patch_size
    if wanted.num_frames is not None:
        number = float(round(wanted.num_frames / unit) * unit)
        if not number:
            raise _invalid("num_frames", f"this model takes frames in groups of {unit}; ask for at least {unit}")
        if number > total:
            raise _invalid(
                "num_frames",
                f"num_frames asks for {number:.0f} frames and the video has {total}; ask for fewer, or by fps",
            )
    elif wanted.fps is not None:
        most = math.floor(min(wanted.max_frames, total) / unit) * unit
        number = min(max(total / fps * wanted.fps, wanted.min_frames), most, total)
        number = math.floor(number / unit) * unit
    else:
        return range(total)
    if not number:
        return range(total)
    # In torch, whose float32 decides how a step is rounded. Rounding can also add an index behind the last frame, of
    # which the reference makes nothing.
    steps: list[int] = torch.arange(0, total, total / int(number)).int().tolist()
    return [index for index in steps if index < total]


def sample_between_ends(wanted: FrameSampling, total: int, fps: float) -> Sequence[int]:
    """``Qwen3VLVideoProcessor.sample_frames``: equal distances from the first frame to the last."""
    if wanted.num_frames is not None:
        number = wanted.num_frames
    elif wanted.fps is not None:
        number = min(max(int(total / fps * wanted.fps), wanted.min_frames), wanted.max_frames, total)
    else:
        return range(total)
    indices: list[int] = np.linspace(0, total - 1, number).round().astype(int).tolist()
    return indices


def times_of(indices: Sequence[int], fps: float, frame_times: Sequence[float]) -> list[float]:
    """When sampled frames are shown, as the model is told.

    The reference divides the index by the rate. That is done here too where the rate is constant, so that times are
    rounded as there; where it is not, the frames' own times are taken, which the reference misses by seconds.

    Args:
        indices: of the frames.
        fps: the average rate of all frames.
        frame_times: of all frames, in seconds from the first.
    """
    if all(abs(frame_times[index] - index / fps) <= CLOCK_TOLERANCE for index in indices):
        return [index / fps for index in indices]
    return [frame_times[index] for index in indices]


def patch_times(times: Sequence[float], temporal_patch_size: int) -> list[float]:
    """The time of each temporal patch: the mean of its first and its last frame, the last frame of all repeated.

    ``Qwen3VLProcessor._calculate_timestamps``.
    """
    padded = [*times, *[times[-1]] * (-len(times) % temporal_patch_size)]
    return [
        fmean((padded[start], padded[start + temporal_patch_size - 1]))
        for start in range(0, len(padded), temporal_patch_size)
    ]


def _invalid(field: str, message: str) -> ServiceError:
    return ServiceError(Reason.REQUEST_INVALID, message, field=f"options.{field}")
