"""One part's embedding in the receiver's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from encoder_client import dtypes
from encoder_client.pool.embedding_pool import Slot
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, TensorSpec

if TYPE_CHECKING:
    import torch


class Embedding:
    """The rows of one media item, checked, in the receiver's pool.

    Views share the pool's memory and keep it: the space goes back when this object (or :meth:`release`) and all views
    are gone. They are writable, but nobody else reads what is written.

    Args:
        chunk: the READY chunk it was read by.
        slot: the bytes, ``chunk.nbytes`` of them.
        transport: how they came, such as ``mooncake``.
        seconds: how long the read took, from the first byte asked for to the checksum.

    Example:
        >>> embedding = await client.read(chunk)
        >>> rows = embedding.torch()  # (token_count, width), no copy
    """

    def __init__(self, chunk: EmbeddingChunk, slot: Slot, transport: str, seconds: float) -> None:
        self.chunk = chunk
        self.transport = transport
        self.read_seconds = seconds
        self._slot: Slot | None = slot

    @property
    def nbytes(self) -> int:
        """The bytes that were read."""
        return self.chunk.nbytes

    @property
    def slot(self) -> Slot:
        """The bytes.

        Raises:
            ValueError: the embedding was released.
        """
        if self._slot is None:
            raise ValueError("the embedding was released")
        return self._slot

    @property
    def intact(self) -> bool:
        """Its bytes are what was read. Always so, but for an embedding in place."""
        return True

    @property
    def grid(self) -> tuple[int, ...]:
        """The size of the item's grid before merging, in patches: (t, h, w) for most vision towers."""
        return tuple(self.chunk.grid_dim)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors that it holds, ``embedding`` first."""
        return tuple(tensor.name for tensor in self.chunk.tensors)

    def numpy(self, name: str = "embedding") -> npt.NDArray[Any]:
        """A NumPy view, without a copy.

        Args:
            name: one of :attr:`names`.

        Returns:
            For ``embedding`` shape (token_count, width). bfloat16 comes as ``ml_dtypes.bfloat16`` if that package is
            installed, else as ``uint16`` holding the bits.

        Raises:
            KeyError: there is no such tensor.
            ValueError: the embedding was released.
        """
        spec, slot = self._tensor(name)
        return np.ndarray(
            tuple(spec.shape),
            dtypes.numpy_dtype(spec.dtype),
            buffer=slot.view,
            offset=spec.byte_offset,
            strides=tuple(spec.strides),
        )

    def torch(self, name: str = "embedding") -> torch.Tensor:
        """A torch view on the CPU, without a copy; needs the extra ``torch``.

        Args:
            name: one of :attr:`names`.

        Returns:
            For ``embedding`` shape (token_count, width).

        Raises:
            KeyError: there is no such tensor.
            ValueError: the embedding was released.
        """
        import torch

        spec, slot = self._tensor(name)
        size = dtypes.itemsize(spec.dtype)
        flat = torch.frombuffer(
            slot.memory, dtype=dtypes.torch_dtype(spec.dtype), offset=spec.byte_offset,
            count=(slot.nbytes - spec.byte_offset) // size,
        )  # fmt: skip
        return flat.as_strided(tuple(spec.shape), tuple(stride // size for stride in spec.strides))

    def release(self) -> None:
        """Lets go of the memory: the space goes back to the pool as soon as no view is alive. Idempotent."""
        self._slot = None

    def _tensor(self, name: str) -> tuple[TensorSpec, Slot]:
        slot = self.slot
        for tensor in self.chunk.tensors:
            if tensor.name == name:
                return tensor, slot
        raise KeyError(f"there is no tensor {name!r}; there are {', '.join(self.names)}")

    def __repr__(self) -> str:
        shapes = ", ".join(f"{t.name} {tuple(t.shape)} {dtypes.name(t.dtype)}" for t in self.chunk.tensors)
        return f"<Embedding part {self.chunk.part_idx} of {self.chunk.prompt_id!r}: {shapes}, by {self.transport}>"
