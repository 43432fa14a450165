"""The Omni families, which see and hear: Qwen2.5-Omni and Qwen3-Omni. Images, videos with or without sound, and sound.

A video's sound is a second matrix of its slot, ``video_audio_embedding``: all rows of its track. Where they stand among
the pictures' is the language side's matter.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, cast

import torch

from encoder_svc.errors import Reason, ServiceError, SetupError
from encoder_svc.models.adapter import (
    Adapter,
    AudioProbe,
    Layout,
    MediaProbe,
    Progress,
    Tower,
    TowerInput,
    VideoProbe,
    WarmUp,
)
from encoder_svc.models.audio_config import AudioEncoderConfig, check_mel, read_section
from encoder_svc.models.audio_family import PreparedSound, PrepareSound, feature_lengths, sound_layout
from encoder_svc.models.audio_tower import Forward, encode_sounds
from encoder_svc.models.checkpoint import Checkpoint, open_checkpoint
from encoder_svc.models.dtypes import DATA_TYPES
from encoder_svc.models.mel import MelSettings, read_mel_settings
from encoder_svc.models.qwen2_5_omni_audio import Qwen25OmniAudioConfig, Qwen25OmniAudioForward
from encoder_svc.models.qwen2_5_omni_audio import prepare_sound as prepare_qwen2_5
from encoder_svc.models.qwen3_omni_audio import Qwen3OmniAudioConfig, Qwen3OmniAudioForward
from encoder_svc.models.qwen3_omni_audio import prepare_sound as prepare_qwen3
from encoder_svc.models.qwen_vision import QwenVision, Timing, VisionFamily, of_frames
from encoder_svc.models.qwen_vision_config import Qwen3Vision, Qwen25Vision, VisionConfig
from encoder_svc.models.registry import FAMILIES, find_family
from encoder_svc.models.sound_of_videos import TENSOR_NAME, add_sound, tell_sound, without_sound
from epd.encoder.v1.embedding_pb2 import DataType
from epd.encoder.v1.encoder_service_pb2 import WeightsInfo
from epd.encoder.v1.media_pb2 import MediaItem, Modality

PREPROCESSING_VERSION = 1
"""Counts changes of this code that change embeddings."""

SECONDS_NAME = "video_second_per_grid"

POSITIONS_A_SECOND = 25
"""Rows of a second of sound, where the config does not say it (as in transformers 5.24)."""


class OmniSound(ABC):
    """The sound of one of the families, as one checkpoint configures it.

    Args:
        config: of the tower.
        mel: of the feature extractor.
    """

    vision: ClassVar[VisionFamily]
    """What the family sees."""
    config_class: ClassVar[type[AudioEncoderConfig]]
    """``audio_config``."""

    def __init__(self, config: Any, mel: MelSettings) -> None:
        self.config = config
        self.mel = mel

    @property
    @abstractmethod
    def prepare(self) -> PrepareSound:
        """Makes the tower's input."""

    @abstractmethod
    def make_towers(self, vision: VisionConfig) -> torch.nn.Module:
        """A module with the checkpoint's names: ``visual`` and ``audio_tower``."""

    @abstractmethod
    def begin(self, source: Any, device: torch.device) -> Forward:
        """The forward of ``audio_tower``."""


class Qwen25OmniSound(OmniSound):
    """Qwen2.5-Omni."""

    vision = of_frames(Qwen25Vision, Timing(SECONDS_NAME, assumed_rate=2.0), (128 * 28 * 28, 768 * 28 * 28))
    config_class = Qwen25OmniAudioConfig

    @property
    def prepare(self) -> PrepareSound:
        """See :class:`OmniSound`."""
        return partial(prepare_qwen2_5, mel=self.mel)

    def make_towers(self, vision: VisionConfig) -> torch.nn.Module:
        """See :class:`OmniSound`."""
        from encoder_svc.models.qwen_omni_parameters import Qwen25OmniTowers

        return Qwen25OmniTowers(vision, self.config)

    def begin(self, source: Any, device: torch.device) -> Forward:
        """See :class:`OmniSound`."""
        return Qwen25OmniAudioForward(source, self.config, device)


