"""The sound of a video as a second tower's share of the item: an input and a matrix of its own behind the pictures'.

Slot and input, each aligned to :data:`~encoder_svc.models.adapter.MATRIX_ALIGNMENT`::

    slot   │ embedding (and deepstack columns) │ video_audio_embedding │
    input  │ patches │ features │ what else the tower takes of it │
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from encoder_svc.models.adapter import MATRIX_ALIGNMENT, Layout
from encoder_svc.models.audio_family import PreparedSound
from encoder_svc.models.dtypes import DATA_TYPES, ELEMENT_BYTES
from epd.encoder.v1.embedding_pb2 import DataType, TensorSpec, VideoAudioMetadata
from epd.encoder.v1.media_pb2 import MediaItem
from epd.internal.v1.media_worker_pb2 import ModelInput
from epd.internal.v1.media_worker_pb2 import Tower as TowerName

TENSOR_NAME = "video_audio_embedding"

_DATA_TYPES = {torch.float32: DataType.DATA_TYPE_FLOAT32, torch.int64: DataType.DATA_TYPE_INT64}


def without_sound(item: MediaItem) -> MediaItem:
    """A video item as one whose sound nobody asked for, for those who look at its pictures."""
    seen = MediaItem()
    seen.CopyFrom(item)
    if item.WhichOneof("options") == "video":
        seen.video.use_audio_in_video = False
    return seen


def tell_sound(layout: Layout, rows: int, unit_lengths: Sequence[int]) -> None:
    """Writes a video's sound into the metadata of its chunk, all zeros for a silent one.

    Args:
        layout: of the pictures; its chunk is changed.
        rows: of the whole track.
        unit_lengths: rows that each temporal step of the grid shows; empty if the video is silent.
    """
    layout.chunk.video.audio.CopyFrom(
        VideoAudioMetadata(
            video_audio_feature_lens=rows,
            video_audio_segment_lens_flat=unit_lengths,
            video_audio_per_video_num_units=len(unit_lengths),
        )
    )


def add_sound(
    layout: Layout, sound: PreparedSound, rows: int, hidden_size: int, dtype: str, more: Sequence[torch.Tensor] = ()
) -> Layout:
    """Adds the second matrix, and the input of the tower that makes it.

    Args:
        layout: of the pictures; its messages are changed.
        sound: the track.
        rows: that the matrix has, at least one.
        hidden_size: of a row.
        dtype: of a row, as torch names it.
        more: what the tower takes beside the features.

    Returns:
        The layout of the whole item; ``prepared`` has what the second tower takes.
    """
    element, chunk = ELEMENT_BYTES[dtype], layout.chunk
    begin = _align(chunk.nbytes)
    chunk.tensors.append(
        TensorSpec(
            name=TENSOR_NAME,
            dtype=DATA_TYPES[dtype],
            shape=(rows, hidden_size),
            strides=(hidden_size * element, element),
            byte_offset=begin,
        )
    )
    chunk.nbytes = begin + rows * hidden_size * element
    layout.input.matrices = 1
    tensors = (sound.features, *more)
    taken = ModelInput(
        nbytes=layout.input.nbytes,
        patches=sound.frames,
        tower=TowerName.TOWER_AUDIO,
        matrices=1,
        grid_dim=(sound.frames,),
    )
    for name, tensor in zip(("features", "shown"), tensors, strict=False):
        offset = _align(taken.nbytes)
        taken.tensors.append(
            TensorSpec(
                name=name,
                dtype=_DATA_TYPES[tensor.dtype],
                shape=tensor.shape,
                strides=[stride * tensor.itemsize for stride in tensor.contiguous().stride()],
                byte_offset=offset,
            )
        )
        taken.nbytes = offset + tensor.nbytes
    return replace(layout, sound_input=taken, prepared=tensors)


def _align(offset: int) -> int:
    return -(-offset // MATRIX_ALIGNMENT) * MATRIX_ALIGNMENT
