"""Prompts with room for embeddings: expanded from LAYOUT, before the rows are there, and checked against them after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from encoder_client.embedding import Embedding
from encoder_client.errors import EncoderClientError
from encoder_client.language.families import Family, Placeholder
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, PlaceholderValue
from epd.encoder.v1.media_pb2 import Modality


class PlaceholderError(EncoderClientError):
    """Embeddings and placeholders do not fit together."""


@dataclass(frozen=True)
class Span:
    """The placeholders of one part."""

    part_idx: int
    modality: Modality
    start: int
    """The position of the first token."""
    length: int
    """How many tokens, and rows."""


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


def expand(token_ids: Sequence[int], layouts: Sequence[EmbeddingChunk], family: Family, config: Any) -> ExpandedPrompt:
    """Puts as many placeholder tokens into a prompt as each part has rows.

    Args:
        token_ids: the prompt, with one placeholder token for each part.
        layouts: LAYOUT or READY of each part, in any order; by ``part_idx`` they stand in the order of the prompt.
        family: the model's family.
        config: the checkpoint's config.

    Raises:
        PlaceholderError: there are more or fewer parts than placeholders, of another modality, or LAYOUTs are missing.
    """
    parts = sorted(layouts, key=lambda chunk: chunk.part_idx)
    if [chunk.part_idx for chunk in parts] != list(range(len(parts))):
        raise PlaceholderError(f"parts {[chunk.part_idx for chunk in parts]} are there; every part is needed once")
    by_token = {getattr(config, place.token_id_field): modality for modality, place in family.placeholders.items()}
    ids: list[int] = []
    marks: list[int] = []
    spans: list[Span] = []
    for token in token_ids:
        modality = by_token.get(token)
        if modality is None:
            ids.append(token)
            marks.append(0)
            continue
        if len(spans) == len(parts):
            raise PlaceholderError(f"the prompt has more placeholders than the {len(parts)} parts that are there")
        chunk = parts[len(spans)]
        if chunk.modality != modality:
            wanted, given = (Modality.Name(kind).removeprefix("MODALITY_") for kind in (modality, chunk.modality))
            raise PlaceholderError(f"placeholder {len(spans)} is for {wanted}, and part {chunk.part_idx} is {given}")
        spans.append(Span(chunk.part_idx, modality, len(ids), chunk.token_count))
        ids += [token] * chunk.token_count
        marks += [family.placeholders[modality].type_id] * chunk.token_count
    if len(spans) < len(parts):
        raise PlaceholderError(f"the prompt has {len(spans)} placeholders for {len(parts)} parts")
    return ExpandedPrompt(
        input_ids=torch.tensor([ids]),
        mm_token_type_ids=torch.tensor([marks]),
        spans=tuple(spans),
        values=_values(parts, family),
    )


def _values(parts: Sequence[EmbeddingChunk], family: Family) -> dict[str, torch.Tensor]:
    result: dict[str, list[torch.Tensor]] = {}
    for chunk in parts:
        place: Placeholder = family.placeholders[chunk.modality]
        given = {value.name: value for value in chunk.placeholder_metadata}
        for name in place.values:
            if name not in given:
                raise PlaceholderError(f"part {chunk.part_idx} comes without {name}, which the model needs")
            result.setdefault(name, []).append(_tensor(given[name]))
    return {name: torch.cat(values) for name, values in result.items()}


def _tensor(value: PlaceholderValue) -> torch.Tensor:
    """The value with a dimension for the items in front: shape (1, ...) for one item."""
    shape = tuple(value.shape)
    if value.WhichOneof("value") == "ints":
        flat = torch.tensor(list(value.ints.values), dtype=torch.int64)
    elif value.WhichOneof("value") == "doubles":
        flat = torch.tensor(list(value.doubles.values), dtype=torch.float64)
    else:
        raise PlaceholderError(f"the value of {value.name} is not made of numbers")
    return flat.reshape(shape if len(shape) > 1 else (1, *shape))


def rows_of(
    prompt: ExpandedPrompt, embeddings: Sequence[Embedding | torch.Tensor], width: int, dtype: torch.dtype
) -> dict[Modality, tuple[torch.Tensor, ...]]:
    """The rows for each placeholder, checked against it.

    Args:
        prompt: where they go.
        embeddings: one for each part, in any order; plain tensors, shape (rows, width), in the order of the parts.
        width: the width of the model's embeddings.
        dtype: their type.

    Returns:
        For each modality its parts' rows in the order of the prompt, shape (rows, width) each.

    Raises:
        PlaceholderError: rows, width or dtype are not what the placeholders take, or a part is missing.
    """
    by_part: dict[int, torch.Tensor] = {}
    for index, embedding in enumerate(embeddings):
        part = embedding.chunk.part_idx if isinstance(embedding, Embedding) else index
        if part in by_part:
            raise PlaceholderError(f"part {part} is there twice")
        by_part[part] = embedding.torch() if isinstance(embedding, Embedding) else embedding
    if missing := [span.part_idx for span in prompt.spans if span.part_idx not in by_part]:
        raise PlaceholderError(f"the embeddings of parts {missing} are missing")
    if len(by_part) > len(prompt.spans):
        raise PlaceholderError(f"{len(by_part)} embeddings are there for {len(prompt.spans)} placeholders")
    result: dict[Modality, tuple[torch.Tensor, ...]] = {}
    for span in prompt.spans:
        rows = by_part[span.part_idx]
        if tuple(rows.shape) != (span.length, width):
            raise PlaceholderError(
                f"part {span.part_idx} has shape {tuple(rows.shape)}, its placeholders take ({span.length}, {width})"
            )
        if rows.dtype != dtype:
            raise PlaceholderError(
                f"part {span.part_idx} is {rows.dtype}, and the language model {dtype}; load it with that dtype, or "
                "start the encoder with this one"
            )
        result[span.modality] = (*result.get(span.modality, ()), rows)
    return result
