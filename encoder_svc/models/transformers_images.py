"""Any family of transformers that encodes images by a call of its own: the half of it that prepares. Some see videos.

What differs between families is data (:mod:`~encoder_svc.models.image_families`). An image is prepared in order to be
measured: what an image processor cuts out of it is known when it has done so. The tower is in
:mod:`~encoder_svc.models.transformers_image_tower`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from encoder_svc.errors import Reason, ServiceError, SetupError
from encoder_svc.models.adapter import (
    Adapter,
    ImageProbe,
    Layout,
    MediaProbe,
    Progress,
    Tower,
    TowerInput,
    VideoProbe,
    WarmUp,
)
from encoder_svc.models.checkpoint import Checkpoint, open_checkpoint
from encoder_svc.models.dtypes import DATA_TYPES, ELEMENT_BYTES
from encoder_svc.models.image_families import ImageFamily, VideoFamily, describe
from encoder_svc.models.image_preprocessing import ImageInputs
from encoder_svc.models.image_rows import Inputs
from encoder_svc.models.registry import find_family
from encoder_svc.models.tensor_specs import append_tensor
from encoder_svc.models.video_inputs import VideoInputs, VideoPlan
from encoder_svc.models.weights import TowerWeights, fingerprint, read_config, read_towers
from epd.encoder.v1.embedding_pb2 import (
    DataType,
    EmbeddingChunk,
    ImageMetadata,
    Int64List,
    PlaceholderValue,
)
from epd.encoder.v1.media_pb2 import ImageOptions, MediaItem, Modality
from epd.internal.v1.media_worker_pb2 import ModelInput
from epd.internal.v1.media_worker_pb2 import Tower as TowerName

PREPROCESSING_VERSION = 2
"""Counts changes of this code that change embeddings."""

_GREY = torch.full((56, 56, 3), 128, dtype=torch.uint8)
"""The image of the first forward."""

_INPUT_TYPES = {torch.uint8: DataType.DATA_TYPE_UINT8, torch.int64: DataType.DATA_TYPE_INT64}


class ImageAdapter:
    """An image family as one checkpoint configures it.

    Args:
        checkpoint: the checkpoint.
        dtype: of weights and embeddings.
        family: how the family differs from others.
        config: its configuration, with the fields that the family's rules read.

    Raises:
        SetupError: its configuration is wrong.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, family: ImageFamily, config: Any) -> None:
        row = find_family(checkpoint)
        self.model_type = row.model_type
        self.modalities: tuple[Modality, ...] = row.modalities
        self.tensors: tuple[str, ...] = row.tensors
        self._prefixes = row.prefixes
        self._checkpoint = checkpoint
        self._torch_dtype = dtype
        self._dtype_name = str(dtype).removeprefix("torch.")
        self.dtype: DataType = DATA_TYPES[self._dtype_name]
        self._family = family
        self._config = config
        self._inputs: ImageInputs = family.inputs(checkpoint, family, config)
        self._videos = None if family.videos is None else family.videos.inputs(checkpoint, family, config)
        self.hidden_size = family.width(config)
        # What does not fit together is found now, and not by the first item.
        self._warm_up_layout = self._lay_out(_GREY, ImageOptions())

    def measure(self, item: MediaItem, probe: MediaProbe) -> Layout:
        """See :meth:`Adapter.measure <encoder_svc.models.adapter.Adapter.measure>`."""
        if item.modality not in self.modalities:
            kinds = "images" if self._videos is None else "images and videos"
            raise ServiceError(
                Reason.MODALITY_UNSUPPORTED, f"this server encodes {kinds} of this model only", field="modality"
            )
        kind = "image" if item.modality == Modality.MODALITY_IMAGE else "video"
        if item.WhichOneof("options") not in (None, kind):
            raise ServiceError(
                Reason.REQUEST_INVALID, f"the options are not those of this modality; set `{kind}`", field="options"
            )
        if kind == "image":
            return self._lay_out(cast("ImageProbe", probe).decode(), item.image)
        plan = self._plan(item, cast("VideoProbe", probe))
        chunk = self._chunk(plan.inputs, cast("VideoFamily", self._family.videos))
        chunk.video.CopyFrom(plan.metadata)
        return Layout(chunk, self._describe(plan.inputs), plan.frames)

    def _lay_out(self, pixels: torch.Tensor, options: ImageOptions) -> Layout:
        inputs = self._inputs(pixels, options)
        chunk = self._chunk(inputs, self._family)
        chunk.image.CopyFrom(ImageMetadata(width=pixels.shape[1], height=pixels.shape[0], **self._resized(inputs)))
        return Layout(chunk, self._describe(inputs), prepared=self._tensors(inputs))

    def prepare(self, item: MediaItem, probe: MediaProbe, layout: Layout) -> Sequence[torch.Tensor]:
        """See :meth:`Adapter.prepare <encoder_svc.models.adapter.Adapter.prepare>`."""
        if item.modality == Modality.MODALITY_IMAGE:
            return layout.prepared
        video = cast("VideoProbe", probe)
        plan = self._plan(item, video)
        pixels = torch.empty_like(plan.inputs["pixel_values"], device="cpu")
        plan.fill(video.frames(plan.frames), pixels)
        return self._tensors({**plan.inputs, "pixel_values": pixels})

    def warm_up(self) -> WarmUp:
        """A small mid-grey square."""
        layout = self._warm_up_layout
        item = TowerInput(Modality.MODALITY_IMAGE, tuple(layout.chunk.grid_dim), layout.prepared)
        return WarmUp(item, TowerName.TOWER_VISION, layout.input.patches)

    def load_tower(self, device: torch.device, progress: Progress) -> Tower:
        """See :meth:`Adapter.load_tower <encoder_svc.models.adapter.Adapter.load_tower>`."""
        weights = read_towers(self._checkpoint, self._prefixes, self._torch_dtype, progress)
        constants: dict[str, Any] = {"version": PREPROCESSING_VERSION, **self._inputs.constants}
        if self._videos is not None:
            constants["video"] = self._videos.constants
        identity = fingerprint(weights, self.model_type, self._torch_dtype, constants, self.hidden_size)
        tower = self._build(weights, identity, device)
        (matrices,) = tower.encode([self.warm_up().item])
        promised = [tuple(spec.shape) for spec in self._warm_up_layout.chunk.tensors]
        made = [tuple(matrix.shape) for matrix in matrices]
        if made != promised:
            raise SetupError(
                f"the tower of {self._checkpoint.path} makes rows of shapes {made} where config.json promises "
                f"{promised}; config, weights and preprocessor_config.json must come from the same checkpoint"
            )
        return tower

    def _build(self, weights: TowerWeights, identity: bytes, device: torch.device) -> Tower:
        from encoder_svc.models.transformers_image_tower import build_tower

        normalisations = {Modality.MODALITY_IMAGE: self._inputs.normalisation}
        if self._videos is not None:
            normalisations[Modality.MODALITY_VIDEO] = self._videos.normalisation
        return build_tower(self._family, self._config, normalisations, weights, identity, self._torch_dtype, device)

    def _plan(self, item: MediaItem, probe: VideoProbe) -> VideoPlan:
        if item.video.use_audio_in_video:
            raise ServiceError(
                Reason.REQUEST_INVALID,
                "this model does not hear; leave use_audio_in_video out",
                field="options.use_audio_in_video",
            )
        return cast("VideoInputs", self._videos).plan(item, probe)

    def _chunk(self, inputs: Inputs, kind: ImageFamily | VideoFamily) -> EmbeddingChunk:
        """All that an item's kind of input says; the metadata of its media are not set."""
        rows = (kind.rows or self._family.rows)(self._config, inputs)
        chunk = EmbeddingChunk(
            grid_dim=(kind.grid or self._family.grid)(self._config, inputs),
            token_count=rows,
            placeholder_metadata=[
                PlaceholderValue(
                    name=name, ints=Int64List(values=inputs[name].flatten().tolist()), shape=inputs[name].shape
                )
                for name in kind.placeholder
            ],
        )
        widths = [(rows, self.hidden_size)]
        if self._family.pooled_width is not None:
            widths.append((1, self._family.pooled_width(self._config)))
        for name, shape in zip(self.tensors, widths, strict=True):
            append_tensor(chunk, name, self.dtype, ELEMENT_BYTES[self._dtype_name], shape)
        return chunk

    def _arguments(self, inputs: Inputs) -> tuple[str, ...]:
        """What the call takes of an item's inputs."""
        return tuple(name for name in self._family.arguments if name in inputs)

    def _tensors(self, inputs: Inputs) -> tuple[torch.Tensor, ...]:
        return tuple(inputs[name].contiguous() for name in ("pixel_values", *self._arguments(inputs)))

    def _describe(self, inputs: Inputs) -> ModelInput:
        described = ModelInput(tower=TowerName.TOWER_VISION)
        for name in ("pixel_values", *self._arguments(inputs)):
            tensor = inputs[name]
            append_tensor(described, name, _INPUT_TYPES[tensor.dtype], tensor.element_size(), tuple(tensor.shape))
        vision = getattr(self._config, "vision_config", self._config)
        patch = vision.patch_size if isinstance(vision.patch_size, int) else vision.patch_size[0]
        pixels = inputs["pixel_values"]
        in_rows = self._family.frames(self._config) > 1
        described.patches = pixels.shape[0] if in_rows else max(1, pixels.numel() // (3 * patch * patch))
        return described

    def _resized(self, inputs: Inputs) -> dict[str, int]:
        vision = getattr(self._config, "vision_config", self._config)
        if "image_grid_thw" in inputs:
            _, rows, columns = inputs["image_grid_thw"][0].tolist()
            return {"resized_height": rows * vision.patch_size, "resized_width": columns * vision.patch_size}
        if inputs["pixel_values"].shape[0] == 1 and "target_sizes" not in inputs:
            height, width = inputs["pixel_values"].shape[-2:]
            return {"resized_height": height, "resized_width": width}
        return {}


def make_adapter(path: Path, dtype: torch.dtype) -> Adapter:
    """The factory of the families that transformers knows.

    Raises:
        SetupError: the checkpoint cannot be served.
    """
    from transformers import CONFIG_MAPPING  # takes seconds, and only workers and engines need it

    checkpoint = open_checkpoint(path)
    model_type = find_family(checkpoint).model_type
    vision: Any = checkpoint.config.get("vision_config")
    tower_type = str(vision.get("model_type") or "") if isinstance(vision, dict) else ""
    config = read_config(CONFIG_MAPPING[model_type], checkpoint)
    return ImageAdapter(checkpoint, dtype, describe(model_type, tower_type), config)
