"""The sound of videos in the Omni families, against transformers' feature extractor and audio tower."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoFeatureExtractor

from encoder_svc.checkpoints.writer import write_checkpoint
from encoder_svc.engine.runner import slot_matrices
from encoder_svc.errors import ServiceError
from encoder_svc.media.item import open_media
from encoder_svc.models.adapter import VideoProbe
from encoder_svc.models.registry import FAMILIES, open_adapter
from epd.encoder.v1.media_pb2 import ImageOptions, MediaItem, Modality, VideoOptions
from epd.internal.v1.engine_pb2 import BatchItem
from epd.internal.v1.media_worker_pb2 import Tower
from tests.media.movies import Track, movie
from tests.media.sounds import tones
from tests.models.cases.omni import load
from tests.models.family_cases import LIMITS, Medium, Prepared, prepare

RATE = 16_000
OPTIONS = VideoOptions(use_audio_in_video=True, num_frames=6, min_pixels=4096, max_pixels=16_384)
FILM = MediaItem(modality=Modality.MODALITY_VIDEO, video=OPTIONS)


@dataclass
class Omni:
    """A family's checkpoint and what is made of it, once."""

    family: str
    checkpoint: Path

    @cached_property
    def adapter(self) -> Any:
        return open_adapter(self.checkpoint, "float32")

    @cached_property
    def tower(self) -> Any:
        return self.adapter.load_tower(torch.device("cpu"), lambda _step, _fraction: None)

    @cached_property
    def whole(self) -> Any:
        return load(self.checkpoint)

    def prepare(self, file: bytes) -> Prepared:
        return prepare(self.adapter, Medium("film", FILM, (file,)))

    @torch.inference_mode()
    def reference(self, file: bytes) -> torch.Tensor:
        """Rows of the file's sound, as transformers makes them of its samples."""
        track = cast("VideoProbe", open_media(FILM, (file,), LIMITS)).audio
        assert track is not None
        extractor = AutoFeatureExtractor.from_pretrained(self.checkpoint)
        padding = "max_length" if self.family == "qwen2_5_omni" else True
        made = extractor(
            track.waveform(RATE).numpy(), sampling_rate=RATE, padding=padding, truncation=False,
            return_attention_mask=True, return_tensors="pt",
        )  # fmt: skip
        rows: torch.Tensor = self.whole.get_audio_features(
            made["input_features"], made["attention_mask"]
        ).last_hidden_state
        return rows


