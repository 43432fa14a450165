"""Videos as families with a tower of transformers take them: sampled, resized and cut by us.

transformers' video processors need torchvision; what they compute is computed here, bit for bit. Frames are counted and
sizes known before any is decoded, so a video is measured without decoding, and then takes one frame at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from pydantic import Field, PositiveFloat

from encoder_svc.errors import SetupError
from encoder_svc.models.adapter import VideoProbe
from encoder_svc.models.checkpoint import Checkpoint
from encoder_svc.models.frame_sampling import DEFAULT_RATE, FrameSampling, choose_sampling
from encoder_svc.models.image_patches import (
    CLIP_MEAN,
    CLIP_STD,
    PixelSettings,
    check_aspect_ratio,
    read_settings,
    resize,
)
from encoder_svc.models.image_preprocessing import Normalisation
from encoder_svc.models.image_rows import Inputs
from encoder_svc.models.library_sampling import (
    UNBOUNDED,
    refuse_options,
    sample_by_duration,
    sample_by_seconds,
    sample_evenly,
    sample_shifted,
)
from encoder_svc.models.patch_inputs import KimiPreprocessing, cut_rows, patch_limit, read_kimi
from encoder_svc.models.timeline import Timeline
from encoder_svc.models.video_patches import WholeVideoPreprocessing, cut_video, read_video_preprocessing
from epd.encoder.v1.embedding_pb2 import VideoMetadata
from epd.encoder.v1.media_pb2 import ImageOptions, MediaItem, VideoOptions

if TYPE_CHECKING:
    from encoder_svc.models.image_families import ImageFamily

_OWN_NUMBER = "chooses the number of frames by the length of a video"
OWN_SIZE = "resizes frames to a size of its own"
BOUNDS = ("min_pixels", "max_pixels", "total_pixels")


@dataclass(frozen=True)
class VideoPlan:
    """What becomes of a video."""

    frames: tuple[int, ...]
    """To decode: indices into ``VideoProbe.frame_times``."""
    metadata: VideoMetadata
    inputs: Inputs
    """As an image's; ``pixel_values`` has a shape and no memory yet."""
    fill: Callable[[Iterable[torch.Tensor], torch.Tensor], None]
    """Makes ``pixel_values`` of the decoded frames, in the memory that is given."""


class VideoInputs(Protocol):
    """Turns a video into a tower's input."""

    @property
    def normalisation(self) -> Normalisation:
        """What is left to the tower."""
        ...

    @property
    def constants(self) -> Mapping[str, Any]:
        """All that decides the input; JSON."""
        ...

    def plan(self, item: MediaItem, probe: VideoProbe) -> VideoPlan:
        """Measures a video.

        Raises:
            ServiceError: the video or an option is beyond what the family takes.
        """
        ...


class GlmVideoPreprocessing(WholeVideoPreprocessing):
    """The constants of ``Glm4vVideoProcessor`` and ``Glm46VVideoProcessor``: bounds are those of all frames."""

    min_pixels: int = Field(default=112 * 112, ge=1)
    max_pixels: int = Field(default=28 * 28 * 2 * 30000, ge=1)
    patch_size: int = Field(default=14, ge=1)
    image_mean: tuple[float, float, float] = CLIP_MEAN
    image_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = CLIP_STD
    max_duration: float = Field(default=300, gt=0)
    """Seconds."""


