"""Prompts with room for embeddings: expanded from LAYOUT, before the rows are there, and checked against them after."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from encoder_client.embedding import Embedding
from encoder_client.errors import EncoderClientError
from encoder_client.language.family import Entrance, Family, Placeholder, RowToken, Value
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, PlaceholderValue
from epd.encoder.v1.media_pb2 import Modality


class PlaceholderError(EncoderClientError):
    """Embeddings and placeholders do not fit together."""


@dataclass(frozen=True)
class Span:
    """The placeholders of one part. Other tokens may stand between them."""

    part_idx: int
    modality: Modality
    positions: tuple[int, ...]
    """Where each row goes; empty if the model attends to the rows and has no placeholders."""
    length: int
    """How many rows there are."""

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

    def row_token_id(self, place: Placeholder) -> int:
        """The token that one row of a modality fills."""
        token: int | None = getattr(self.config, place.token_id_field, None)
        if token is None:
            token = self.checkpoint.get(place.token_id_field)
        if token is None:
            raise PlaceholderError(f"the checkpoint's config has no {place.token_id_field}")
        return token

    def prompt_token(self, place: Placeholder) -> str:
        """The text that shows an item before expansion."""
        return place.shown_as or self.row_token(place).text

    def row_token(self, place: Placeholder) -> RowToken:
        """The token that rows fill, as text."""
        return RowToken(self.tokenizer.convert_ids_to_tokens(self.row_token_id(place)), self.config)


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
            pieces[2 * index + 1] = place.expand(vocabulary.row_token(place), chunk)
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
        positions = free[tokens[chunk.modality]]
        taken, positions[:] = tuple(positions[: chunk.token_count]), positions[chunk.token_count :]
        if len(taken) != chunk.token_count:
            raise PlaceholderError(f"part {chunk.part_idx} finds {len(taken)} of its {chunk.token_count} placeholders")
        spans.append(Span(chunk.part_idx, chunk.modality, taken, chunk.token_count))
    if left := sum(len(positions) for positions in free.values()):
        raise PlaceholderError(f"the prompt has {left} placeholder tokens more than the parts have rows")
    return tuple(spans)


def _values(parts: Sequence[EmbeddingChunk], family: Family) -> dict[str, torch.Tensor]:
    result: dict[str, list[torch.Tensor]] = {}
    for chunk in parts:
        place = family.placeholders[chunk.modality]
        for value in place.values:
            result.setdefault(value.argument, []).append(_tensor(_find(chunk, value)))
        if place.mel_frames_argument is not None:
            frames = torch.tensor([chunk.audio.mel_frames])
            result.setdefault(place.mel_frames_argument, []).append(frames)
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
    embeddings: Sequence[Embedding | torch.Tensor],
    width: int,
    dtype: torch.dtype,
    levels: int = 0,
) -> tuple[tuple[torch.Tensor, ...], ...]:
    """The rows for each placeholder, checked against it.

    Args:
        prompt: where they go.
        embeddings: one for each part, in any order; plain tensors, shape (rows, width · (1 + levels)), in the order of
            the parts.
        width: the width of the model's embeddings.
        dtype: their type.
        levels: the deepstack levels of images and videos.

    Returns:
        For each part in the order of the prompt its rows, then those of each deepstack level: shape (rows, width) each.

    Raises:
        PlaceholderError: rows, width or dtype are not what the placeholders take, or a part is missing.
    """
    by_part: dict[int, Embedding | torch.Tensor] = {}
    for index, embedding in enumerate(embeddings):
        part = embedding.chunk.part_idx if isinstance(embedding, Embedding) else index
        if part in by_part:
            raise PlaceholderError(f"part {part} is there twice")
        by_part[part] = embedding
    if missing := [span.part_idx for span in prompt.spans if span.part_idx not in by_part]:
        raise PlaceholderError(f"the embeddings of parts {missing} are missing")
    if len(by_part) > len(prompt.spans):
        raise PlaceholderError(f"{len(by_part)} embeddings are there for {len(prompt.spans)} placeholders")
    return tuple(_part_rows(span, by_part[span.part_idx], width, dtype, levels) for span in prompt.spans)


def _part_rows(
    span: Span, embedding: Embedding | torch.Tensor, width: int, dtype: torch.dtype, levels: int
) -> tuple[torch.Tensor, ...]:
    levels = 0 if span.modality == Modality.MODALITY_AUDIO else levels
    if isinstance(embedding, Embedding):
        names = ["embedding", *(f"deepstack_{level}" for level in range(levels))]
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
