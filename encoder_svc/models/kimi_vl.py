"""Kimi-VL, which transformers does not know: still images.

Grid (h, w) in patches; h·w / 4 rows. Sizes and pixels follow the image processor that its checkpoints carry as code: an
image of more than ``in_token_limit`` patches is shrunk, by Pillow, and all are padded with black to whole merge blocks.
The tower is in :mod:`~encoder_svc.models.moonvit`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, ValidationError, model_validator

from encoder_svc.errors import Reason, ServiceError, SetupError
from encoder_svc.models.adapter import Adapter, Tower
from encoder_svc.models.checkpoint import Checkpoint, open_checkpoint
from encoder_svc.models.image_families import ImageFamily
from encoder_svc.models.image_patches import cut_patches
from encoder_svc.models.image_preprocessing import Normalisation
from encoder_svc.models.image_rows import Inputs
from encoder_svc.models.patch_inputs import patch_limit
from encoder_svc.models.transformers_images import ImageAdapter
from encoder_svc.models.weights import TowerWeights
from epd.encoder.v1.media_pb2 import ImageOptions

MAX_SIDE = 512
"""Patches of a side: the rotary positions end there."""


class MoonViTConfig(BaseModel):
    """``vision_config``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    model_type: Literal["moonvit"] = "moonvit"
    patch_size: int = Field(default=14, ge=1)
    init_pos_emb_height: int = Field(default=64, ge=1)
    init_pos_emb_width: int = Field(default=64, ge=1)
    num_attention_heads: int = Field(default=16, ge=1)
    num_hidden_layers: int = Field(default=27, ge=1)
    hidden_size: int = Field(default=1152, ge=1)
    intermediate_size: int = Field(default=4304, ge=1)
    merge_kernel_size: tuple[int, int] = (2, 2)

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.hidden_size % (4 * self.num_attention_heads):
            raise ValueError(
                f"hidden_size {self.hidden_size} is no multiple of four times num_attention_heads "
                f"{self.num_attention_heads}: heads of that size cannot be rotated"
            )
        if self.merge_kernel_size[0] != self.merge_kernel_size[1] or self.merge_kernel_size[0] < 1:
            raise ValueError(f"merge_kernel_size {self.merge_kernel_size} is no square")
        return self


class TextConfig(BaseModel):
    """Of ``text_config``, what the projector needs."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    hidden_size: int = Field(ge=1)


class KimiVLConfig(BaseModel):
    """``config.json``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    vision_config: MoonViTConfig
    text_config: TextConfig


class KimiVLPreprocessing(BaseModel):
    """``preprocessor_config.json``."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    patch_size: int = Field(default=14, ge=1)
    merge_kernel_size: tuple[int, int] = (2, 2)
    in_token_limit: int = Field(default=4096, ge=1)
    pad_input: Literal[True] = True
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[PositiveFloat, PositiveFloat, PositiveFloat] = (0.26862954, 0.26130258, 0.27577711)


class KimiVLInputs:
    """Patches in merge-block order.

    Args:
        constants: the checkpoint's.
    """

    def __init__(self, constants: KimiVLPreprocessing) -> None:
        self._constants = constants
        self.normalisation = Normalisation(1 / 255, constants.image_mean, constants.image_std)
        self.constants = {"rule": "kimi_vl", **constants.model_dump()}

    def __call__(self, pixels: torch.Tensor, options: ImageOptions) -> Inputs:
        """See :meth:`~encoder_svc.models.image_preprocessing.ImageInputs.__call__`."""
        patch, merge = self._constants.patch_size, self._constants.merge_kernel_size[0]
        limit = patch_limit(self._constants.in_token_limit, patch, options)
        shrunk = _shrink(pixels, patch, limit)
        height, width = shrunk.shape[:2]
        rows, columns = (-(-side // (patch * merge)) * merge for side in (height, width))
        if max(rows, columns) >= MAX_SIDE:
            raise ServiceError(
                Reason.MEDIA_UNSUPPORTED,
                f"the image is {width}×{height} pixels after resizing; this model sees less than {MAX_SIDE * patch} "
                "pixels a side: crop it",
            )
        canvas = torch.zeros(rows * patch, columns * patch, 3, dtype=torch.uint8)
        canvas[:height, :width] = shrunk
        patches = torch.empty(rows * columns, 3 * patch * patch, dtype=torch.uint8)
        cut_patches(canvas.permute(2, 0, 1), patch, merge, patches)
        return {
            "pixel_values": patches.view(rows * columns, 3, patch * patch),
            "image_grid_hws": torch.tensor([[rows, columns]]),
        }


def _shrink(pixels: torch.Tensor, patch: int, limit: int) -> torch.Tensor:
    height, width = pixels.shape[:2]
    patches = (width // patch) * (height // patch)
    if patches <= limit:
        return pixels
    scale = math.sqrt(limit / patches)
    size = max(1, int(width * scale)), max(1, int(height * scale))
    return torch.from_numpy(np.array(Image.fromarray(pixels.numpy()).resize(size, Image.Resampling.BICUBIC)))


def _rows(config: Any, inputs: Inputs) -> int:
    return math.prod(_grid(config, inputs)) // int(math.prod(config.vision_config.merge_kernel_size))


def _grid(config: Any, inputs: Inputs) -> tuple[int, ...]:
    return tuple(inputs["image_grid_hws"][0].tolist())


def _make_inputs(checkpoint: Checkpoint, family: ImageFamily, config: Any) -> KimiVLInputs:
    values = {name: value for name, value in checkpoint.preprocessor.items() if value is not None}
    constants = _validate(KimiVLPreprocessing, values, checkpoint, "preprocessor_config.json")
    if constants.merge_kernel_size != config.vision_config.merge_kernel_size:
        raise SetupError(
            "merge_kernel_size differs between preprocessor_config.json and vision_config of config.json; both files "
            "must come from the same checkpoint"
        )
    return KimiVLInputs(constants)


FAMILY = ImageFamily("", _rows, _grid, inputs=_make_inputs, placeholder=("image_grid_hws",))


class KimiVLAdapter(ImageAdapter):
    """Kimi-VL as one checkpoint configures it.

    Args:
        checkpoint: the checkpoint.
        dtype: of weights and embeddings.

    Raises:
        SetupError: its configuration is wrong.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        config = _validate(KimiVLConfig, checkpoint.config, checkpoint, "config.json")
        super().__init__(checkpoint, dtype, FAMILY, config)

    def _build(self, weights: TowerWeights, identity: bytes, device: torch.device) -> Tower:
        from encoder_svc.models.moonvit import build_tower

        config, normalisation = self._config.vision_config, self._inputs.normalisation
        return build_tower(config, self.hidden_size, normalisation, weights, identity, self._torch_dtype, device)


def make_adapter(path: Path, dtype: torch.dtype) -> Adapter:
    """The factory of this family.

    Raises:
        SetupError: the checkpoint cannot be served.
    """
    return KimiVLAdapter(open_checkpoint(path), dtype)


def _validate(model: type[Any], values: dict[str, Any], checkpoint: Checkpoint, file: str) -> Any:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join(str(part) for part in fault["loc"])
        raise SetupError(
            f"{file} of {checkpoint.path}: {where}: {fault['msg'].removeprefix('Value error, ')}"
        ) from None