class Qwen3OmniSound(OmniSound):
    """Qwen3-Omni."""

    vision = of_frames(Qwen3Vision, Timing(SECONDS_NAME, assumed_rate=1.0), (128 * 32 * 32, 768 * 32 * 32))
    config_class = Qwen3OmniAudioConfig

    @property
    def prepare(self) -> PrepareSound:
        """See :class:`OmniSound`."""
        return partial(prepare_qwen3, mel=self.mel, n_window=self.config.n_window)

    def make_towers(self, vision: VisionConfig) -> torch.nn.Module:
        """See :class:`OmniSound`."""
        from encoder_svc.models.qwen_omni_parameters import Qwen3OmniTowers

        return Qwen3OmniTowers(vision, self.config)

    def begin(self, source: Any, device: torch.device) -> Forward:
        """See :class:`OmniSound`."""
        return Qwen3OmniAudioForward(source, self.config, device)


SOUND: dict[str, type[OmniSound]] = {"qwen2_5_omni": Qwen25OmniSound, "qwen3_omni_moe": Qwen3OmniSound}
"""By ``model_type``."""


@dataclass(frozen=True)
class OmniTower:
    """Both towers."""

    weights: WeightsInfo
    compatibility_fingerprint: bytes
    vision: Any
    """:class:`~encoder_svc.models.qwen_vision_tower.QwenVisionTower`."""
    sound: Forward
    device: torch.device
    dtype: torch.dtype

    @torch.inference_mode()
    def encode(self, items: Sequence[TowerInput]) -> list[tuple[torch.Tensor, ...]]:
        """See :meth:`Tower.encode <encoder_svc.models.adapter.Tower.encode>`."""
        if items[0].modality == Modality.MODALITY_AUDIO:
            return encode_sounds(self.sound, items, self.device, self.dtype)
        rows: list[tuple[torch.Tensor, ...]] = self.vision.encode(items)
        return rows


