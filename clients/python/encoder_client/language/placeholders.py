"""Prompts with room for embeddings: expanded from LAYOUT, before the rows are there, and checked against them after."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from encoder_client.embedding import Embedding
from encoder_client.errors import EncoderClientError
from encoder_client.language.family import ROWS, SOUND_ROWS, Entrance, Family, Placeholder, RowToken, Value, sound_rows
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, PlaceholderValue
from epd.encoder.v1.media_pb2 import Modality


class PlaceholderError(EncoderClientError):
    """Embeddings and placeholders do not fit together."""


Rows = Embedding | torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""What fills a part's placeholders: what was read; or its rows, and those of its sound if it is a video with sound."""


@dataclass(frozen=True)
class Span:
    """The placeholders of one tensor of a part. Other tokens may stand between them."""

    part_idx: int
    modality: Modality
    """The kind of the rows: those of a video's sound are sound."""
    positions: tuple[int, ...]
    """Where each row goes; empty if the model attends to the rows and has no placeholders."""
    length: int
    """How many rows there are."""
    tensor: str = ROWS
    """The tensor that the rows are of."""

    @property
    def start(self) -> int:
        """The position of the first token."""
        return self.positions[0] if self.positions else 0


@dataclass(frozen=True)
class ExpandedPrompt:
    """A prompt with one placeholder token for each row."""

    input_ids: torch.Tensor
    """Shape (1, tokens), int64."""
    mm_token_type_ids: torch.Tensor
    """Shape (1, tokens), int64: 0 text, else the mark of the placeholder's modality."""
    spans: tuple[Span, ...]
    """In the order of the prompt."""
    values: Mapping[str, torch.Tensor]
    """What the model needs beside the rows, such as ``image_grid_thw``, shape (images, 3)."""


@dataclass(frozen=True)
class Vocabulary:
    """What expansion needs to know of a checkpoint."""

    family: Family
    tokenizer: Any
    config: Any
    """Of the model that generates."""
    checkpoint: Mapping[str, Any]
    """``config.json``."""

    def token_id(self, field: str) -> int:
        """The token that a field of the config names."""
        token: int | None = getattr(self.config, field, None)
        for section in (None, self.family.config_field, "processor_config"):
            if token is None:
                token = (self.checkpoint if section is None else self.checkpoint.get(section, {})).get(field)
        if token is None:
            raise PlaceholderError(f"the checkpoint's config has no {field}")
        return token

    def row_token_id(self, place: Placeholder) -> int:
        """The token that one row of a modality fills."""
        return self.token_id(place.token_id_field)

    def text(self, field: str) -> str:
        """The token that a field of the config names, as the tokenizer reads it."""
        text: str = self.tokenizer.convert_ids_to_tokens(self.token_id(field))
        return text

    def prompt_token(self, place: Placeholder) -> str:
        """The text that shows an item before expansion."""
        return place.shown_as or self.text(place.token_id_field)

    def row_token(self, place: Placeholder, number: int = 0) -> RowToken:
        """The token that rows fill, as text, for the part of some number among those of its modality."""
        marks = {name: self.text(name) for name in place.marks}
        return RowToken(self.text(place.token_id_field), self.config, marks, number)


def expand(prompt: str, layouts: Sequence[EmbeddingChunk], vocabulary: Vocabulary) -> ExpandedPrompt:
    """Puts as many placeholder tokens into a prompt as each part has rows, and what the family writes around them.

    Args:
        prompt: text with one placeholder for each part.
        layouts: LAYOUT or READY of each part, in any order; by ``part_idx`` they stand in the order of the prompt.
        vocabulary: the checkpoint's.

    Raises:
        PlaceholderError: there are more or fewer parts than placeholders, of another modality, or LAYOUTs are missing.
    """
    parts = sorted(layouts, key=lambda chunk: chunk.part_idx)
    if [chunk.part_idx for chunk in parts] != list(range(len(parts))):
        raise PlaceholderError(f"parts {[chunk.part_idx for chunk in parts]} are there; every part is needed once")
    family = vocabulary.family
    if family.entrance is Entrance.CROSS_ATTENTION:
        return _attended(prompt, parts, vocabulary)
    # Expanded as text, as processors do it: a tokenizer may join what stands around a placeholder.
    ids: list[int] = vocabulary.tokenizer(_expanded_text(prompt, parts, vocabulary), add_special_tokens=False)[
        "input_ids"
    ]
    spans = _spans(ids, parts, vocabulary)
    marks = torch.zeros(1, len(ids), dtype=torch.int64)
    for span in spans:
        marks[0, list(span.positions)] = family.placeholders[span.modality].type_id
    return ExpandedPrompt(torch.tensor([ids]), marks, spans, _values(parts, family))


