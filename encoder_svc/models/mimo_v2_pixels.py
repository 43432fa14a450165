"""How MiMo-V2 samples and sizes videos."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from encoder_svc.models.checkpoint import Checkpoint
from encoder_svc.models.frame_sampling import FrameSampling
from encoder_svc.models.image_patches import check_pixel_bounds, smart_resize
from encoder_svc.models.mimo_v2_config import MimoProcessor, MimoVision
from encoder_svc.models.qwen_vision import Timing, VisionFamily
from encoder_svc.models.video_patches import VideoPreprocessing
from epd.encoder.v1.media_pb2 import VideoOptions


class MimoVideo(VideoPreprocessing):
    """The constants of videos."""

    do_sample_frames: bool = True
    total_max_pixels: int | None = None
    """Pixels of all temporal patches together, each counted as one frame."""

    def frame_size(self, frames: int, height: int, width: int, options: VideoOptions) -> tuple[int, int]:
        """See :meth:`VideoPreprocessing.frame_size`; the share of a frame in all pixels bounds it, too."""
        least, greatest = options.min_pixels or self.min_pixels, options.max_pixels or self.max_pixels
        if self.total_max_pixels is not None:
            greatest = max(least, min(greatest, self.total_max_pixels * self.temporal_patch_size // frames))
        if options.total_pixels:
            greatest = min(greatest, options.total_pixels // frames)
        given = "total_pixels" if options.total_pixels else "min_pixels" if options.min_pixels else "max_pixels"
        least, greatest = check_pixel_bounds(least, greatest, given, self)
        return smart_resize(height, width, self.factor, least, greatest)


def sample_distinct(wanted: FrameSampling, total: int, fps: float) -> Sequence[int]:
    """Equal distances from the first frame to the last, rounded down, none of them twice.

    By rate it is a whole number of temporal patches, as far as there are that many frames.

    Args:
        wanted: how many frames.
        total: frames that there are.
        fps: their rate.
    """
    unit = wanted.temporal_patch_size
    if wanted.num_frames is not None:
        number = min(wanted.num_frames, total)
    elif wanted.fps is not None:
        most = min(wanted.max_frames, total)
        asked = min(max(total / fps * wanted.fps, wanted.min_frames), most)
        number = math.floor(asked / unit) * unit or total
    else:
        number = total
    indices: list[int] = np.unique(np.linspace(0, total - 1, num=number, dtype=np.int64)).tolist()
    return indices


FAMILY = VisionFamily(MimoVision, MimoVideo, sample_distinct, Timing())


def with_video_settings(checkpoint: Checkpoint, processor: MimoProcessor) -> Checkpoint:
    """The checkpoint, where what ``processor_config`` says of videos stands among the video processor's settings."""
    told = {
        "fps": processor.fps or 2.0,
        "num_frames": processor.num_frames,
        "min_frames": processor.min_frames or 4,
        "max_frames": processor.max_frames or 768,
        "min_pixels": processor.video_min_pixels,
        "max_pixels": processor.video_max_pixels,
        "total_max_pixels": processor.video_total_max_pixels,
    }
    settings = {**checkpoint.preprocessor, **{name: value for name, value in told.items() if value is not None}}
    return replace(checkpoint, video_preprocessor=settings)
