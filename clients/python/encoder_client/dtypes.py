"""The element types of the contract, in NumPy and torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from epd.encoder.v1.embedding_pb2 import DataType

if TYPE_CHECKING:
    import torch

_SIZES = {
    DataType.DATA_TYPE_FLOAT32: 4,
    DataType.DATA_TYPE_FLOAT16: 2,
    DataType.DATA_TYPE_BFLOAT16: 2,
    DataType.DATA_TYPE_INT64: 8,
    DataType.DATA_TYPE_INT32: 4,
}

_NUMPY: dict[int, np.dtype[Any]] = {
    DataType.DATA_TYPE_FLOAT32: np.dtype("<f4"),
    DataType.DATA_TYPE_FLOAT16: np.dtype("<f2"),
    DataType.DATA_TYPE_INT64: np.dtype("<i8"),
    DataType.DATA_TYPE_INT32: np.dtype("<i4"),
}

_NAMES = {
    DataType.DATA_TYPE_FLOAT32: "float32",
    DataType.DATA_TYPE_FLOAT16: "float16",
    DataType.DATA_TYPE_BFLOAT16: "bfloat16",
    DataType.DATA_TYPE_INT64: "int64",
    DataType.DATA_TYPE_INT32: "int32",
}


def is_known(dtype: int) -> bool:
    """This library can view elements of the type."""
    return dtype in _SIZES


def itemsize(dtype: DataType) -> int:
    """Bytes of one element."""
    return _SIZES[dtype]


def name(dtype: DataType) -> str:
    """The name that NumPy and torch share, such as ``bfloat16``."""
    return _NAMES.get(dtype, f"data type {int(dtype)}")


def numpy_dtype(dtype: DataType) -> np.dtype[Any]:
    """The NumPy type. bfloat16 is ``ml_dtypes.bfloat16`` if that package is installed, else ``uint16`` (the bits)."""
    if dtype != DataType.DATA_TYPE_BFLOAT16:
        return _NUMPY[dtype]
    try:
        import ml_dtypes
    except ImportError:
        return np.dtype("<u2")
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


def torch_dtype(dtype: DataType) -> torch.dtype:
    """The torch type."""
    import torch

    found = getattr(torch, _NAMES[dtype])
    assert isinstance(found, torch.dtype)
    return found
