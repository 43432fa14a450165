"""The metadata of a prompt's parts in the flat forms that language sides take: those of Hugging Face's processors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from encoder_client.errors import PromptError
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, PlaceholderValue


@dataclass(frozen=True)
class VideoAudio:
    """The sound of all videos of a prompt, in its order; the rows are ``video_audio_embedding``.

    A unit is one temporal step of a video's grid.
    """

    video_audio_feature_lens: npt.NDArray[np.int64]
    """Shape (videos that have sound,): the rows of each whole sound track, before it is cut into units."""
    video_audio_segment_lens_flat: npt.NDArray[np.int64]
    """Shape (units of these videos,): the rows of each unit; 0 past the end of the track."""
    video_audio_per_video_num_units: npt.NDArray[np.int64]
    """Shape (videos,): the units of each video; 0 for a silent one, so that no sound moves to another video."""


def placeholder_metadata(parts: Sequence[EmbeddingChunk]) -> dict[str, npt.NDArray[Any]]:
    """Joins the placeholder metadata of parts of one modality.

    Returns:
        By name the values, items first: (3,) of one item is (items, 3), a scalar (items,), and what has a dimension for
        items already is joined along it. Integers are int64, numbers float64.

    Raises:
        PromptError: a name is missing in one part, which would move what follows to the wrong items; or shapes differ.
    """
    names = [[value.name for value in chunk.placeholder_metadata] for chunk in parts]
    for chunk, own in zip(parts, names, strict=True):
        if lacking := set().union(*names).difference(own):
            raise PromptError(
                f"part {chunk.part_idx} comes without {min(lacking)}, which others of its modality have; take all from "
                "encoders of one version"
            )
    joined: dict[str, npt.NDArray[Any]] = {}
    for name in names[0] if names else []:
        values = [_array(value) for chunk in parts for value in chunk.placeholder_metadata if value.name == name]
        try:
            joined[name] = values[0] if len(values) == 1 else np.concatenate(values)
        except ValueError:
            shapes = ", ".join(str(value.shape) for value in values)
            raise PromptError(f"{name} cannot be joined, its shapes are {shapes}; ask for each part's own") from None
    return joined


def video_audio(videos: Sequence[EmbeddingChunk]) -> VideoAudio | None:
    """Joins what videos tell of their sound.

    Returns:
        None if they are of a family that takes no sound with videos.

    Raises:
        PromptError: some tell, and others do not.
    """
    told = [chunk for chunk in videos if chunk.video.HasField("audio")]
    if not told:
        return None
    if len(told) < len(videos):
        silent = next(chunk.part_idx for chunk in videos if not chunk.video.HasField("audio"))
        raise PromptError(
            f"part {silent} does not tell whether it has sound, and other videos do; take all from encoders of one "
            "version"
        )
    sounds = [chunk.video.audio for chunk in videos]
    return VideoAudio(
        _int64(sound.video_audio_feature_lens for sound in sounds if sound.video_audio_feature_lens),
        _int64(length for sound in sounds for length in sound.video_audio_segment_lens_flat),
        _int64(sound.video_audio_per_video_num_units for sound in sounds),
    )


def _int64(values: Any) -> npt.NDArray[np.int64]:
    return np.fromiter(values, dtype=np.int64)


def _array(value: PlaceholderValue) -> npt.NDArray[Any]:
    """One item's value with a dimension for the items in front."""
    match value.WhichOneof("value"):
        case "ints":
            flat: npt.NDArray[Any] = np.array(value.ints.values, dtype=np.int64)
        case "doubles":
            flat = np.array(value.doubles.values, dtype=np.float64)
        case _:
            flat = np.array(value.strings.values, dtype=np.str_)
    shape = tuple(value.shape)
    return flat.reshape(shape if len(shape) > 1 or shape == (1,) else (1, *shape))
