"""What can differ between model families on the language side."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.media_pb2 import Modality

ROWS, SOUND_ROWS = "embedding", "video_audio_embedding"
"""The tensors whose rows fill placeholders."""


def sound_rows(chunk: EmbeddingChunk) -> int:
    """Rows of a video's sound that are kept; 0: it is silent, or no video."""
    return next((spec.shape[0] for spec in chunk.tensors if spec.name == SOUND_ROWS), 0)


class Entrance(Enum):
    """Where rows enter the model."""

    EMBEDDINGS = auto()
    """They replace the placeholders' rows of ``inputs_embeds``."""
    TOWER_OUTPUTS = auto()
    """They come as finished outputs of the towers (``mm_encoder_outputs``): for models that add further tensors after
    their first layers (deepstack)."""
    JOINED_TOWER_OUTPUTS = auto()
    """So too, but the rows of all items are one tensor: for models whose ``generate`` takes no ``inputs_embeds``."""
    CROSS_ATTENTION = auto()
    """The decoder attends to them (``encoder_outputs``); the prompt has no placeholders, and there is one part."""


@dataclass(frozen=True)
class RowToken:
    """The token that one row fills."""

    text: str
    """As the tokenizer reads it."""
    config: Any
    """The config of the model that generates."""
    marks: Mapping[str, str] = field(default_factory=dict)
    """The family's other tokens that an expansion writes, by the field of the config that holds the id."""
    number: int = 0
    """How many items of the part's modality stand before it in the prompt."""


Expansion = Callable[[RowToken, EmbeddingChunk], str]
"""Makes the text that stands for a part: the token as many times as it has rows, and what stands around and between.

Raises:
    ValueError: the chunk does not have the values that the text is made of; the message names them.
"""


@dataclass(frozen=True)
class Value:
    """A value that the model needs beside the rows."""

    argument: str
    """The name under which the model takes it."""
    names: tuple[str, ...]
    """The names under which a chunk may have it in its placeholder metadata, the best first."""


@dataclass(frozen=True)
class Placeholder:
    """How a prompt shows the items of one modality."""

    token_id_field: str
    """The field of the config that holds the id of the token that one row fills."""
    expand: Expansion
    type_id: int
    """The item's mark in ``mm_token_type_ids``: 1 image, 2 video, 3 audio."""
    shown_as: str | None = None
    """The token that shows an item before expansion. None: the one that rows fill."""
    values: tuple[Value, ...] = ()
    """The values from placeholder metadata that the model takes, one for each item."""
    mel_frames_argument: str | None = None
    """The argument that takes the number of mel frames of each item; of a video, those of its sound."""
    marks: tuple[str, ...] = ()
    """The fields of the config that hold the ids of the other tokens that ``expand`` writes."""
    sound_row_field: str | None = None
    """The field of the config that holds the id of the token that one row of a video's sound fills. None: the family
    knows no sound in videos."""


@dataclass(frozen=True)
class Family:
    """One model family."""

    model_class: str
    """The class of transformers that generates."""
    tower_prefixes: tuple[str, ...]
    """The beginnings of the names of the towers' tensors in checkpoints, of both the hub's layout and that which
    transformers 5 saves."""
    tower_modules: tuple[str, ...]
    """The towers' modules and parameters in the model: they stay empty."""
    placeholders: Mapping[Modality, Placeholder]
    entrance: Entrance = Entrance.EMBEDDINGS
    config_field: str | None = None
    """The part of the checkpoint's config that belongs to the class."""
    unused_prefixes: tuple[str, ...] = ()
    """The beginnings of the names of tensors that neither side reads."""
    language_prefix: str = ""
    """What the checkpoint puts before the names that the class knows."""
    type_ids_argument: str | None = None
    """The argument that takes the marks of the placeholders."""
    sound_argument: str | None = None
    """The argument that says that videos of the prompt sound."""
    positions: type[Any] | None = None
    """What the model inherits its positions from, where those of transformers are not enough."""
    has_own_config: bool = False
    """transformers does not know the checkpoint's ``model_type``: the class's config is made of the fields of the
    checkpoint's."""
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Options of ``generate`` that the family needs."""

    def is_tower(self, tensor: str) -> bool:
        """The tensor of that name in a checkpoint belongs to a tower."""
        return tensor.startswith(self.tower_prefixes)

    def is_left_out(self, tensor: str) -> bool:
        """The tensor of that name is not the language model's."""
        return tensor.startswith((*self.tower_prefixes, *self.unused_prefixes))
