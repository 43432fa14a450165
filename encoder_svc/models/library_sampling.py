"""Which frames of a video the families with a tower of transformers look at.

Index for index those of transformers 5.24's video processors. Where one of those would fail (more frames a second asked
for than there are) all frames are taken, and where it would find none the first one is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.models.frame_sampling import FrameSampling
from epd.encoder.v1.media_pb2 import VideoOptions

UNBOUNDED = 1 << 31
"""More frames than any video has."""

_SHORT, _MIDDLING, _LONG = (30.0, 3.0), (300.0, 1.0), (2400.0, 0.5)
"""GLM-4.6V: up to so many seconds, so many temporal patches a second; a longer video counts as
that long."""

_MOST_BY_DURATION = 640
"""GLM-4.6V: frames of a video."""


def sample_evenly(wanted: FrameSampling, total: int, fps: float) -> Sequence[int]:
    """``default_sample_indices_fn``: the frames that begin ``number`` equal parts.

    Raises:
        ServiceError: more frames are asked for than there are.
    """
    number = _number(wanted, total, fps)
    return [index * total // number for index in range(number)]


def sample_shifted(wanted: FrameSampling, total: int, fps: float, shift: float | None) -> Sequence[int]:
    """``InternVLVideoProcessor.sample_frames``.

    Args:
        wanted: how many frames.
        total: frames that there are.
        fps: their rate.
        shift: where to begin, in frames. None: in the middle of the first of ``number`` equal parts.

    Raises:
        ServiceError: more frames are asked for than there are.
    """
    if wanted.num_frames is None and wanted.fps is None:
        return range(total)
    number = _number(wanted, total, fps)
    start = total / number / 2 if shift is None else shift
    # In torch, whose float32 decides how a step is rounded.
    steps: list[int] = torch.arange(start, total, total / number).int().tolist()
    return [index for index in steps if index < total]


def sample_by_seconds(rate: float, max_duration: float, total: int, fps: float) -> Sequence[int]:
    """``Glm4vVideoProcessor.sample_frames``: an even number of frames, equally far apart in time.

    Args:
        rate: frames a second.
        max_duration: seconds. A longer video gets as many frames as one of that length.
        total: frames that there are.
        fps: their rate.
    """
    duration, last = total / fps, total - 1
    if duration <= max_duration:
        number = max(math.floor(duration * rate), 1)
        indices = [min(last, math.ceil(index * fps / rate)) for index in range(number)]
    else:
        number = int(max_duration * rate)
        if number >= total:
            indices = list(range(total))
        else:
            indices = [min(last, math.ceil(second * fps)) for second in np.linspace(0, duration, number).tolist()]
    return _paired(indices)


def sample_by_duration(temporal_patch_size: int, total: int, fps: float) -> Sequence[int]:
    """``Glm46VVideoProcessor.sample_frames``: an even number of frames, fewer a second the longer a video is.

    Args:
        temporal_patch_size: frames of a patch.
        total: frames that there are.
        fps: their rate.
    """
    duration = total / fps
    seen = min(duration, _LONG[0])
    rate = next(rate for limit, rate in (_SHORT, _MIDDLING, _LONG) if seen <= limit)
    number = min(max(int(seen * rate * temporal_patch_size), 1), _MOST_BY_DURATION)
    indices: list[int] = []
    if total < number:
        indices = _between(0, total - 1, number)
    else:
        step, due, frame_seconds = 1 / (temporal_patch_size * rate), 0.0, 1 / fps
        for index in range(total):
            if index * frame_seconds >= due:
                due += step
                indices.append(index)
                if due >= int(duration):
                    break
    if len(indices) < number:
        indices = _between(indices[0], indices[-1], number)
    elif len(indices) > number:
        indices = _between(0, total - 1, number)
    return _paired(indices)


def sample_each_second(max_frames: int, total: int, fps: float) -> Sequence[int]:
    """``MiniCPMV4_6VideoProcessor.sample_frames`` without stacking: the first frame of each second.

    Args:
        max_frames: a longer video is sampled ten times a second, and of these so many are taken.
        total: frames that there are.
        fps: their rate.
    """
    duration = total / fps
    if duration <= max_frames:
        return [int(second * fps) for second in range(math.ceil(duration))]
    indices = [min(int(round(step * 0.1, 1) * fps), total - 1) for step in range(int(duration / 0.1))]
    if len(indices) > max_frames:
        indices = [indices[place] for place in _between(0, len(indices) - 1, max_frames)]
    return indices


def refuse_options(options: VideoOptions, names: Sequence[str], told: str) -> None:
    """Refuses options that a family does not have.

    Args:
        options: of an item.
        names: of those options.
        told: what the family does instead.

    Raises:
        ServiceError: one is set.
    """
    for name in names:
        if getattr(options, name):
            raise ServiceError(
                Reason.REQUEST_INVALID, f"this model {told}; leave `{name}` out", field=f"options.{name}"
            )


def _number(wanted: FrameSampling, total: int, fps: float) -> int:
    if wanted.num_frames is not None:
        if wanted.num_frames > total:
            raise ServiceError(
                Reason.REQUEST_INVALID,
                f"num_frames asks for {wanted.num_frames} frames and the video has {total}; ask for fewer, or by fps",
                field="options.num_frames",
            )
        return wanted.num_frames
    if wanted.fps is None:
        return total
    by_rate = min(max(int(total / fps * wanted.fps), wanted.min_frames), wanted.max_frames)
    return min(max(by_rate, 1), total)


def _between(first: int, last: int, number: int) -> list[int]:
    """``number`` indices at equal distances, rounded down."""
    indices: list[int] = np.linspace(first, last, number, dtype=int).tolist()
    return indices


def _paired(indices: Sequence[int]) -> list[int]:
    """Each once, and the last one twice if they are odd in number."""
    found = list(dict.fromkeys(indices))
    return [*found, found[-1]] if len(found) % 2 else found
