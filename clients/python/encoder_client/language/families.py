"""What differs between model families on the language side: a table, one row for each ``model_type``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from encoder_client.errors import EncoderClientError
from epd.encoder.v1.media_pb2 import Modality


@dataclass(frozen=True)
class Placeholder:
    """How a prompt shows the items of one modality."""

    token_id_field: str
    """The field of the checkpoint's config that holds the id of the token that one row fills."""
    type_id: int
    """The item's mark in ``mm_token_type_ids``: 1 image, 2 video."""
    encoder_output: str
    """The key of ``mm_encoder_outputs``."""
    values: tuple[str, ...]
    """The placeholder metadata that ``generate`` takes, by the names of Hugging Face processors."""


@dataclass(frozen=True)
class Family:
    """One model family."""

    model_class: str
    """The class of transformers that generates."""
    tower_prefixes: tuple[str, ...]
    """The beginnings of the names of the towers' tensors in checkpoints, of both the hub's layout and that which
    transformers 5 saves."""
    tower_modules: tuple[str, ...]
    """The towers' places in the model: they stay empty."""
    placeholders: Mapping[Modality, Placeholder]

    def is_tower(self, tensor: str) -> bool:
        """The tensor of that name in a checkpoint belongs to a tower."""
        return tensor.startswith(self.tower_prefixes)


_QWEN_VL_IMAGE = Placeholder("image_token_id", 1, "image", ("image_grid_thw",))

FAMILIES: Mapping[str, Family] = {
    "qwen2_5_vl": Family(
        model_class="Qwen2_5_VLForConditionalGeneration",
        tower_prefixes=("visual.", "model.visual."),
        tower_modules=("model.visual",),
        placeholders={Modality.MODALITY_IMAGE: _QWEN_VL_IMAGE},
    ),
}


def family_of(model_type: str) -> Family:
    """The row of a ``model_type``.

    Raises:
        EncoderClientError: there is none.
    """
    try:
        return FAMILIES[model_type]
    except KeyError:
        known = ", ".join(sorted(FAMILIES))
        raise EncoderClientError(f"the language side knows no model_type {model_type!r}; it knows {known}") from None
