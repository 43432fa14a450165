"""What config.json says of audio encoders of the Whisper kind."""

from __future__ import annotations

from typing import Any, Literal, TypeVar

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError

from encoder_svc.errors import SetupError
from encoder_svc.models.checkpoint import Checkpoint
from encoder_svc.models.mel import MelSettings


class AudioEncoderConfig(BaseModel):
    """What a config says of an encoder of the Whisper kind. Defaults are those of transformers 5.24."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    width: int = Field(default=1280, ge=1, validation_alias=AliasChoices("d_model", "hidden_size"))
    layers: int = Field(default=32, ge=1, validation_alias=AliasChoices("encoder_layers", "num_hidden_layers"))
    heads: int = Field(
        default=20, ge=1, validation_alias=AliasChoices("encoder_attention_heads", "num_attention_heads")
    )
    intermediate: int = Field(default=5120, ge=1, validation_alias=AliasChoices("encoder_ffn_dim", "intermediate_size"))
    num_mel_bins: int = Field(default=128, ge=1)
    max_source_positions: int = Field(default=1500, ge=1)
    activation_function: Literal["gelu"] = "gelu"


Config = TypeVar("Config", bound=BaseModel)


def read_section(model: type[Config], section: Any, name: str, checkpoint: Checkpoint) -> Config:
    """Reads a section of config.json.

    Raises:
        SetupError: it is missing, or a field is wrong.
    """
    if not isinstance(section, dict):
        raise SetupError(
            f"config.json of {checkpoint.path} has no {name}; this is no checkpoint of {checkpoint.model_type}"
        )
    try:
        return model.model_validate(section)
    except ValidationError as error:
        fault = error.errors()[0]
        where = ".".join([name, *(str(part) for part in fault["loc"])])
        raise SetupError(f"config.json of {checkpoint.path}: {where}: {fault['msg']}") from None


def check_mel(config: AudioEncoderConfig, mel: MelSettings, checkpoint: Checkpoint, *, window: bool) -> None:
    """Checks that a feature extractor makes what an encoder takes.

    Args:
        config: of the encoder.
        mel: of the feature extractor.
        checkpoint: both are from it.
        window: the encoder takes windows of one length.

    Raises:
        SetupError: it does not.
    """
    if mel.feature_size != config.num_mel_bins:
        raise SetupError(
            f"feature_size is {mel.feature_size} in the feature extractor's settings of {checkpoint.path} but "
            f"num_mel_bins is {config.num_mel_bins} in config.json; both must come from the same checkpoint"
        )
    if config.width % config.heads:
        raise SetupError(f"config.json of {checkpoint.path}: a width of {config.width} has no {config.heads} heads")
    if window and mel.window_frames != 2 * config.max_source_positions:
        raise SetupError(
            f"the feature extractor of {checkpoint.path} makes {mel.window_frames} frames, but its encoder has "
            f"{config.max_source_positions} positions, each for two; both must come from the same checkpoint"
        )
