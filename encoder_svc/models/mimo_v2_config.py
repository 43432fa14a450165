"""What a MiMo-V2 checkpoint says of its towers: sections of ``config.json``, and ``audio_tokenizer/config.json``.

Defaults are those of the published checkpoints. Two things no file says and public ports do not agree on: how attention
sinks enter a tower's scores, and how the merger normalises. They are fields of ``vision_config`` here
(:class:`SinkForm`, :class:`MergerNorm`), which no published checkpoint has: whoever knows better sets them there, or
with ``--model-options``.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, field_validator, model_validator

from encoder_svc.models.qwen_vision_config import VisionConfig


class SinkForm(StrEnum):
    """How a head's sink enters the scores of a banded layer. Not verified with the published weights."""

    FIRST_KEY = "first_key"
    """It is added to the scores of the frame's first patch, for the queries that see it."""
    SOFTMAX = "softmax"
    """It is a score more in the softmax of every query, with nothing to look at behind it."""


class MergerNorm(StrEnum):
    """How the merger normalises. Not verified with the published weights."""

    LAYER_NORM = "layer_norm"
    """Mean and deviation, without a bias."""
    RMS_NORM = "rms_norm"
    """The root mean square alone."""


class MimoVision(VisionConfig):
    """``vision_config``."""

    depth: int = Field(default=28, ge=1)
    hidden_size: int = Field(default=1280, ge=1)
    out_hidden_size: int = Field(default=4096, ge=1)
    intermediate_size: int = Field(default=4608, ge=1)
    num_heads: int = Field(default=32, ge=1)
    num_key_value_heads: int = Field(default=8, ge=1)
    qk_channels: int = Field(default=64, ge=4)
    """The size of a head. Published checkpoints leave it out: it is not hidden_size / num_heads."""
    patch_size: int = Field(default=16, ge=1)
    in_chans: Literal[3] = 3
    hidden_act: Literal["silu"] = "silu"
    fullatt_block_indexes: tuple[int, ...] = (0, 9, 18, 27)
    """Blocks that attend over whole frames."""
    vit_window_attn_types: tuple[Literal[-1, 0, 1], ...] = ()
    """For each block: 1, its patches stand column by column; else row by row. Empty: row by row."""
    visual_token_window_size: int = 64
    """How far a patch of a banded block sees to both sides, in patches. Less than 1: over the whole frame."""
    use_sink: bool = True
    """Banded blocks have sinks."""
    sink_form: SinkForm = SinkForm.FIRST_KEY
    merger_norm: MergerNorm = MergerNorm.LAYER_NORM

    @property
    def tower_width(self) -> int:
        """Hidden states."""
        return self.hidden_size

    @property
    def row_width(self) -> int:
        """Rows."""
        return self.out_hidden_size

    def is_full(self, block: int) -> bool:
        """The block attends over whole frames."""
        return block in self.fullatt_block_indexes

    def in_columns(self, block: int) -> bool:
        """The block's patches stand column by column."""
        return bool(self.vit_window_attn_types) and self.vit_window_attn_types[block] == 1

    @model_validator(mode="after")
    def _has_the_blocks(self) -> Self:
        if self.num_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_heads {self.num_heads} are no multiple of {self.num_key_value_heads} key_value_heads"
            )
        if self.qk_channels % 4:
            raise ValueError(f"qk_channels {self.qk_channels} is no multiple of four: such heads cannot be rotated")
        if len(self.vit_window_attn_types) not in (0, self.depth):
            raise ValueError(
                f"vit_window_attn_types has {len(self.vit_window_attn_types)} entries for {self.depth} blocks"
            )
        beyond = [index for index in self.fullatt_block_indexes if not 0 <= index < self.depth]
        if beyond:
            raise ValueError(f"fullatt_block_indexes names block {beyond[0]}, but depth is {self.depth}")
        return self


