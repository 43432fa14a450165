"""What must be true of the parts of one prompt beside each other, whichever encoders they come from."""

from __future__ import annotations

from collections.abc import Iterable

from encoder_client import dtypes
from encoder_client.errors import PromptError
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, TensorSpec
from epd.encoder.v1.media_pb2 import Modality

VIDEO_AUDIO = "video_audio_embedding"
"""The tensor that only videos with sound have."""


def check_same_part(chunk: EmbeddingChunk, known: EmbeddingChunk) -> None:
    """Checks that two chunks of a part, LAYOUT or READY, tell the same of it.

    Raises:
        PromptError: they do not.
    """
    part = chunk.part_idx
    if _other_content(chunk, known):
        raise PromptError(
            f"part {part} has two contents; send one media item, with one set of options, for each part_idx of a prompt"
        )
    if chunk.modality != known.modality:
        raise PromptError(f"part {part} is {_name(chunk.modality)}, and was {_name(known.modality)} before")
    bounds = [other for other in (chunk, known) if other.token_count_is_upper_bound]
    if bounds:
        exact = next((other for other in (chunk, known) if not other.token_count_is_upper_bound), None)
        if exact is not None and exact.token_count > bounds[0].token_count:
            raise PromptError(
                f"part {part} has {exact.token_count} rows, and LAYOUT told of {bounds[0].token_count} at most"
            )
        return
    for what, one, other in (
        ("token_count", chunk.token_count, known.token_count),
        ("grid_dim", list(chunk.grid_dim), list(known.grid_dim)),
        ("tensors", _tensors(chunk.tensors), _tensors(known.tensors)),
        ("placeholder_metadata", list(chunk.placeholder_metadata), list(known.placeholder_metadata)),
    ):
        if one != other:
            shown = "" if what == "placeholder_metadata" else f": {one}, and {other} before"
            raise PromptError(
                f"part {part} comes with another {what} than was told of it{shown}; take all from encoders of one "
                "model and version, and send one media item for each part_idx"
            )


def check_beside(chunk: EmbeddingChunk, others: Iterable[EmbeddingChunk]) -> None:
    """Checks that a part can stand in one prompt with others.

    Raises:
        PromptError: it cannot.
    """
    own = chunk.tensors[0]
    for other in others:
        if chunk.compatibility_fingerprint != other.compatibility_fingerprint:
            raise PromptError(
                f"parts {chunk.part_idx} and {other.part_idx} come from encoders that do not fit together (weights, "
                "dtype, preprocessing or width differ); send expected_fingerprint to have such an encoder refuse them"
            )
        first = other.tensors[0]
        if (own.dtype, own.shape[1]) != (first.dtype, first.shape[1]):
            raise PromptError(
                f"part {chunk.part_idx} is {dtypes.name(own.dtype)} of width {own.shape[1]}, and part {other.part_idx} "
                f"{dtypes.name(first.dtype)} of width {first.shape[1]}; start all encoders with one model and dtype"
            )
        if chunk.modality == other.modality and _columns(chunk) != _columns(other):
            raise PromptError(
                f"the tensors of parts {chunk.part_idx} and {other.part_idx}, both {_name(chunk.modality)}, differ: "
                f"{_columns(chunk)} and {_columns(other)}; take all from encoders of one version"
            )


def check_sound(chunk: EmbeddingChunk) -> None:
    """Checks that a video's sound has as many rows as its units say.

    Raises:
        PromptError: it has not.
    """
    sound = chunk.video.audio
    told = sum(sound.video_audio_segment_lens_flat)
    rows = sum(tensor.shape[0] for tensor in chunk.tensors if tensor.name == VIDEO_AUDIO)
    if told != rows or len(sound.video_audio_segment_lens_flat) != sound.video_audio_per_video_num_units:
        raise PromptError(
            f"part {chunk.part_idx} has {rows} rows of sound, and tells of {told} in "
            f"{len(sound.video_audio_segment_lens_flat)} of {sound.video_audio_per_video_num_units} units: its encoder "
            "contradicts itself"
        )


def _other_content(chunk: EmbeddingChunk, known: EmbeddingChunk) -> bool:
    # Rows of one content may differ in their last bits, by the batch that they were made in: the checksum decides only
    # where nothing else does.
    if chunk.content_key or known.content_key:
        return bool(chunk.content_key and known.content_key and chunk.content_key != known.content_key)
    return chunk.HasField("checksum") and known.HasField("checksum") and chunk.checksum != known.checksum


def _tensors(tensors: Iterable[TensorSpec]) -> list[tuple[str, str, tuple[int, ...]]]:
    # Not where they lie: the same rows may be packed in another way.
    return [(tensor.name, dtypes.name(tensor.dtype), tuple(tensor.shape)) for tensor in tensors]


def _columns(chunk: EmbeddingChunk) -> list[tuple[str, str, tuple[int, ...]]]:
    """The tensors without their rows, and without sound, which a silent video does not have."""
    return [(name, dtype, shape[1:]) for name, dtype, shape in _tensors(chunk.tensors) if name != VIDEO_AUDIO]


def _name(modality: Modality) -> str:
    return Modality.Name(modality).removeprefix("MODALITY_")
