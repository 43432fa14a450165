"""The form in which vLLM takes an embedding: one matrix, deepstack levels beside each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from encoder_client import dtypes
from encoder_client.embedding import Embedding
from encoder_client.errors import ChunkError
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk

if TYPE_CHECKING:
    import torch


def width(chunk: EmbeddingChunk) -> int:
    """The width of the matrix whose column views the chunk's tensors are: H, or H · (1 + levels) with deepstack.

    Raises:
        ChunkError: they are not the columns of one row-major matrix, such as where sound lies beside a video.
    """
    column = 0
    first = chunk.tensors[0]
    row_bytes = first.strides[0]
    for tensor in chunk.tensors:
        size = dtypes.itemsize(tensor.dtype)
        aligned = (
            len(tensor.shape) == 2
            and tensor.dtype == first.dtype
            and tensor.shape[0] == chunk.token_count
            and tuple(tensor.strides) == (row_bytes, size)
            and tensor.byte_offset == column * size
        )
        if not aligned:
            raise ChunkError("tensors", f"{tensor.name} is not the next columns of the embedding, as vLLM takes it")
        column += tensor.shape[1]
    if column * dtypes.itemsize(first.dtype) != row_bytes:
        raise ChunkError("tensors", f"a row has {row_bytes} bytes, and its tensors {column} elements")
    return column


def matrix(embedding: Embedding) -> torch.Tensor:
    """All columns, as one view of shape (token_count, H · (1 + levels)) on the CPU, without a copy.

    Raises:
        ChunkError: see :func:`width`.
    """
    import torch

    chunk = embedding.chunk
    columns = width(chunk)
    dtype = dtypes.torch_dtype(chunk.tensors[0].dtype)
    flat = torch.frombuffer(embedding.slot.memory, dtype=dtype, count=chunk.token_count * columns)
    return flat.view(chunk.token_count, columns)