def _attended(prompt: str, parts: Sequence[EmbeddingChunk], vocabulary: Vocabulary) -> ExpandedPrompt:
    if len(parts) != 1 or parts[0].modality not in vocabulary.family.placeholders:
        kinds = ", ".join(_name(chunk.modality) for chunk in parts)
        raise PlaceholderError(f"this model takes one part at a time, {_kinds(vocabulary.family)}; given: {kinds}")
    ids = vocabulary.tokenizer(prompt, add_special_tokens=False)["input_ids"]
    span = Span(0, parts[0].modality, (), parts[0].token_count)
    return ExpandedPrompt(torch.tensor([ids]), torch.zeros(1, len(ids), dtype=torch.int64), (span,), {})


def _expanded_text(prompt: str, parts: Sequence[EmbeddingChunk], vocabulary: Vocabulary) -> str:
    places = vocabulary.family.placeholders
    by_text = {vocabulary.prompt_token(place): modality for modality, place in places.items()}
    pieces = re.split("(" + "|".join(re.escape(text) for text in by_text) + ")", prompt)
    found = pieces[1::2]
    if len(found) > len(parts):
        raise PlaceholderError(f"the prompt has more placeholders than the {len(parts)} parts that are there")
    for index, (text, chunk) in enumerate(zip(found, parts, strict=False)):
        if by_text[text] != chunk.modality:
            raise PlaceholderError(
                f"placeholder {index} is for {_name(by_text[text])}, and part {chunk.part_idx} is "
                f"{_name(chunk.modality)}"
            )
        place = places[by_text[text]]
        try:
            number = found[:index].count(text)
            pieces[2 * index + 1] = place.expand(vocabulary.row_token(place, number), chunk)
        except ValueError as error:
            raise PlaceholderError(f"part {chunk.part_idx} comes without {error}") from None
    if len(found) < len(parts):
        raise PlaceholderError(f"the prompt has {len(found)} placeholders for {len(parts)} parts")
    return "".join(pieces)


def _spans(ids: Sequence[int], parts: Sequence[EmbeddingChunk], vocabulary: Vocabulary) -> tuple[Span, ...]:
    places = vocabulary.family.placeholders
    tokens = {modality: vocabulary.row_token_id(place) for modality, place in places.items()}
    free: dict[int, list[int]] = {token: [] for token in tokens.values()}
    for position, token in enumerate(ids):
        if token in free:
            free[token].append(position)
    spans: list[Span] = []
    for chunk in parts:
        place = places[chunk.modality]
        wanted = [(chunk.modality, tokens[chunk.modality], chunk.token_count, ROWS)]
        if sound := sound_rows(chunk):
            if place.sound_row_field is None:
                raise PlaceholderError(f"part {chunk.part_idx} has sound, which this model's videos do not")
            token = vocabulary.token_id(place.sound_row_field)
            wanted.append((Modality.MODALITY_AUDIO, token, sound, SOUND_ROWS))
        for modality, token, count, tensor in wanted:
            positions = free[token]
            taken, positions[:] = tuple(positions[:count]), positions[count:]
            if len(taken) != count:
                raise PlaceholderError(f"part {chunk.part_idx} finds {len(taken)} of its {count} placeholders")
            spans.append(Span(chunk.part_idx, modality, taken, count, tensor))
    if left := sum(len(positions) for positions in free.values()):
        raise PlaceholderError(f"the prompt has {left} placeholder tokens more than the parts have rows")
    return tuple(spans)


def _values(parts: Sequence[EmbeddingChunk], family: Family) -> dict[str, torch.Tensor]:
    result: dict[str, list[torch.Tensor]] = {}
    for chunk in parts:
        place = family.placeholders[chunk.modality]
        for value in place.values:
            result.setdefault(value.argument, []).append(_tensor(_find(chunk, value)))
        if place.mel_frames_argument is None:
            continue
        if chunk.modality == Modality.MODALITY_AUDIO:
            result.setdefault(place.mel_frames_argument, []).append(torch.tensor([chunk.audio.mel_frames]))
        elif sound_rows(chunk):
            frames = _find(chunk, Value(place.mel_frames_argument, ("audio_feature_lengths",)))
            result.setdefault(place.mel_frames_argument, []).append(_tensor(frames))
    return {name: torch.cat(values) for name, values in result.items()}