class MimoAudio(BaseModel):
    """``audio_config``: what makes rows of the audio tokenizer's codes."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    audio_channels: int = Field(default=20, ge=1)
    """Codes of a time step, of one codebook each."""
    audio_segment_size: int = Field(default=6000, ge=1)
    """Mel frames that are tokenized together."""
    group_size: int = Field(default=4, ge=1)
    """Time steps of a row."""
    speech_vocab_size: tuple[int, ...] = (1280,)
    """Entries of each channel's table, or of all."""
    input_local_dim: int = Field(default=1024, ge=1)
    input_local_layers: int = Field(default=6, ge=1)
    input_local_attn_heads: int = Field(default=16, ge=1)
    input_local_head_dim: int = Field(default=64, ge=2)
    input_local_intermediate_size: int = Field(default=4096, ge=1)
    input_full_attention: bool = True
    """Time steps of a group look at each other; else only back."""
    add_post_norm: bool = True
    """The local transformer ends with a norm."""
    projection_layers: Literal[1, 2] = 2
    out_hidden_size: int = Field(default=4096, ge=1)
    rope_theta: PositiveFloat = 640_000.0
    partial_rotary_factor: float = Field(default=1.0, ge=1, le=1)

    @field_validator("speech_vocab_size", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        """Published configs write a number as a text, or one for each channel with dashes between them."""
        return str(value).split("-") if isinstance(value, int | str) else value

    @property
    def table_sizes(self) -> tuple[int, ...]:
        """Entries of each channel's table."""
        return (
            self.speech_vocab_size * self.audio_channels if len(self.speech_vocab_size) == 1 else self.speech_vocab_size
        )

    @model_validator(mode="after")
    def _has_the_heads(self) -> Self:
        if len(self.table_sizes) != self.audio_channels:
            raise ValueError(
                f"speech_vocab_size names {len(self.table_sizes)} tables for {self.audio_channels} channels"
            )
        if (
            self.input_local_attn_heads * self.input_local_head_dim != self.input_local_dim
            or self.input_local_head_dim % 2
        ):
            raise ValueError(
                f"{self.input_local_attn_heads} heads of {self.input_local_head_dim} do not make input_local_dim "
                f"{self.input_local_dim}, or cannot be rotated"
            )
        return self


class MimoTokenizer(BaseModel):
    """``audio_tokenizer/config.json``: mel settings, the encoder, and the quantizer."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    sampling_rate: int = Field(default=24_000, ge=1)
    nfft: int = Field(default=960, ge=2)
    window_size: int = Field(default=960, ge=2)
    hop_length: int = Field(default=240, ge=1)
    n_mels: int = Field(default=128, ge=1)
    fmin: float = Field(default=0.0, ge=0)
    fmax: float | None = None

    d_model: int = Field(default=1024, ge=1)
    encoder_layers: int = Field(default=24, ge=1)
    encoder_attention_heads: int = Field(default=16, ge=1)
    encoder_ffn_dim: int = Field(default=4096, ge=1)
    encoder_skip_layer_id: int | None = Field(default=3, ge=1)
    """The layer, counted from 1, whose output is added to the last one's."""
    encoder_causal: bool = False
    """Nothing looks ahead."""
    encoder_attn_window_size: tuple[int, int] = (-1, -1)
    """How far a position of a windowed layer sees back and ahead. -1: without end."""
    hybrid_attention: bool = False
    """Not all layers are windowed: the last of every ``swa_per_block`` is not."""
    swa_per_block: int = Field(default=2, ge=1)
    kernel_size: Literal[3] = 3
    stride_size: Literal[2] = 2
    avg_pooler: int = Field(default=2, ge=1)
    """Positions of a code."""
    num_quantizers: int = Field(default=20, ge=1)
    codebook_size: tuple[int, ...] = (1024,)
    """Entries of each codebook; the last number goes for those that are not named."""
    rope_theta: PositiveFloat = 10_000.0
    rope_type: Literal["default"] = "default"
    position_embedding_type: Literal["rope"] = "rope"
    ln_type: Literal["LayerNorm"] = "LayerNorm"
    activation_function: Literal["gelu"] = "gelu"
    scale_embedding: Literal[False] = False

    @field_validator("codebook_size", mode="before")
    @classmethod
    def _as_tuple(cls, value: Any) -> Any:
        return (value,) if isinstance(value, int) else value

    @property
    def codebook_sizes(self) -> tuple[int, ...]:
        """Entries of each codebook."""
        missing = self.num_quantizers - len(self.codebook_size)
        return (*self.codebook_size[: self.num_quantizers], *self.codebook_size[-1:] * missing)

    def is_windowed(self, layer: int) -> bool:
        """The layer has the window, and not everything."""
        return not self.hybrid_attention or layer % self.swa_per_block < self.swa_per_block - 1

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if self.d_model % (2 * self.encoder_attention_heads):
            raise ValueError(f"d_model {self.d_model} has no {self.encoder_attention_heads} heads that can be rotated")
        if self.window_size != self.nfft:
            raise ValueError(f"window_size {self.window_size} is not nfft {self.nfft}")
        return self


class MimoProcessor(BaseModel):
    """``processor_config``: how videos are sampled and sized, and the rate of sound."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    audio_sampling_rate: int = Field(default=24_000, ge=1)
    audio_input_id_per_second: PositiveFloat = 25.0
    """Codes of a second."""
    fps: PositiveFloat | None = None
    num_frames: int | None = Field(default=None, ge=1)
    min_frames: int | None = Field(default=None, ge=1)
    max_frames: int | None = Field(default=None, ge=1)
    video_min_pixels: int | None = Field(default=None, ge=1)
    video_max_pixels: int | None = Field(default=None, ge=1)
    video_total_max_pixels: int | None = Field(default=None, ge=1)
    temporal_compression_ratio: Literal[1] = 1