class OmniAdapter:
    """One of these families as one checkpoint configures it.

    Args:
        checkpoint: the checkpoint.
        dtype: of weights and embeddings.

    Raises:
        SetupError: its configuration is wrong or contradicts itself.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._dtype_name = str(dtype).removeprefix("torch.")
        self.model_type: str = find_family(checkpoint).model_type
        self.modalities: tuple[Modality, ...] = FAMILIES[self.model_type].modalities
        self.dtype: DataType = DATA_TYPES[self._dtype_name]
        kind = SOUND[self.model_type]
        thinker = checkpoint.config.get("thinker_config")
        if not isinstance(thinker, dict):
            raise SetupError(f"config.json of {checkpoint.path} has no thinker_config; this is no Omni checkpoint")
        config = read_section(kind.config_class, thinker.get("audio_config"), "thinker_config.audio_config", checkpoint)
        mel = read_mel_settings(checkpoint)
        check_mel(config, mel, checkpoint, window=False)
        self._sound = kind(config, mel)
        self.vision = QwenVision(kind.vision, checkpoint, thinker, self._dtype_name)
        self.audio_sampling_rate: int | None = mel.sampling_rate
        self.hidden_size = self.vision.hidden_size
        self.tensors = (*self.vision.tensors, TENSOR_NAME)
        self._positions_a_second: float = thinker.get("position_id_per_seconds", POSITIONS_A_SECOND)
        if self._sound.config.output_dim != self.hidden_size:
            raise SetupError(
                f"config.json of {checkpoint.path}: output_dim of audio_config is {self._sound.config.output_dim}, but "
                f"the vision tower's rows are {self.hidden_size} wide; both go to one language model"
            )

    def measure(self, item: MediaItem, probe: MediaProbe) -> Layout:
        """See :meth:`Adapter.measure <encoder_svc.models.adapter.Adapter.measure>`."""
        if item.modality == Modality.MODALITY_IMAGE:
            return self.vision.measure(item, probe)
        if item.modality == Modality.MODALITY_VIDEO:
            layout = self.vision.measure(without_sound(item), probe)
            return self._add_sound(layout, cast("VideoProbe", probe), item.video.use_audio_in_video)
        sound = cast("AudioProbe", probe)
        rate = self._sound.mel.sampling_rate
        return sound_layout(item, sound, rate, self._sound.prepare, self.hidden_size, self._dtype_name)

    def prepare(self, item: MediaItem, probe: MediaProbe, layout: Layout) -> Sequence[torch.Tensor]:
        """See :meth:`Adapter.prepare <encoder_svc.models.adapter.Adapter.prepare>`."""
        if item.modality == Modality.MODALITY_AUDIO:
            return layout.prepared
        return (*self.vision.prepare(item, probe, layout), *layout.prepared)

    def _add_sound(self, layout: Layout, probe: VideoProbe, wanted: bool) -> Layout:
        """Adds what a video's sound needs: metadata in any case, and input and rows if there is any."""
        chunk, sound = layout.chunk, self._hear(probe.audio) if wanted else None
        # Of every video, so that what is joined for a prompt has an entry for each.
        chunk.placeholder_metadata.append(feature_lengths(0 if sound is None else sound.valid_frames))
        if sound is None:
            tell_sound(layout, 0, ())
            return layout
        (seconds,) = (value.doubles.values[0] for value in chunk.placeholder_metadata if value.name == SECONDS_NAME)
        steps, rate = chunk.grid_dim[0], seconds * self._positions_a_second
        # A row belongs to the step that is shown when it begins; what comes behind the last step, to the last.
        bounds = [*(min(math.ceil(step * rate), sound.rows) for step in range(steps)), sound.rows]
        tell_sound(layout, sound.rows, [end - begin for begin, end in pairwise(bounds)])
        return add_sound(layout, sound, sound.rows, self.hidden_size, self._dtype_name)

    def _hear(self, track: AudioProbe | None) -> PreparedSound | None:
        """A video's track. None: there is none, or so little of it that no row would come of it."""
        waveform = None if track is None else track.waveform(self._sound.mel.sampling_rate)
        if waveform is None or not len(waveform):
            return None
        try:
            return self._sound.prepare(waveform)
        except ServiceError as error:
            if error.reason is Reason.MEDIA_UNSUPPORTED:
                return None
            raise

    def warm_up(self) -> WarmUp:
        """A grid of two by two merge blocks, mid-grey."""
        return self.vision.warm_up()

    def load_tower(self, device: torch.device, progress: Progress) -> Tower:
        """See :meth:`Adapter.load_tower <encoder_svc.models.adapter.Adapter.load_tower>`."""
        from encoder_svc.models.placing import place_weights
        from encoder_svc.models.qwen_vision_tower import QwenVisionTower
        from encoder_svc.models.weights import fingerprint, read_towers

        vision = self.vision
        weights = read_towers(self._checkpoint, FAMILIES[self.model_type].prefixes, self._dtype, progress)
        towers: Any = place_weights(
            lambda: self._sound.make_towers(vision.config), weights, ("thinker.model.", "thinker.")
        )
        identity = fingerprint(
            weights,
            self.model_type,
            self._dtype,
            {"version": PREPROCESSING_VERSION, **vision.identity, "sound": self._sound.mel.model_dump()},
            self.hidden_size * len(vision.tensors),
        )
        info = weights.info
        # It refers to every tensor, and the towers below keep their own.
        del weights
        sight = QwenVisionTower(towers.visual, vision.config, vision.image, vision.video, device)
        sound = self._sound.begin(towers.audio_tower, device)
        progress("moving weights", 1.0)
        return OmniTower(info, identity, sight, sound, device, self._dtype)


def make_adapter(path: Path, dtype: torch.dtype) -> Adapter:
    """The factory of these families.

    Raises:
        SetupError: the checkpoint cannot be served.
    """
    return OmniAdapter(open_checkpoint(path), dtype)
