"""Images and videos of the Qwen-VL families, before their tower.

Grid (t, h, w) in patches; t·h·w / merge² rows, and with deepstack further columns beside each. The tower is in
:mod:`~encoder_svc.models.qwen_vision_tower`, which an engine imports when it loads: a media worker imports no
transformers.

A family whose checkpoint has another tower beside this one (the Omni models) has a :class:`QwenVision` for its images
and videos: its adapter hands ``measure``, ``prepare`` and ``warm_up`` on, adds ``identity`` to its fingerprint,
and gives the items of the vision tower to a :class:`~encoder_svc.models.qwen_vision_tower.QwenVisionTower` made from
``model.visual`` of the base model that it built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from encoder_svc.errors import Reason, ServiceError, SetupError
from encoder_svc.models.adapter import ImageProbe, Layout, MediaProbe, TowerInput, VideoProbe, WarmUp
from encoder_svc.models.checkpoint import Checkpoint
from encoder_svc.models.dtypes import DATA_TYPES, ELEMENT_BYTES
from encoder_svc.models.frame_sampling import (
    Sampler,
    choose_sampling,
    patch_times,
    sample_between_ends,
    sample_in_steps,
)
from encoder_svc.models.image_patches import (
    ImagePreprocessing,
    cut_patches,
    pixel_bounds,
    read_image_preprocessing,
    resize,
    smart_resize,
)
from encoder_svc.models.qwen_vision_config import VisionConfig, read_vision_config
from encoder_svc.models.timeline import Timeline
from encoder_svc.models.video_patches import (
    VideoPreprocessing,
    WholeVideoPreprocessing,
    cut_video,
    read_video_preprocessing,
)
from epd.encoder.v1.embedding_pb2 import (
    DataType,
    DoubleList,
    EmbeddingChunk,
    ImageMetadata,
    Int64List,
    PlaceholderValue,
    TensorSpec,
)
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from epd.internal.v1.media_worker_pb2 import ModelInput
from epd.internal.v1.media_worker_pb2 import Tower as TowerName

CHANNELS = 3


@dataclass(frozen=True)
class Timing:
    """What a family's prompt is told of a video's time."""

    seconds_name: str = ""
    """The processor's name for the seconds of a temporal patch. Empty: it gives none."""
    assumed_rate: float | None = None
    """These seconds are by the rate that was asked for, or else by this one, and not by the rate that was sampled."""
    has_timestamps: bool = False
    """The prompt shows the time of each temporal patch."""


@dataclass(frozen=True)
class VisionFamily:
    """How the families differ before the tower."""

    config: type[VisionConfig]
    video: type[VideoPreprocessing]
    sampler: Sampler
    timing: Timing
    video_pixels: tuple[int, int] | None = None
    """Bounds of a frame's pixels that the processor gives its video processor, whatever the checkpoint's are."""


MEASURED = Timing("second_per_grid_ts")
STAMPED = Timing(has_timestamps=True)


def of_frames(config: type[VisionConfig], timing: Timing, video_pixels: tuple[int, int] | None = None) -> VisionFamily:
    """A family with ``Qwen2VLVideoProcessor``: bounds of pixels are those of one frame."""
    return VisionFamily(config, VideoPreprocessing, sample_in_steps, timing, video_pixels)


def of_whole_videos(config: type[VisionConfig]) -> VisionFamily:
    """A family with ``Qwen3VLVideoProcessor``: bounds of pixels are those of all frames."""
    return VisionFamily(config, WholeVideoPreprocessing, sample_between_ends, STAMPED)


