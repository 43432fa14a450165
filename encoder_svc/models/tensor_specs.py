"""Where the tensors of a slot or of a tower's input lie, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence

from encoder_svc.models.adapter import MATRIX_ALIGNMENT
from epd.encoder.v1.embedding_pb2 import DataType, EmbeddingChunk
from epd.internal.v1.media_worker_pb2 import ModelInput


def append_tensor(
    to: EmbeddingChunk | ModelInput, name: str, dtype: DataType, element_bytes: int, shape: Sequence[int]
) -> None:
    """Adds a row-major tensor behind those that are there."""
    offset = -(-to.nbytes // MATRIX_ALIGNMENT) * MATRIX_ALIGNMENT
    strides: list[int] = []
    size = element_bytes
    for length in reversed(shape):
        strides.insert(0, size)
        size *= length
    to.tensors.add(name=name, dtype=dtype, shape=shape, strides=strides, byte_offset=offset)
    to.nbytes = offset + size
