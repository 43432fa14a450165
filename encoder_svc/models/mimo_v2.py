"""MiMo-V2: images, videos with or without their sound, and sound.

Grid (t, h, w) in patches for what is seen, (mel frames) for what is heard. A video's sound is a second matrix of its
slot, ``video_audio_embedding``: the rows that its units show. The towers are in
:mod:`~encoder_svc.models.mimo_v2_tower`, which an engine imports when it loads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from encoder_svc.errors import Reason, ServiceError, SetupError
from encoder_svc.models.adapter import (
    Adapter,
    AudioProbe,
    Layout,
    MediaProbe,
    Progress,
    Tower,
    VideoProbe,
    WarmUp,
)
from encoder_svc.models.audio_config import read_section
from encoder_svc.models.audio_family import PreparedSound, sound_layout
from encoder_svc.models.checkpoint import Checkpoint, open_checkpoint
from encoder_svc.models.dtypes import DATA_TYPES
from encoder_svc.models.frame_sampling import DEFAULT_RATE, times_of
from encoder_svc.models.mimo_v2_config import MimoAudio, MimoProcessor, MimoTokenizer, MimoVision
from encoder_svc.models.mimo_v2_lengths import cut_units, rows_of
from encoder_svc.models.mimo_v2_mel import log_mel
from encoder_svc.models.mimo_v2_pixels import FAMILY, with_video_settings
from encoder_svc.models.qwen_vision import QwenVision
from encoder_svc.models.registry import FAMILIES
from encoder_svc.models.sound_of_videos import add_sound, tell_sound, without_sound
from epd.encoder.v1.embedding_pb2 import DataType
from epd.encoder.v1.media_pb2 import MediaItem, Modality

LONE_FRAME_SECONDS = 1.0
"""How long a video of one sampled frame lasts, for its sound."""


class MimoV2Adapter:
    """MiMo-V2 as one checkpoint configures it.

    Args:
        checkpoint: the checkpoint.
        dtype: of weights and embeddings; the audio tokenizer always runs in float32.

    Raises:
        SetupError: its configuration is wrong or contradicts itself.
    """

    model_type = "mimo_v2"
    modalities: tuple[Modality, ...] = FAMILIES["mimo_v2"].modalities
    tensors: tuple[str, ...] = FAMILIES["mimo_v2"].tensors

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        self._checkpoint = checkpoint
        self._torch_dtype = dtype
        self._dtype_name = str(dtype).removeprefix("torch.")
        self.dtype: DataType = DATA_TYPES[self._dtype_name]
        config = checkpoint.config
        folder = checkpoint.folder("audio_tokenizer")
        self._audio = read_section(MimoAudio, config.get("audio_config"), "audio_config", checkpoint)
        self._tokenizer = read_section(MimoTokenizer, folder.config, "config", folder)
        processor = read_section(MimoProcessor, config.get("processor_config"), "processor_config", checkpoint)
        self.vision = QwenVision(FAMILY, with_video_settings(checkpoint, processor), config, self._dtype_name)
        self.hidden_size = self.vision.hidden_size
        self.audio_sampling_rate: int | None = self._tokenizer.sampling_rate
        self._rows_a_second = processor.audio_input_id_per_second / self._audio.group_size
        for name, ours, theirs in (
            ("audio_config.out_hidden_size", self._audio.out_hidden_size, self.hidden_size),
            ("processor_config.audio_sampling_rate", processor.audio_sampling_rate, self._tokenizer.sampling_rate),
        ):
            if ours != theirs:
                raise SetupError(
                    f"config.json of {checkpoint.path}: {name} is {ours}, but vision_config or audio_tokenizer/"
                    f"config.json says {theirs}; all must come from the same checkpoint"
                )
        if self._audio.audio_channels > self._tokenizer.num_quantizers:
            raise SetupError(
                f"config.json of {checkpoint.path}: audio_config.audio_channels is {self._audio.audio_channels}, but "
                f"the audio tokenizer has {self._tokenizer.num_quantizers} codebooks"
            )

    def measure(self, item: MediaItem, probe: MediaProbe) -> Layout:
        """See :meth:`Adapter.measure <encoder_svc.models.adapter.Adapter.measure>`."""
        if item.modality == Modality.MODALITY_AUDIO:
            rate = self._tokenizer.sampling_rate
            sound = cast("AudioProbe", probe)
            return sound_layout(item, sound, rate, self._prepare_sound, self.hidden_size, self._dtype_name)
        if item.modality != Modality.MODALITY_VIDEO:
            return self.vision.measure(item, probe)
        layout = self.vision.measure(without_sound(item), probe)
        return self._add_sound(layout, cast("VideoProbe", probe), item.video.use_audio_in_video)

    def prepare(self, item: MediaItem, probe: MediaProbe, layout: Layout) -> Sequence[torch.Tensor]:
        """See :meth:`Adapter.prepare <encoder_svc.models.adapter.Adapter.prepare>`."""
        if item.modality == Modality.MODALITY_AUDIO:
            return layout.prepared
        return (*self.vision.prepare(item, probe, layout), *layout.prepared)

    def warm_up(self) -> WarmUp:
        """A small grey image."""
        return self.vision.warm_up()

    def load_tower(self, device: torch.device, progress: Progress) -> Tower:
        """See :meth:`Adapter.load_tower <encoder_svc.models.adapter.Adapter.load_tower>`."""
        from encoder_svc.models.mimo_v2_tower import TowerConfig, load_tower

        config = TowerConfig(cast("MimoVision", self.vision.config), self.vision, self._audio, self._tokenizer)
        return load_tower(self._checkpoint, config, self._torch_dtype, device, progress)

    def _prepare_sound(self, waveform: torch.Tensor) -> PreparedSound:
        if not len(waveform):
            raise ServiceError(Reason.MEDIA_EMPTY, "the sound has no samples; send a file with sound in it")
        mel = log_mel(waveform, self._tokenizer)
        frames = mel.shape[1]
        return PreparedSound(mel, frames, frames, rows_of(frames, self._tokenizer, self._audio))

    def _add_sound(self, layout: Layout, probe: VideoProbe, wanted: bool) -> Layout:
        """Adds what a video's sound needs: metadata in any case, and input and rows if there is any."""
        fps = probe.fps or self.vision.video.fps or DEFAULT_RATE
        shown = probe.frame_times if probe.fps else [index / fps for index in range(len(probe.frame_times))]
        times = times_of(layout.frames, fps, shown)
        depth = self.vision.video.temporal_patch_size
        layout.chunk.video.video_timestamps[:] = times[::depth]
        tell_sound(layout, 0, ())
        track = probe.audio if wanted else None
        waveform = None if track is None else track.waveform(self._tokenizer.sampling_rate)
        if waveform is None or not len(waveform):
            return layout
        sound = self._prepare_sound(waveform)
        length = times[1] - times[0] if len(times) > 1 else LONE_FRAME_SECONDS
        units = cut_units(times[::depth], times[-1] + length, sound.rows, self._rows_a_second)
        tell_sound(layout, sound.rows, units.lengths)
        if not units.shown:
            return layout
        bounds = torch.tensor([units.start, units.shown])
        return add_sound(layout, sound, units.shown, self.hidden_size, self._dtype_name, (bounds,))


def make_adapter(path: Path, dtype: torch.dtype, **forms: str) -> Adapter:
    """The factory of this family.

    Args:
        path: the checkpoint's folder.
        dtype: of weights and embeddings.
        forms: ``sink_form`` and ``merger_norm``, in place of what ``vision_config`` says of them.

    Raises:
        SetupError: the checkpoint cannot be served.
    """
    checkpoint = open_checkpoint(path)
    vision = checkpoint.config.get("vision_config")
    if forms and isinstance(vision, dict):
        checkpoint = replace(checkpoint, config={**checkpoint.config, "vision_config": {**vision, **forms}})
    return MimoV2Adapter(checkpoint, dtype)
