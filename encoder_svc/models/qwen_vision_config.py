"""``vision_config`` of the Qwen-VL families. Defaults are those of transformers 5.24.

What is read here but not used is checked: an engine must not find out in its first forward.
"""

from __future__ import annotations

from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from encoder_svc.errors import SetupError
from encoder_svc.models.rotary import THETA


class VisionConfig(BaseModel):
    """What all of them have."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    depth: int = Field(default=32, ge=1)
    num_heads: int = Field(default=16, ge=1)
    in_channels: Literal[3] = 3
    patch_size: int = Field(default=14, ge=1)
    spatial_merge_size: int = Field(default=2, ge=1)
    temporal_patch_size: int = Field(default=2, ge=1)
    rope_parameters: dict[str, Any] | None = None

    @property
    def tower_width(self) -> int:
        """The width of the tower's hidden states."""
        raise NotImplementedError

    @property
    def row_width(self) -> int:
        """The width of a row of ``embedding``: that of the language model."""
        raise NotImplementedError

    @property
    def levels(self) -> int:
        """Of deepstack: rows of so many blocks follow each row."""
        return 0

    @model_validator(mode="after")
    def _can_be_rotated(self) -> Self:
        # A quarter of a head turns with the row of a patch and a quarter with its column, each in pairs.
        if self.tower_width % (4 * self.num_heads):
            raise ValueError(
                f"a width of {self.tower_width} is no multiple of four times num_heads {self.num_heads}: heads of that "
                "size cannot be rotated"
            )
        theta = (self.rope_parameters or {}).get("rope_theta") or THETA
        if theta != THETA:
            raise ValueError(f"rope_theta {theta} is not {THETA}, the only base of rotations that is known here")
        return self


class Qwen2Vision(VisionConfig):
    """Qwen2-VL."""

    embed_dim: int = Field(default=1280, ge=1)
    hidden_size: int = Field(default=3584, ge=1)
    mlp_ratio: float = Field(default=4, gt=0)
    hidden_act: Literal["quick_gelu"] = "quick_gelu"

    @property
    def tower_width(self) -> int:
        """Hidden states."""
        return self.embed_dim

    @property
    def row_width(self) -> int:
        """Rows."""
        return self.hidden_size


class MergedVision(VisionConfig):
    """The merger's output has a width of its own."""

    hidden_size: int = Field(default=3584, ge=1)
    out_hidden_size: int = Field(default=3584, ge=1)

    @property
    def tower_width(self) -> int:
        """Hidden states."""
        return self.hidden_size

    @property
    def row_width(self) -> int:
        """Rows."""
        return self.out_hidden_size


class Qwen25Vision(MergedVision):
    """Qwen2.5-VL and Qwen2.5-Omni: most blocks attend within windows."""

    intermediate_size: int = Field(default=3420, ge=1)
    hidden_act: Literal["silu"] = "silu"
    window_size: int = Field(default=112, ge=1)
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)

    @model_validator(mode="after")
    def _has_windows(self) -> Self:
        block = self.patch_size * self.spatial_merge_size
        if self.window_size < block:
            raise ValueError(f"window_size {self.window_size} is less than a merge block of {block} pixels")
        beyond = [index for index in self.fullatt_block_indexes if not 0 <= index < self.depth]
        if beyond:
            raise ValueError(f"fullatt_block_indexes names block {beyond[0]}, but depth is {self.depth}")
        return self


class Qwen35Vision(MergedVision):
    """Qwen3.5: positions are learned, too."""

    depth: int = Field(default=27, ge=1)
    hidden_size: int = Field(default=1152, ge=1)
    intermediate_size: int = Field(default=4304, ge=1)
    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"
    patch_size: int = Field(default=16, ge=1)
    num_position_embeddings: int = Field(default=2304, ge=1)

    @model_validator(mode="after")
    def _has_a_square_of_positions(self) -> Self:
        if int(self.num_position_embeddings**0.5) ** 2 != self.num_position_embeddings:
            raise ValueError(f"num_position_embeddings {self.num_position_embeddings} is no square")
        return self


class Qwen3Vision(Qwen35Vision):
    """Qwen3-VL and Qwen3-Omni: rows of some blocks go to the language model, too (deepstack)."""

    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)

    @property
    def levels(self) -> int:
        """One for each block."""
        return len(self.deepstack_visual_indexes)

    @model_validator(mode="after")
    def _has_the_blocks(self) -> Self:
        indexes = self.deepstack_visual_indexes
        if len(set(indexes)) < len(indexes) or any(not 0 <= index < self.depth for index in indexes):
            raise ValueError(f"deepstack_visual_indexes {list(indexes)} are no different blocks of {self.depth}")
        return self


Config = TypeVar("Config", bound=VisionConfig)


def read_vision_config(model: type[Config], section: Any, where: str) -> Config:
    """Reads a ``vision_config``.

    Args:
        model: of the family.
        section: what the config has under that name.
        where: whose it is, for messages.

    Raises:
        SetupError: there is none, or a value is wrong.
    """
    if not isinstance(section, dict):
        raise SetupError(f"{where} has no vision_config; this is no checkpoint of its model type")
    try:
        return model.model_validate(section)
    except ValidationError as error:
        fault = error.errors()[0]
        path = ".".join(["vision_config", *(str(part) for part in fault["loc"])])
        raise SetupError(f"{where}: {path}: {fault['msg'].removeprefix('Value error, ')}") from None