def _find(chunk: EmbeddingChunk, value: Value) -> PlaceholderValue:
    given = {found.name: found for found in chunk.placeholder_metadata}
    for name in value.names:
        if name in given:
            return given[name]
    raise PlaceholderError(f"part {chunk.part_idx} comes without {value.names[0]}, which the model needs")


def _tensor(value: PlaceholderValue) -> torch.Tensor:
    """The value with a dimension for the items in front, of one item: shape (1, ...), or (1,) for a scalar."""
    shape = tuple(value.shape)
    if value.WhichOneof("value") == "ints":
        flat = torch.tensor(list(value.ints.values), dtype=torch.int64)
    elif value.WhichOneof("value") == "doubles":
        flat = torch.tensor(list(value.doubles.values), dtype=torch.float64)
    else:
        raise PlaceholderError(f"the value of {value.name} is not made of numbers")
    return flat.reshape(shape if len(shape) > 1 or shape == (1,) else (1, *shape))


def rows_of(
    prompt: ExpandedPrompt,
    embeddings: Sequence[Rows],
    width: int,
    dtype: torch.dtype,
    levels: int = 0,
) -> tuple[tuple[torch.Tensor, ...], ...]:
    """The rows for each placeholder, checked against it.

    Args:
        prompt: where they go.
        embeddings: one for each part, in any order; plain tensors, shape (rows, width · (1 + levels)), in the order of
            the parts. A plain video with sound is two, the second of shape (rows of sound, width).
        width: the width of the model's embeddings.
        dtype: their type.
        levels: the deepstack levels of images and videos.

    Returns:
        For each span in the order of the prompt its rows, then those of each deepstack level: shape (rows, width) each.

    Raises:
        PlaceholderError: rows, width or dtype are not what the placeholders take, or a part is missing.
    """
    by_part: dict[int, Rows] = {}
    for index, embedding in enumerate(embeddings):
        part = embedding.chunk.part_idx if isinstance(embedding, Embedding) else index
        if part in by_part:
            raise PlaceholderError(f"part {part} is there twice")
        by_part[part] = embedding
    if missing := [span.part_idx for span in prompt.spans if span.part_idx not in by_part]:
        raise PlaceholderError(f"the embeddings of parts {missing} are missing")
    parts = {span.part_idx for span in prompt.spans}
    if len(by_part) > len(parts):
        raise PlaceholderError(f"{len(by_part)} embeddings are there for {len(parts)} placeholders")
    return tuple(_part_rows(span, by_part[span.part_idx], width, dtype, levels) for span in prompt.spans)


def _part_rows(span: Span, embedding: Rows, width: int, dtype: torch.dtype, levels: int) -> tuple[torch.Tensor, ...]:
    levels = 0 if span.modality == Modality.MODALITY_AUDIO else levels
    if isinstance(embedding, tuple):
        embedding = embedding[span.tensor == SOUND_ROWS]
    elif isinstance(embedding, torch.Tensor) and span.tensor == SOUND_ROWS:
        raise PlaceholderError(f"part {span.part_idx} comes without the rows of its sound")
    if isinstance(embedding, Embedding):
        names = [span.tensor, *(f"deepstack_{level}" for level in range(levels))]
        if lacking := set(names) - set(embedding.names):
            raise PlaceholderError(f"part {span.part_idx} comes without {min(lacking)}, which the model needs")
        matrices = tuple(embedding.torch(name) for name in names)
    elif embedding.shape[-1] == width * (1 + levels):
        matrices = embedding.split(width, dim=-1)
    else:
        matrices = (embedding,)
    for rows in matrices:
        if len(matrices) != 1 + levels or tuple(rows.shape) != (span.length, width):
            raise PlaceholderError(
                f"part {span.part_idx} has shape {tuple(rows.shape)}, its placeholders take "
                f"({span.length}, {width * (1 + levels)})"
            )
        if rows.dtype != dtype:
            raise PlaceholderError(
                f"part {span.part_idx} is {rows.dtype}, and the language model {dtype}; load it with that dtype, or "
                "start the encoder with this one"
            )
    return matrices


def _name(modality: Modality) -> str:
    return Modality.Name(modality).removeprefix("MODALITY_")


def _kinds(family: Family) -> str:
    return " or ".join(_name(modality) for modality in family.placeholders)
