"""Torch views of tensors in shared memory, as a :class:`TensorSpec` describes them."""

from __future__ import annotations

import torch

from encoder_svc.shared_memory import SharedMemory
from epd.encoder.v1.embedding_pb2 import DataType, TensorSpec

TORCH_DTYPES: dict[DataType, torch.dtype] = {
    DataType.DATA_TYPE_FLOAT32: torch.float32,
    DataType.DATA_TYPE_FLOAT16: torch.float16,
    DataType.DATA_TYPE_BFLOAT16: torch.bfloat16,
    DataType.DATA_TYPE_INT64: torch.int64,
    DataType.DATA_TYPE_INT32: torch.int32,
    DataType.DATA_TYPE_UINT8: torch.uint8,
}


def tensor_view(memory: SharedMemory, base: int, spec: TensorSpec) -> torch.Tensor:
    """A view of one tensor, without a copy.

    Args:
        memory: the block.
        base: where the tensor's group (a slot's payload, an item's input) begins, in bytes from the start of the block.
        spec: the tensor; ``spec.byte_offset`` counts from ``base``.

    Returns:
        A tensor of ``spec``'s shape, strides and dtype that shares the block's memory.

    Raises:
        ValueError: the tensor does not lie inside the block, or its strides are no whole elements.
    """
    dtype = TORCH_DTYPES[spec.dtype]
    strides, rest = [], 0
    for stride in spec.strides:
        whole, part = divmod(stride, dtype.itemsize)
        strides.append(whole)
        rest |= part
    if rest or len(strides) != len(spec.shape):
        raise ValueError(f"strides {list(spec.strides)} do not fit shape {list(spec.shape)} of {dtype}")
    if 0 in spec.shape:
        return torch.empty(list(spec.shape), dtype=dtype)
    last = sum((size - 1) * stride for size, stride in zip(spec.shape, strides, strict=True))
    flat = torch.frombuffer(memory.view, dtype=dtype, count=last + 1, offset=base + spec.byte_offset)
    return flat.as_strided(list(spec.shape), strides)
