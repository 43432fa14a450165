"""Videos of MiniCPM-V 4.6: every frame is an image, cut into slices as images are."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import torch
from pydantic import Field, PositiveFloat

from encoder_svc.models.adapter import VideoProbe
from encoder_svc.models.checkpoint import Checkpoint
from encoder_svc.models.image_patches import HALF, PixelSettings, check_aspect_ratio, read_settings, resize
from encoder_svc.models.image_preprocessing import Normalisation
from encoder_svc.models.library_sampling import refuse_options, sample_each_second
from encoder_svc.models.timeline import Timeline
from encoder_svc.models.video_inputs import (
    BOUNDS,
    FILE,
    OWN_SIZE,
    VideoPlan,
    in_images,
    unfilled,
    video_settings,
)
from epd.encoder.v1.media_pb2 import MediaItem

_OWN_RATE = "looks at one frame of each second"


class MiniCPMVideoPreprocessing(PixelSettings):
    """The constants of ``MiniCPMV4_6VideoProcessor``."""

    image_mean: tuple[float, float, float] = HALF
    image_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = HALF
    do_sample_frames: bool = True
    max_num_frames: int = Field(default=128, ge=1)
    stack_frames: Literal[1] = 1
    """transformers can put several frames on one canvas; that is not done here."""
    max_slice_nums: int = Field(default=9, ge=1)
    scale_resolution: int = Field(default=448, ge=1)
    """The side of a slice in pixels, about."""
    patch_size: int = Field(default=14, ge=1)
    slice_mode: bool = True


class MiniCPMVideos:
    """Videos of one checkpoint.

    Args:
        checkpoint: the checkpoint.
        downsample_mode: of its configuration.

    Raises:
        SetupError: the settings are wrong.
    """

    def __init__(self, checkpoint: Checkpoint, downsample_mode: str) -> None:
        # Takes seconds, and only workers and engines need it.
        from transformers import MiniCPMV4_6ImageProcessorPil

        self._constants = read_settings(MiniCPMVideoPreprocessing, video_settings(checkpoint), FILE)
        self._mode = downsample_mode
        self._sizes: Any = MiniCPMV4_6ImageProcessorPil()
        self._shows_ids = int(checkpoint.preprocessor.get("use_image_id") is not False)
        self.normalisation = Normalisation.read(self._constants, fused=True)
        self.constants = {"rule": "minicpm", "downsample_mode": downsample_mode, **self._constants.model_dump()}

    def plan(self, item: MediaItem, probe: VideoProbe) -> VideoPlan:
        """See :meth:`VideoInputs.plan <encoder_svc.models.video_inputs.VideoInputs.plan>`."""
        constants, options = self._constants, item.video
        refuse_options(options, BOUNDS, OWN_SIZE)
        refuse_options(options, ("fps", "num_frames", "min_frames"), _OWN_RATE)
        check_aspect_ratio(probe.height, probe.width)
        timeline = Timeline.of(probe, options, None)
        frames = tuple(range(timeline.total))
        if constants.do_sample_frames and not in_images(item):
            most = options.max_frames or constants.max_num_frames
            frames = tuple(sample_each_second(most, timeline.total, timeline.fps))
        side = constants.patch_size
        whole, grid, refined = self._cut(probe.height, probe.width)
        sizes = [whole, *[(refined[0] // grid[0], refined[1] // grid[1])] * (grid[0] * grid[1])] if grid[0] else [whole]
        in_patches = torch.tensor([[height // side, width // side] for height, width in sizes])
        columns = int(in_patches.prod(dim=1).sum()) * side

        def fill(decoded: Iterable[torch.Tensor], pixels: torch.Tensor) -> None:
            for frame, place in zip(decoded, pixels[0].split(columns, dim=-1), strict=True):
                slices = [resize(frame, *whole)]
                if grid[0]:
                    rows = resize(frame, *refined).chunk(grid[0], dim=1)
                    slices += [one for row in rows for one in row.chunk(grid[1], dim=2)]
                torch.cat([_strip(one, side) for one in slices], dim=-1, out=place)

        return VideoPlan(
            frames,
            timeline.metadata(probe, frames, *whole),
            {
                "pixel_values": unfilled(1, 3, side, columns * len(frames)),
                "target_sizes": in_patches.repeat(len(frames), 1),
                "target_sizes_videos": in_patches.repeat(len(frames), 1),
                "grids_videos": torch.tensor([grid]).repeat(len(frames), 1),
                "use_image_id": torch.tensor([self._shows_ids]),
            },
            fill,
        )

    def _cut(self, height: int, width: int) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
        """The size of the whole frame, the grid of its slices, (0, 0) if there are none, and the size of them together.

        By the rules of the image processor, which the video processor repeats.
        """
        constants, own = self._constants, {"downsample_mode": self._mode}
        size, resolution = (height, width), constants.scale_resolution
        grid = self._sizes.get_sliced_grid(size, constants.max_slice_nums, resolution) if constants.slice_mode else None
        whole = self._sizes.find_best_resize(size, resolution, constants.patch_size, allow_upscale=grid is None, **own)
        if grid is None:
            return whole, (0, 0), (0, 0)
        refined = self._sizes.get_refine_size(size, grid, resolution, constants.patch_size, allow_upscale=True, **own)
        return whole, (grid[0], grid[1]), refined


def _strip(pixels: torch.Tensor, side: int) -> torch.Tensor:
    """The patches of a picture, row by row, beside each other: (3, height, width) → (3, side, patches · side)."""
    channels, height, width = pixels.shape
    cut = pixels.reshape(channels, height // side, side, width // side, side)
    return cut.permute(0, 2, 1, 3, 4).reshape(channels, side, -1)