@pytest.fixture(scope="module", params=["qwen2_5_omni", "qwen3_omni_moe"])
def omni(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Omni:
    checkpoint = tmp_path_factory.mktemp("omni") / request.param
    write_checkpoint(request.param, checkpoint)
    return Omni(request.param, checkpoint)


TRACKS = {
    "as long": movie(4, Track(tones(4, RATE), RATE)),
    "shorter, at 8 kHz": movie(4, Track(tones(1.3, 8_000), 8_000)),
    "longer": movie(2, Track(tones(5, 44_100, 2), 44_100, "stereo")),
    "late": movie(4, Track(tones(1, RATE), RATE, begins=2.0)),
    "six channels": movie(2, Track(tones(2, 48_000, 6), 48_000, "5.1"), container="matroska"),
}


@pytest.mark.parametrize("name", TRACKS)
def test_rows_of_sound_equal_transformers(omni: Omni, name: str) -> None:
    prepared = omni.prepare(TRACKS[name])
    chunk = prepared.layout.chunk
    assert prepared.sound is not None
    (heard,) = omni.tower.encode([prepared.sound])[0]
    expected = omni.reference(TRACKS[name])
    assert tuple(heard.shape) == tuple(expected.shape) == tuple(chunk.tensors[-1].shape)
    torch.testing.assert_close(heard, expected, atol=1e-4, rtol=0)
    told = chunk.video.audio
    assert told.video_audio_feature_lens == sum(told.video_audio_segment_lens_flat) == len(expected), "nothing is cut"
    assert told.video_audio_per_video_num_units == len(told.video_audio_segment_lens_flat) == chunk.grid_dim[0]


def test_a_row_belongs_to_the_step_that_is_shown_when_it_begins(omni: Omni) -> None:
    chunk = omni.prepare(TRACKS["as long"]).layout.chunk
    (seconds,) = (one.doubles.values[0] for one in chunk.placeholder_metadata if one.name == "video_second_per_grid")
    rate = {"qwen2_5_omni": 25, "qwen3_omni_moe": 13}[omni.family]
    units = [0] * chunk.grid_dim[0]
    for row in range(chunk.video.audio.video_audio_feature_lens):
        units[min(int(row / (seconds * rate)), len(units) - 1)] += 1
    assert list(chunk.video.audio.video_audio_segment_lens_flat) == units
    frames = [one.ints.values[0] for one in chunk.placeholder_metadata if one.name == "audio_feature_lengths"]
    assert frames == [pytest.approx(400, abs=15)]


def test_each_tower_has_an_input_and_a_matrix_of_its_own(omni: Omni) -> None:
    layout = omni.prepare(TRACKS["as long"]).layout
    chunk = layout.chunk
    pictures, sound = layout.inputs
    assert (pictures.tower, sound.tower) == (Tower.TOWER_VISION, Tower.TOWER_AUDIO)
    assert pictures.nbytes <= sound.tensors[0].byte_offset
    matrices = slot_matrices(BatchItem(tensors=chunk.tensors, nbytes=chunk.nbytes))
    assert len(matrices) == pictures.matrices + sound.matrices == 2
    assert [tensor.name for tensor in chunk.tensors] == list(omni.adapter.tensors)


@pytest.mark.parametrize("sound", [None, Track(tones(0.004, RATE), RATE, codec="pcm_s16le")])
def test_f32_a_video_of_which_nothing_is_heard_is_silent(omni: Omni, sound: Track | None) -> None:
    file = movie(2, *([sound] if sound else []), container="matroska")
    prepared = omni.prepare(file)
    chunk = prepared.layout.chunk
    assert prepared.sound is None
    assert chunk.video.HasField("audio")
    assert chunk.video.audio.ByteSize() == 0
    assert [tensor.name for tensor in chunk.tensors] == list(omni.adapter.tensors[:-1])
    frames = [one.ints.values[0] for one in chunk.placeholder_metadata if one.name == "audio_feature_lengths"]
    assert frames == [0], "every video tells of it, so that a prompt's are as many as it has videos"


def test_options_of_another_modality_are_refused_all_the_same(omni: Omni) -> None:
    item = MediaItem(modality=Modality.MODALITY_VIDEO, image=ImageOptions(max_pixels=10_000))
    with pytest.raises(ServiceError, match="set `video`"):
        prepare(omni.adapter, Medium("film", item, (TRACKS["as long"],)))


def test_only_families_that_interleave_sound_tell_of_it() -> None:
    known = {name for name, family in FAMILIES.items() if "video_audio_embedding" in family.tensors}
    assert known == {"mimo_v2", "qwen2_5_omni", "qwen3_omni_moe"}


def test_a_family_that_interleaves_no_sound_tells_nothing_of_it(tiny_checkpoint: Path) -> None:
    adapter = open_adapter(tiny_checkpoint, "float32")
    silent = MediaItem(modality=Modality.MODALITY_VIDEO, video=VideoOptions(num_frames=4))
    made = prepare(adapter, Medium("film", silent, (TRACKS["as long"],)))
    assert not made.layout.chunk.video.HasField("audio")
    assert [tensor.name for tensor in made.layout.chunk.tensors] == ["embedding"]
    with pytest.raises(ServiceError, match="send the sound as an item of its own"):
        prepare(adapter, Medium("film", FILM, (TRACKS["as long"],)))
