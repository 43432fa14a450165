"""What the service asks of a model family.

An :class:`Adapter` is made from a checkpoint's configuration alone and is used in two processes: a media worker calls
``measure`` and ``prepare``; an engine calls ``load_tower`` and then :meth:`Tower.encode`. It knows nothing of slots,
leases or transports.

The life of an item here::

    file bytes ──media/──► MediaProbe (header only) ──measure──► Layout: grid, rows, input tensors, cost
                              │ decode                              │ space is granted by the front
                              ▼                                     ▼
                          pixels ────────────────────prepare──► model input in shared memory ──Tower.encode──► rows
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from epd.encoder.v1.embedding_pb2 import DataType, EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2 import WeightsInfo
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from epd.internal.v1.media_worker_pb2 import ModelInput

Progress = Callable[[str, float], None]
"""Called on long work with what is being done and how much of it is done, from 0 to 1."""


class MediaProbe(Protocol):
    """An item whose header was read. Implemented in ``media/``."""

    @property
    def width(self) -> int:
        """The upright width in pixels."""
        ...

    @property
    def height(self) -> int:
        """The upright height in pixels."""
        ...

    def decode(self) -> torch.Tensor:
        """The whole item: an image is uint8, shape (height, width, 3), RGB, upright.

        Raises:
            ServiceError: the file is truncated or corrupt.
        """
        ...


@dataclass(frozen=True)
class Layout:
    """What is known of an item before it is decoded."""

    chunk: EmbeddingChunk
    """Grid, token count, tensors, nbytes, placeholder metadata and media metadata; nothing else is set."""
    input: ModelInput
    """The tensors that the tower takes for this item, and its cost in patches."""


@dataclass(frozen=True)
class TowerInput:
    """One item of a batch."""

    modality: Modality
    grid: tuple[int, ...]
    """As ``grid_dim`` of its chunk."""
    tensors: tuple[torch.Tensor, ...]
    """The tensors of its :class:`ModelInput`, in that order, on the host."""


class Tower(Protocol):
    """The loaded towers of one checkpoint on one device."""

    @property
    def weights(self) -> WeightsInfo:
        """What was read of the checkpoint."""
        ...

    @property
    def compatibility_fingerprint(self) -> bytes:
        """32 bytes over weights, dtype, preprocessing and width."""
        ...

    def encode(self, items: Sequence[TowerInput]) -> list[torch.Tensor]:
        """Encodes a batch.

        Args:
            items: at least one, of any sizes, from any requests.

        Returns:
            For each item its rows: shape (token_count, width), in the tower's dtype, on its device. ``width`` is the
            hidden size, or H·(1+levels) with deepstack.
        """
        ...


class Adapter(Protocol):
    """One model family, configured by one checkpoint. Immutable."""

    @property
    def model_type(self) -> str:
        """The ``model_type`` of the checkpoint's config."""
        ...

    @property
    def modalities(self) -> tuple[Modality, ...]:
        """What it encodes."""
        ...

    @property
    def hidden_size(self) -> int:
        """The width of a row of ``embedding``."""
        ...

    @property
    def dtype(self) -> DataType:
        """The type of an embedding's elements."""
        ...

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of the tensors of a slot, ``embedding`` first."""
        ...

    def measure(self, item: MediaItem, probe: MediaProbe) -> Layout:
        """The shape of an item and what it needs, from its header and options.

        Raises:
            ServiceError: the item cannot be encoded by this family (modality, size, aspect ratio, options).
        """
        ...

    def prepare(self, item: MediaItem, media: torch.Tensor, layout: Layout, out: Sequence[torch.Tensor]) -> None:
        """Writes the model's input.

        Args:
            item: the item, with its options.
            media: what :meth:`MediaProbe.decode` gave.
            layout: what :meth:`measure` gave.
            out: one tensor for each of ``layout.input.tensors``, in shared memory.
        """
        ...

    def warm_up_input(self) -> TowerInput:
        """A small item for the first forward."""
        ...

    def load_tower(self, device: torch.device, progress: Progress) -> Tower:
        """Reads the towers' weights and nothing else.

        Raises:
            SetupError: a file or tensor is missing or has the wrong shape.
        """
        ...


AdapterFactory = Callable[[Path, torch.dtype], Adapter]
"""Makes an adapter from a checkpoint's folder and the dtype of the embeddings."""
