"""What the families that hear share: from a sound to a tower's input, and an adapter for those that only hear."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.models.adapter import AudioProbe, Layout, MediaProbe, Progress, Tower, TowerInput, WarmUp
from encoder_svc.models.dtypes import DATA_TYPES, ELEMENT_BYTES
from encoder_svc.models.mel import MelSettings
from encoder_svc.models.registry import Family
from encoder_svc.models.tensor_specs import append_tensor
from epd.encoder.v1.embedding_pb2 import (
    AudioMetadata,
    DataType,
    EmbeddingChunk,
    Int64List,
    PlaceholderValue,
    TensorSpec,
)
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from epd.internal.v1.media_worker_pb2 import ModelInput
from epd.internal.v1.media_worker_pb2 import Tower as TowerName

_INPUT_TYPES = {torch.float32: DataType.DATA_TYPE_FLOAT32, torch.int64: DataType.DATA_TYPE_INT64}


@dataclass(frozen=True)
class PreparedSound:
    """A sound as a tower takes it."""

    features: torch.Tensor
    """float32, shape (mels, frames); of windows that the tower takes apart (windows, mels, frames)."""
    frames: int
    """Frames that the tower encodes: ``grid_dim`` of the chunk."""
    valid_frames: int
    """Frames of sound, without padding."""
    rows: int
    """Rows of the embedding."""
    mask: torch.Tensor | None = None
    """int64, shape (windows, frames): 1 where there is sound. None: the tower does not ask for it."""

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """What the tower takes."""
        return {"features": self.features, **({} if self.mask is None else {"mask": self.mask})}


PrepareSound = Callable[[torch.Tensor], PreparedSound]
"""Makes a tower's input of a waveform: float32, shape (samples,), at the model's rate.

Raises ServiceError if it is too long for the model, or so short that no row would come of it.
"""


def valid_frames(waveform: torch.Tensor, mel: MelSettings) -> int:
    """Frames of a sound without padding: those that begin in it."""
    return -(-len(waveform) // mel.hop_length)


def check_fits(waveform: torch.Tensor, mel: MelSettings) -> None:
    """Refuses a sound that is longer than the model's window, which transformers would cut.

    Raises:
        ServiceError: it is longer.
    """
    if len(waveform) > mel.window_samples:
        raise ServiceError(
            Reason.MEDIA_TOO_LARGE,
            f"the sound is {len(waveform) / mel.sampling_rate:.2f} s long and the model hears {mel.chunk_length} s; "
            "send it in parts of that length (start_seconds, end_seconds)",
        )


def too_short(waveform: torch.Tensor, sampling_rate: int) -> ServiceError:
    """The error for a sound of which no row would come."""
    return ServiceError(
        Reason.MEDIA_UNSUPPORTED,
        f"the sound is {len(waveform) / sampling_rate:.4f} s long, too short for the model to hear anything; "
        "send a longer one",
    )


def feature_lengths(frames: int) -> PlaceholderValue:
    """What processors tell of a sound: its mel frames, without padding."""
    return PlaceholderValue(name="audio_feature_lengths", ints=Int64List(values=(frames,)), shape=(1,))


def sound_layout(
    item: MediaItem,
    probe: AudioProbe,
    sampling_rate: int,
    prepare: PrepareSound,
    hidden_size: int,
    dtype: str,
) -> Layout:
    """Decodes a sound, makes the tower's input of it, and says what will come of it.

    Args:
        item: the item.
        probe: its sound.
        sampling_rate: of the model, in hertz.
        prepare: the family's.
        hidden_size: of a row.
        dtype: of a row, as torch names it.

    Raises:
        ServiceError: the sound cannot be decoded or encoded.
    """
    if item.WhichOneof("options") not in (None, "audio"):
        raise ServiceError(Reason.REQUEST_INVALID, "the options are not those of sound; set `audio`", field="options")
    waveform = probe.waveform(sampling_rate)
    sound = prepare(waveform)
    made = ModelInput(patches=sound.frames, tower=TowerName.TOWER_AUDIO)
    for name, tensor in sound.tensors.items():
        append_tensor(made, name, _INPUT_TYPES[tensor.dtype], tensor.element_size(), tensor.shape)
    row_bytes = hidden_size * ELEMENT_BYTES[dtype]
    return Layout(
        chunk=EmbeddingChunk(
            grid_dim=(sound.frames,),
            token_count=sound.rows,
            tensors=[
                TensorSpec(
                    name="embedding",
                    dtype=DATA_TYPES[dtype],
                    shape=(sound.rows, hidden_size),
                    strides=(row_bytes, ELEMENT_BYTES[dtype]),
                )
            ],
            nbytes=sound.rows * row_bytes,
            placeholder_metadata=[feature_lengths(sound.valid_frames)],
            audio=AudioMetadata(
                duration_seconds=len(waveform) / sampling_rate,
                source_sampling_rate=probe.source_sampling_rate,
                sampling_rate=sampling_rate,
                source_channels=probe.source_channels,
                mel_frames=sound.valid_frames,
            ),
        ),
        input=made,
        prepared=tuple(sound.tensors.values()),
    )


class AudioFamilyAdapter:
    """A family that encodes sound and nothing else, as one checkpoint configures it.

    Args:
        family: its row in the table.
        dtype: of weights and embeddings.
        sampling_rate: of the model, in hertz.
        prepare: makes the tower's input.
        hidden_size: of a row.
        load: loads the tower.
    """

    def __init__(
        self,
        family: Family,
        dtype: torch.dtype,
        sampling_rate: int,
        prepare: PrepareSound,
        hidden_size: int,
        load: Callable[[torch.device, Progress], Tower],
    ) -> None:
        self.model_type = family.model_type
        self.modalities: tuple[Modality, ...] = family.modalities
        self.tensors: tuple[str, ...] = family.tensors
        self.hidden_size = hidden_size
        self.audio_sampling_rate: int | None = sampling_rate
        self._dtype_name = str(dtype).removeprefix("torch.")
        self.dtype: DataType = DATA_TYPES[self._dtype_name]
        self._sampling_rate = sampling_rate
        self._prepare = prepare
        self._load = load

    def measure(self, item: MediaItem, probe: MediaProbe) -> Layout:
        """See :meth:`Adapter.measure <encoder_svc.models.adapter.Adapter.measure>`."""
        if item.modality != Modality.MODALITY_AUDIO:
            raise ServiceError(
                Reason.MODALITY_UNSUPPORTED, "this server encodes sound of this model only", field="modality"
            )
        sound = cast("AudioProbe", probe)
        return sound_layout(item, sound, self._sampling_rate, self._prepare, self.hidden_size, self._dtype_name)

    def prepare(self, item: MediaItem, probe: MediaProbe, layout: Layout) -> Sequence[torch.Tensor]:
        """See :meth:`Adapter.prepare <encoder_svc.models.adapter.Adapter.prepare>`."""
        return layout.prepared

    def warm_up(self) -> WarmUp:
        """A second of silence."""
        return silence(self._prepare, self._sampling_rate)

    def load_tower(self, device: torch.device, progress: Progress) -> Tower:
        """See :meth:`Adapter.load_tower <encoder_svc.models.adapter.Adapter.load_tower>`."""
        return self._load(device, progress)


def silence(prepare: PrepareSound, sampling_rate: int) -> WarmUp:
    """A second of silence as a tower takes it."""
    sound = prepare(torch.zeros(sampling_rate))
    item = TowerInput(Modality.MODALITY_AUDIO, (sound.frames,), tuple(sound.tensors.values()))
    return WarmUp(item, TowerName.TOWER_AUDIO, sound.frames)
