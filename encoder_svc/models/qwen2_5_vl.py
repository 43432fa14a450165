"""Qwen2.5-VL: still images.

Grid (1, h, w) in patches of 14 × 14 pixels; h·w / merge² rows. The tower is in
:mod:`~encoder_svc.models.qwen2_5_vl_tower`, which an engine imports when it loads: a media worker imports no
transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Self

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from encoder_svc.errors import Reason, ServiceError, SetupError
from encoder_svc.models.adapter import Adapter, Layout, MediaProbe, Progress, Tower, TowerInput
from encoder_svc.models.checkpoint import Checkpoint, open_checkpoint
from encoder_svc.models.dtypes import DATA_TYPES, ELEMENT_BYTES
from encoder_svc.models.image_patches import (
    cut_patches,
    pixel_bounds,
    read_image_preprocessing,
    resize,
    smart_resize,
)
from encoder_svc.models.registry import FAMILIES
from epd.encoder.v1.embedding_pb2 import (
    DataType,
    EmbeddingChunk,
    ImageMetadata,
    Int64List,
    PlaceholderValue,
    TensorSpec,
)
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from epd.internal.v1.media_worker_pb2 import ModelInput

CHANNELS = 3


class VisionConfig(BaseModel):
    """What ``vision_config`` says. Defaults are those of transformers 5.24.

    What is read here but not used is checked: an engine must not find out in its first forward.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    depth: int = Field(default=32, ge=1)
    hidden_size: int = Field(default=3584, ge=1)
    num_heads: int = Field(default=16, ge=1)
    intermediate_size: int = Field(default=3420, ge=1)
    hidden_act: Literal["silu"] = "silu"
    in_channels: Literal[3] = 3
    window_size: int = Field(default=112, ge=1)
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)

    patch_size: int = Field(default=14, ge=1)
    spatial_merge_size: int = Field(default=2, ge=1)
    temporal_patch_size: int = Field(default=2, ge=1)
    out_hidden_size: int = Field(default=3584, ge=1)

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        # A quarter of a head turns with the row of a patch and a quarter with its column, each in pairs.
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} is no multiple of four times num_heads {self.num_heads}: heads of "
                "that size cannot be rotated"
            )
        block = self.patch_size * self.spatial_merge_size
        if self.window_size < block:
            raise ValueError(f"window_size {self.window_size} is less than a merge block of {block} pixels")
        beyond = [index for index in self.fullatt_block_indexes if not 0 <= index < self.depth]
        if beyond:
            raise ValueError(f"fullatt_block_indexes names block {beyond[0]}, but depth is {self.depth}")
        return self