class QwenVision:
    """Images and videos as one checkpoint configures them. Immutable.

    Args:
        family: the rules of the family.
        checkpoint: the checkpoint.
        section: the part of its config that holds ``vision_config``.
        dtype: of the embeddings, as torch names it.

    Raises:
        SetupError: its configuration is wrong or contradicts itself.
    """

    def __init__(self, family: VisionFamily, checkpoint: Checkpoint, section: dict[str, Any], dtype: str) -> None:
        self._family = family
        self._element_bytes = ELEMENT_BYTES[dtype]
        self._data_type: DataType = DATA_TYPES[dtype]
        self.config = read_vision_config(
            family.config, section.get("vision_config"), f"config.json of {checkpoint.path}"
        )
        self.image = read_image_preprocessing(checkpoint.preprocessor)
        """The constants of images."""
        # Older checkpoints have one file for both, as transformers reads them too.
        self.video = read_video_preprocessing(family.video, checkpoint.video_preprocessor or checkpoint.preprocessor)
        """The constants of videos."""
        if family.video_pixels is not None:
            least, greatest = family.video_pixels
            self.video = self.video.model_copy(update={"min_pixels": least, "max_pixels": greatest})
        self.hidden_size = self.config.row_width
        """The width of ``embedding``."""
        self.tensors = ("embedding", *(f"deepstack_{level}" for level in range(self.config.levels)))
        """Names of an item's tensors."""
        for constants, kind in ((self.image, "image"), (self.video, "video")):
            self._check(constants, kind)

    @property
    def identity(self) -> dict[str, Any]:
        """What, beside weights, decides embeddings."""
        return {"image": self.image.model_dump(), "video": self.video.model_dump()}

    def measure(self, item: MediaItem, probe: MediaProbe) -> Layout:
        """See :meth:`Adapter.measure <encoder_svc.models.adapter.Adapter.measure>`."""
        kind = "image" if item.modality == Modality.MODALITY_IMAGE else "video"
        if item.modality not in (Modality.MODALITY_IMAGE, Modality.MODALITY_VIDEO):
            raise ServiceError(
                Reason.MODALITY_UNSUPPORTED, "this model encodes images and videos only", field="modality"
            )
        if item.WhichOneof("options") not in (None, kind):
            raise ServiceError(
                Reason.REQUEST_INVALID, f"the options are not those of this modality; set `{kind}`", field="options"
            )
        if kind == "image":
            return self._measure_image(item, cast("ImageProbe", probe))
        return self._measure_video(item, cast("VideoProbe", probe))

    def prepare(self, item: MediaItem, probe: MediaProbe, layout: Layout) -> Sequence[torch.Tensor]:
        """See :meth:`Adapter.prepare <encoder_svc.models.adapter.Adapter.prepare>`."""
        if item.modality == Modality.MODALITY_IMAGE:
            told = layout.chunk.image
            pixels = resize(cast("ImageProbe", probe).decode(), told.resized_height, told.resized_width)
            patches = torch.empty(tuple(layout.input.tensors[0].shape), dtype=torch.uint8)
            shape = len(patches), CHANNELS, self.image.patch_size**2
            cut_patches(pixels, self.image.patch_size, self.image.merge_size, patches.view(shape))
            return (patches,)
        size = layout.chunk.video.resized_height, layout.chunk.video.resized_width
        frames = cast("VideoProbe", probe).frames(layout.frames)
        return (cut_video(frames, len(layout.frames), *size, self.video),)

    def warm_up(self) -> WarmUp:
        """A grid of two by two merge blocks, mid-grey."""
        side = 2 * self.image.merge_size
        patches = torch.full((side * side, CHANNELS * self.image.patch_size**2), 128, dtype=torch.uint8)
        item = TowerInput(Modality.MODALITY_IMAGE, (1, side, side), (patches,))
        return WarmUp(item, TowerName.TOWER_VISION, len(patches))

    def _measure_image(self, item: MediaItem, probe: ImageProbe) -> Layout:
        constants = self.image
        least, greatest = pixel_bounds(constants, item.image)
        height, width = smart_resize(probe.height, probe.width, constants.factor, least, greatest)
        grid = (1, height // constants.patch_size, width // constants.patch_size)
        chunk = self._chunk(grid, "image_grid_thw")
        chunk.image.CopyFrom(
            ImageMetadata(width=probe.width, height=probe.height, resized_width=width, resized_height=height)
        )
        return Layout(chunk, self._input(grid, CHANNELS * constants.patch_size**2))

    def _measure_video(self, item: MediaItem, probe: VideoProbe) -> Layout:
        constants, options = self.video, item.video
        if options.use_audio_in_video:
            raise ServiceError(
                Reason.REQUEST_INVALID,
                "the sound of videos is not encoded with this model; leave use_audio_in_video out and send the sound "
                "as an item of its own",
                field="options.use_audio_in_video",
            )
        # The reference, too, samples no frames that come as images.
        in_images = item.WhichOneof("source") == "frames"
        wanted = choose_sampling(constants.sampling, constants.do_sample_frames and not in_images, options)
        timeline = Timeline.of(probe, options, constants.fps)
        frames = tuple(self._family.sampler(wanted, timeline.total, timeline.fps))
        height, width = constants.frame_size(len(frames), probe.height, probe.width, options)
        depth = constants.temporal_patch_size
        grid = (-(-len(frames) // depth), height // constants.patch_size, width // constants.patch_size)
        chunk = self._chunk(grid, "video_grid_thw")
        timing = self._family.timing
        stamps = patch_times(timeline.told(frames), depth) if timing.has_timestamps else ()
        chunk.video.CopyFrom(timeline.metadata(probe, frames, height, width, stamps))
        if timing.seconds_name:
            rate = timeline.sampled_fps(frames) if timing.assumed_rate is None else options.fps or timing.assumed_rate
            chunk.placeholder_metadata.add(
                name=timing.seconds_name, doubles=DoubleList(values=(depth / rate,)), shape=(1,)
            )
        return Layout(chunk, self._input(grid, CHANNELS * depth * constants.patch_size**2), frames)

    def _chunk(self, grid: tuple[int, int, int], name: str) -> EmbeddingChunk:
        rows = grid[0] * grid[1] * grid[2] // self.image.merge_size**2
        columns_bytes = self.hidden_size * self._element_bytes
        row_bytes = columns_bytes * len(self.tensors)
        return EmbeddingChunk(
            grid_dim=grid,
            token_count=rows,
            tensors=[
                TensorSpec(
                    name=tensor,
                    dtype=self._data_type,
                    shape=(rows, self.hidden_size),
                    strides=(row_bytes, self._element_bytes),
                    byte_offset=level * columns_bytes,
                )
                for level, tensor in enumerate(self.tensors)
            ],
            nbytes=rows * row_bytes,
            placeholder_metadata=[PlaceholderValue(name=name, ints=Int64List(values=grid), shape=(1, 3))],
        )

    def _input(self, grid: tuple[int, int, int], values: int) -> ModelInput:
        patches = grid[0] * grid[1] * grid[2]
        spec = TensorSpec(name="patches", dtype=DataType.DATA_TYPE_UINT8, shape=(patches, values), strides=(values, 1))
        return ModelInput(tensors=[spec], nbytes=patches * values, patches=patches, tower=TowerName.TOWER_VISION)

    def _check(self, constants: ImagePreprocessing, kind: str) -> None:
        for name, ours, theirs in (
            ("patch_size", constants.patch_size, self.config.patch_size),
            ("merge_size", constants.merge_size, self.config.spatial_merge_size),
            ("temporal_patch_size", constants.temporal_patch_size, self.config.temporal_patch_size),
        ):
            if ours != theirs:
                raise SetupError(
                    f"{name} is {ours} in the settings of the {kind} processor but {theirs} in vision_config of "
                    "config.json; both must come from the same checkpoint"
                )