class GlmVideos:
    """GLM-4V: pairs of frames are patches; the tower takes each pair as an image.

    Args:
        checkpoint: the checkpoint.
        config: its configuration.
        by_duration: the rate depends on the length alone, as GLM-4.6V has it.

    Raises:
        SetupError: the settings are wrong.
    """

    def __init__(self, checkpoint: Checkpoint, config: Any, *, by_duration: bool) -> None:
        self._constants = read_video_preprocessing(GlmVideoPreprocessing, video_settings(checkpoint))
        self._by_duration = by_duration
        vision = config.vision_config
        for name, theirs in (
            ("patch_size", vision.patch_size),
            ("merge_size", vision.spatial_merge_size),
            ("temporal_patch_size", vision.temporal_patch_size),
        ):
            _check_equal(name, getattr(self._constants, name), theirs)
        self.normalisation = Normalisation.read(self._constants, fused=True)
        self.constants = {"rule": "glm", "by_duration": by_duration, **self._constants.model_dump()}

    def plan(self, item: MediaItem, probe: VideoProbe) -> VideoPlan:
        """See :meth:`VideoInputs.plan`."""
        constants, options = self._constants, item.video
        own = ("num_frames", "min_frames", "max_frames", *(("fps",) if self._by_duration else ()))
        refuse_options(options, own, _OWN_NUMBER)
        timeline = Timeline.of(probe, options, constants.fps)
        frames: Sequence[int] = range(timeline.total)
        if options.fps or (constants.do_sample_frames and not in_images(item)):
            frames = (
                sample_by_duration(constants.temporal_patch_size, timeline.total, timeline.fps)
                if self._by_duration
                else sample_by_seconds(
                    options.fps or constants.fps or DEFAULT_RATE, constants.max_duration, timeline.total, timeline.fps
                )
            )
        height, width = constants.frame_size(len(frames), probe.height, probe.width, options)
        depth, side = constants.temporal_patch_size, constants.patch_size
        steps, rows, columns = -(-len(frames) // depth), height // side, width // side

        def fill(decoded: Iterable[torch.Tensor], pixels: torch.Tensor) -> None:
            pixels.copy_(cut_video(decoded, len(frames), height, width, constants).view(pixels.shape))

        return VideoPlan(
            tuple(frames),
            timeline.metadata(probe, frames, height, width, timeline.told(frames[::depth])),
            {
                "pixel_values": unfilled(steps * rows * columns, 3, depth, side * side),
                "image_grid_thw": torch.tensor([[1, rows, columns]]).expand(steps, -1).contiguous(),
                "video_grid_thw": torch.tensor([[steps, rows, columns]]),
            },
            fill,
        )


class SampledVideoSettings(PixelSettings):
    """Constants that say which frames of a video are taken."""

    do_sample_frames: bool = False
    fps: PositiveFloat | None = None
    num_frames: int | None = Field(default=None, ge=1)

    def choose(self, item: MediaItem) -> FrameSampling:
        """What an item asks for, where it says nothing what the checkpoint does."""
        defaults = FrameSampling(self.fps, self.num_frames, 1, UNBOUNDED, 1)
        return choose_sampling(defaults, self.do_sample_frames and not in_images(item), item.video)


class KimiVideoPreprocessing(KimiPreprocessing, SampledVideoSettings):
    """The constants of ``Kimi_K25VideoProcessor``."""

    max_patches: int = Field(default=4096, ge=1)
    """Patches of a frame, about."""
    temporal_patch_size: int = Field(default=4, ge=1)
    """Frames of a chunk."""
    do_sample_frames: bool = True
    fps: PositiveFloat | None = 2.0


class KimiVideos:
    """Kimi K2.5: chunks of some frames, whose rows are the means over their time.

    Args:
        checkpoint: the checkpoint.
        family: its family.
        config: its configuration.

    Raises:
        SetupError: the settings are wrong.
    """

    def __init__(self, checkpoint: Checkpoint, family: ImageFamily, config: Any) -> None:
        self._constants = read_kimi(KimiVideoPreprocessing, video_settings(checkpoint), FILE)
        vision = config.vision_config
        _check_equal("patch_size", self._constants.patch_size, vision.patch_size)
        _check_equal("merge_size", self._constants.merge_size, vision.merge_kernel_size[0])
        if self._constants.temporal_patch_size > vision.pos_emb_time:
            raise SetupError(
                f"{FILE}: temporal_patch_size {self._constants.temporal_patch_size} is more than pos_emb_time "
                f"{vision.pos_emb_time} of config.json; both must come from the same checkpoint"
            )
        self.normalisation = Normalisation.read(self._constants, fused=True)
        self.constants = {"rule": "kimi", **self._constants.model_dump()}

    def plan(self, item: MediaItem, probe: VideoProbe) -> VideoPlan:
        """See :meth:`VideoInputs.plan`."""
        constants, options = self._constants, item.video
        timeline = Timeline.of(probe, options, constants.fps)
        frames = sample_evenly(constants.choose(item), timeline.total, timeline.fps)
        limit = patch_limit(constants.max_patches, constants.patch_size, _of_one_frame(options, len(frames)))
        height, width, rows, columns = constants.fit(probe.height, probe.width, limit)
        chunks = torch.tensor(
            [
                [min(constants.temporal_patch_size, len(frames) - start), rows, columns]
                for start in range(0, len(frames), constants.temporal_patch_size)
            ]
        )

        def fill(decoded: Iterable[torch.Tensor], pixels: torch.Tensor) -> None:
            for frame, place in zip(decoded, pixels.split(rows * columns), strict=True):
                cut_rows(frame, height, width, place.view(rows, columns, *place.shape[1:]))

        side = constants.patch_size
        begins = timeline.told(frames[:: constants.temporal_patch_size])
        return VideoPlan(
            tuple(frames),
            timeline.metadata(probe, frames, height, width, begins),
            {
                "pixel_values": unfilled(len(frames) * rows * columns, 3, side, side),
                "image_grid_thw": chunks,
                "video_grid_thw": chunks,
            },
            fill,
        )


class SquareVideoPreprocessing(SampledVideoSettings):
    """The constants of ``LlavaOnevisionVideoProcessor`` and ``InternVLVideoProcessor``: frames of one size."""

    height: int = Field(default=384, ge=1)
    width: int = Field(default=384, ge=1)
    initial_shift: bool | float = True
    """Of InternVL. True: half the distance of two frames."""


class SquareVideos:
    """LLaVA-OneVision and InternVL: every frame is resized to a tile.

    Args:
        checkpoint: the checkpoint.
        shifted: frames are sampled as InternVL has it.

    Raises:
        SetupError: the settings are wrong.
    """

    def __init__(self, checkpoint: Checkpoint, *, shifted: bool) -> None:
        settings = video_settings(checkpoint)
        size = settings.get("size")
        if isinstance(size, dict):
            if not size.get("height") or not size.get("width"):
                raise SetupError(f"{FILE}: size has no height and width, to which this family resizes frames")
            settings = {**settings, **size}
        if settings.get("do_center_crop"):
            raise SetupError(f"{FILE} asks for do_center_crop, which this family's preprocessing does not do")
        self._constants = read_settings(SquareVideoPreprocessing, settings, FILE)
        self._shifted = shifted
        self.normalisation = Normalisation.read(self._constants, fused=True)
        self.constants = {"rule": "square", "shifted": shifted, **self._constants.model_dump()}

    def plan(self, item: MediaItem, probe: VideoProbe) -> VideoPlan:
        """See :meth:`VideoInputs.plan`."""
        constants = self._constants
        refuse_options(item.video, BOUNDS, OWN_SIZE)
        check_aspect_ratio(probe.height, probe.width)
        timeline = Timeline.of(probe, item.video, constants.fps)
        wanted = constants.choose(item)
        if self._shifted:
            shift = None if constants.initial_shift is True else float(constants.initial_shift)
            frames = sample_shifted(wanted, timeline.total, timeline.fps, shift)
        else:
            frames = sample_evenly(wanted, timeline.total, timeline.fps)
        size = constants.height, constants.width

        def fill(decoded: Iterable[torch.Tensor], pixels: torch.Tensor) -> None:
            for frame, place in zip(decoded, pixels, strict=True):
                place.copy_(resize(frame, *size))

        return VideoPlan(
            tuple(frames),
            timeline.metadata(probe, frames, *size),
            {"pixel_values": unfilled(len(frames), 3, *size)},
            fill,
        )


FILE = "the video processor's settings"


def video_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """What a checkpoint says of its video processor."""
    # Older checkpoints have one file for both, as transformers reads them too.
    settings = checkpoint.video_preprocessor or checkpoint.preprocessor
    return {name: value for name, value in settings.items() if value is not None}


def in_images(item: MediaItem) -> bool:
    """The reference, too, samples no frames that come as images."""
    return bool(item.WhichOneof("source") == "frames")


def _of_one_frame(options: VideoOptions, frames: int) -> ImageOptions:
    """Bounds of pixels of each of some frames."""
    most = [bound for bound in (options.max_pixels, options.total_pixels // frames) if bound]
    return ImageOptions(min_pixels=options.min_pixels, max_pixels=min(most, default=0))


def _check_equal(name: str, ours: int, theirs: int) -> None:
    if ours != theirs:
        raise SetupError(
            f"{name} is {ours} in {FILE} but {theirs} in config.json; both must come from the same checkpoint"
        )


def unfilled(*sizes: int) -> torch.Tensor:
    """Pixels that have a shape and no memory yet."""
    return torch.empty(sizes, dtype=torch.uint8, device="meta")