class Qwen25VLAdapter:
    """Qwen2.5-VL as one checkpoint configures it.

    Args:
        checkpoint: the checkpoint.
        dtype: of weights and embeddings.

    Raises:
        SetupError: its configuration is wrong or contradicts itself.
    """

    model_type = "qwen2_5_vl"
    modalities: tuple[Modality, ...] = FAMILIES["qwen2_5_vl"].modalities
    tensors: tuple[str, ...] = FAMILIES["qwen2_5_vl"].tensors

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._torch_dtype = dtype
        self._dtype_name = str(dtype).removeprefix("torch.")
        self.dtype: DataType = DATA_TYPES[self._dtype_name]
        self._vision = _read_vision_config(checkpoint)
        self._preprocessing = read_image_preprocessing(checkpoint.preprocessor)
        self.hidden_size = self._vision.out_hidden_size
        for name, ours, theirs in (
            ("patch_size", self._preprocessing.patch_size, self._vision.patch_size),
            ("merge_size", self._preprocessing.merge_size, self._vision.spatial_merge_size),
            ("temporal_patch_size", self._preprocessing.temporal_patch_size, self._vision.temporal_patch_size),
        ):
            if ours != theirs:
                raise SetupError(
                    f"{name} is {ours} in preprocessor_config.json but {theirs} in vision_config of config.json; both "
                    "files must come from the same checkpoint"
                )

    def measure(self, item: MediaItem, probe: MediaProbe) -> Layout:
        """See :meth:`Adapter.measure <encoder_svc.models.adapter.Adapter.measure>`."""
        if item.modality != Modality.MODALITY_IMAGE:
            raise ServiceError(
                Reason.MODALITY_UNSUPPORTED, "this server encodes images of this model only", field="modality"
            )
        if item.WhichOneof("options") not in (None, "image"):
            raise ServiceError(
                Reason.REQUEST_INVALID, "the options are not those of an image; set `image`", field="options"
            )
        constants = self._preprocessing
        least, greatest = pixel_bounds(constants, item.image)
        height, width = smart_resize(probe.height, probe.width, constants.factor, least, greatest)
        rows, columns = height // constants.patch_size, width // constants.patch_size
        tokens = rows * columns // constants.merge_size**2
        row_bytes = self.hidden_size * ELEMENT_BYTES[self._dtype_name]
        values = CHANNELS * constants.patch_size**2
        return Layout(
            chunk=EmbeddingChunk(
                grid_dim=(1, rows, columns),
                token_count=tokens,
                tensors=[
                    TensorSpec(
                        name="embedding",
                        dtype=self.dtype,
                        shape=(tokens, self.hidden_size),
                        strides=(row_bytes, ELEMENT_BYTES[self._dtype_name]),
                    )
                ],
                nbytes=tokens * row_bytes,
                placeholder_metadata=[
                    PlaceholderValue(name="image_grid_thw", ints=Int64List(values=(1, rows, columns)), shape=(1, 3))
                ],
                image=ImageMetadata(width=probe.width, height=probe.height, resized_width=width, resized_height=height),
            ),
            input=ModelInput(
                tensors=[
                    TensorSpec(
                        name="patches",
                        dtype=DataType.DATA_TYPE_UINT8,
                        shape=(rows * columns, values),
                        strides=(values, 1),
                    )
                ],
                nbytes=rows * columns * values,
                patches=rows * columns,
            ),
        )

    def prepare(self, item: MediaItem, media: torch.Tensor, layout: Layout, out: Sequence[torch.Tensor]) -> None:
        """See :meth:`Adapter.prepare <encoder_svc.models.adapter.Adapter.prepare>`."""
        image = layout.chunk.image
        resized = resize(media, image.resized_height, image.resized_width)
        cut_patches(resized, self._preprocessing.patch_size, self._preprocessing.merge_size, out[0])

    def warm_up_input(self) -> TowerInput:
        """A grid of two by two merge blocks, mid-grey."""
        side = 2 * self._preprocessing.merge_size
        patches = torch.full((side * side, CHANNELS * self._preprocessing.patch_size**2), 128, dtype=torch.uint8)
        return TowerInput(Modality.MODALITY_IMAGE, (1, side, side), (patches,))

    def load_tower(self, device: torch.device, progress: Progress) -> Tower:
        """See :meth:`Adapter.load_tower <encoder_svc.models.adapter.Adapter.load_tower>`."""
        from encoder_svc.models.qwen2_5_vl_tower import load_tower

        return load_tower(self._checkpoint, self._preprocessing, self._torch_dtype, device, progress)


def make_adapter(path: Path, dtype: torch.dtype) -> Adapter:
    """The factory of this family.

    Raises:
        SetupError: the checkpoint cannot be served.
    """
    return Qwen25VLAdapter(open_checkpoint(path), dtype)


def _read_vision_config(checkpoint: Checkpoint) -> VisionConfig:
    section: Any = checkpoint.config.get("vision_config")
    if not isinstance(section, dict):
        raise SetupError(f"config.json of {checkpoint.path} has no vision_config; this is no Qwen2.5-VL checkpoint")
    try:
        return VisionConfig.model_validate(section)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(["vision_config", *(str(part) for part in fault["loc"])])
        raise SetupError(
            f"config.json of {checkpoint.path}: {where}: {fault['msg'].removeprefix('Value error, ')}"
        ) from None
