"""What the service asks of a model family.

An :class:`Adapter` is made from a checkpoint's configuration alone and is used in two processes: a media worker calls
``measure`` and ``prepare``; an engine calls ``load_tower`` and then :meth:`Tower.encode`. It knows nothing of slots,
leases or transports.

The life of an item here::

    file bytes ──media/──► MediaProbe ──measure──► Layout: grid, rows, input tensors, cost
                               │                      │ the front grants space
                               └──prepare──► model input ──► shared memory ──Tower.encode──► rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from epd.encoder.v1.embedding_pb2 import DataType, EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2 import WeightsInfo
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from epd.internal.v1.media_worker_pb2 import ModelInput
from epd.internal.v1.media_worker_pb2 import Tower as TowerName

MATRIX_ALIGNMENT = 64
"""Where a second matrix of a slot begins: the next multiple of so many bytes behind the first."""

Progress = Callable[[str, float], None]
"""Called on long work with what is being done and how much of it is done, from 0 to 1."""


class ImageProbe(Protocol):
    """A still image whose header was read. Implemented in ``media/``, as are the other probes."""

    @property
    def width(self) -> int:
        """The upright width in pixels."""
        ...

    @property
    def height(self) -> int:
        """The upright height in pixels."""
        ...

    def decode(self) -> torch.Tensor:
        """The pixels: uint8, shape (height, width, 3), RGB, upright.

        Raises:
            ServiceError: the file is truncated or corrupt.
        """
        ...


class AudioProbe(Protocol):
    """A sound track whose header was read."""

    @property
    def source_sampling_rate(self) -> int:
        """Samples a second of the file."""
        ...

    @property
    def source_channels(self) -> int:
        """Channels of the file."""
        ...

    def waveform(self, sampling_rate: int) -> torch.Tensor:
        """The sound as one channel, the mean of all, decoded once.

        Args:
            sampling_rate: in hertz; the sound is resampled to it.

        Returns:
            float32, shape (samples,), from -1 to 1.

        Raises:
            ServiceError: the file is truncated, corrupt or longer than is allowed.
        """
        ...


class VideoProbe(Protocol):
    """A video whose frames were counted, but not decoded."""

    @property
    def width(self) -> int:
        """The upright width in pixels."""
        ...

    @property
    def height(self) -> int:
        """The upright height in pixels."""
        ...

    @property
    def frame_times(self) -> Sequence[float]:
        """When each frame of the asked span is shown, in seconds from the first of them; ascending, at least one."""
        ...

    @property
    def fps(self) -> float:
        """Frames a second: of the whole file on average, as the file says."""
        ...

    @property
    def duration(self) -> float:
        """Seconds of the asked span."""
        ...

    def frames(self, indices: Sequence[int]) -> Iterator[torch.Tensor]:
        """Decodes frames, one at a time.

        Args:
            indices: into :attr:`frame_times`, ascending; one may stand there more than once.

        Yields:
            For each index its frame: uint8, shape (height, width, 3), RGB, upright.

        Raises:
            ServiceError: the file is truncated or corrupt.
        """
        ...

    @property
    def audio(self) -> AudioProbe | None:
        """Its sound track; None: it has none."""
        ...


MediaProbe = ImageProbe | VideoProbe | AudioProbe
"""Which one an item has, its modality says."""


@dataclass(frozen=True)
class Layout:
    """What is known of an item before it is decoded."""

    chunk: EmbeddingChunk
    """Grid, token count, tensors, nbytes, placeholder metadata and media metadata; nothing else is set."""
    input: ModelInput
    """The tensors that the tower takes for this item, which tower that is, and the item's cost in patches."""
    frames: tuple[int, ...] = ()
    """The frames of a video that the model looks at: indices into ``VideoProbe.frame_times``."""
    prepared: tuple[torch.Tensor, ...] = ()
    """The model's input, or the sound's, where it had to be made in order to measure it."""
    sound_input: ModelInput | None = None
    """What the audio tower takes of a video's sound, behind ``input``. None: the item is one tower's work."""

    @property
    def inputs(self) -> tuple[ModelInput, ...]:
        """One for each tower, in the order of the matrices that they make."""
        return (self.input,) if self.sound_input is None else (self.input, self.sound_input)


@dataclass(frozen=True)
class TowerInput:
    """One item of a batch."""

    modality: Modality
    """Of what the tower sees: a video's sound is sound."""
    grid: tuple[int, ...]
    """As ``grid_dim`` of its chunk; (mel frames) of a video's sound."""
    tensors: tuple[torch.Tensor, ...]
    """The tensors of its :class:`ModelInput`, in that order, on the host."""


@dataclass(frozen=True)
class WarmUp:
    """A small item: for the first forward, and to find out how much of a batch a device gains from."""

    item: TowerInput
    tower: TowerName
    """Which of the model's towers takes it."""
    cost: int
    """In patches, or in mel frames for audio."""


class Tower(Protocol):
    """The loaded towers of one checkpoint on one device: a model's vision and audio encoders together."""

    @property
    def weights(self) -> WeightsInfo:
        """What was read of the checkpoint."""
        ...

    @property
    def compatibility_fingerprint(self) -> bytes:
        """32 bytes over weights, dtype, preprocessing and width."""
        ...

    def encode(self, items: Sequence[TowerInput]) -> list[tuple[torch.Tensor, ...]]:
        """Encodes a batch.

        Args:
            items: at least one, all of one tower, of any sizes, from any requests.

        Returns:
            For each item its matrices, as they follow one another in its slot, in the tower's dtype, on its device.
            The first has the rows: shape (token_count, width), where ``width`` is the hidden size, or H·(1+levels) with
            deepstack. Of a video's sound it is the one matrix of the rows that are kept.
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
        """The names of the tensors that a slot may have, ``embedding`` first."""
        ...

    def measure(self, item: MediaItem, probe: MediaProbe) -> Layout:
        """The shape of an item and what it needs, from its probe and options.

        Raises:
            ServiceError: the item cannot be encoded by this family (modality, size, aspect ratio, options).
        """
        ...

    def prepare(self, item: MediaItem, probe: MediaProbe, layout: Layout) -> Sequence[torch.Tensor]:
        """Decodes an item and makes the model's input of it. Runs while the front looks for space.

        Args:
            item: the item, with its options.
            probe: what was measured.
            layout: what :meth:`measure` gave.

        Returns:
            The tensors that ``layout.inputs`` promise, in that order.

        Raises:
            ServiceError: the file is truncated or corrupt.
        """
        ...

    def warm_up(self) -> WarmUp:
        """A small item for the first forward."""
        ...

    def load_tower(self, device: torch.device, progress: Progress) -> Tower:
        """Reads the towers' weights and nothing else.

        Raises:
            SetupError: a file or tensor is missing or has the wrong shape.
        """
        ...


class AdapterFactory(Protocol):
    """Makes an adapter from a checkpoint's folder and the dtype of the embeddings."""

    def __call__(self, path: Path, dtype: torch.dtype, /, **options: str) -> Adapter:
        """``options`` are those of the family's row in the table; a family without any takes none."""
        ...
