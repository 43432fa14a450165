"""Frames, sizes, pixels and times of videos, against what transformers' processors make of them."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
from transformers.video_utils import VideoMetadata as ReferenceMetadata

from encoder_svc.checkpoints.writer import write_checkpoint
from encoder_svc.errors import Reason, ServiceError, SetupError
from encoder_svc.media.item import open_media
from encoder_svc.models.adapter import Layout
from encoder_svc.models.frame_sampling import times_of
from encoder_svc.models.registry import open_adapter
from encoder_svc.models.video_patches import VideoPreprocessing, WholeVideoPreprocessing, read_video_preprocessing
from epd.encoder.v1.media_pb2 import FrameSequence, MediaItem, Modality, VideoOptions
from tests.media.videos import MP4, VARIABLE_TIMES, Clip, png
from tests.models.cases.qwen_vl import normalised
from tests.models.family_cases import LIMITS
from tests.models.video_samples import CUTS, SAMPLES, Cut, Sample

FOLDER = Path(__file__).parent
GOLDEN: dict[str, Any] = json.loads((FOLDER / "golden_videos.json").read_text())
ORACLE_PYTHON = "ENCODER_SVC_ORACLE_PYTHON"
REFERENCE: Any = Qwen3VLProcessor.__new__(Qwen3VLProcessor)
"""Only for the arithmetic of its methods."""
FAMILIES = ("qwen2_vl", "qwen3_vl")
"""One with each of the two video processors."""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    made = {}
    for family in (*FAMILIES, "qwen2_5_vl"):
        directory = tmp_path_factory.mktemp("checkpoints") / family
        write_checkpoint(family, directory)
        if family == "qwen2_vl":
            # The default bounds of the video processor, which the checkpoint's one file for both overrides.
            (directory / "video_preprocessor_config.json").write_text('{"do_sample_frames": false}')
        made[family] = open_adapter(directory, "float32")
    return made


@dataclass(frozen=True)
class DecodedVideo:
    """A probe of frames that are there already, or of none if only their number counts."""

    fps: float
    total: int
    pixels: np.ndarray | None = None
    audio = None

    @property
    def width(self) -> int:
        return 64 if self.pixels is None else self.pixels.shape[2]

    @property
    def height(self) -> int:
        return 64 if self.pixels is None else self.pixels.shape[1]

    @cached_property
    def frame_times(self) -> Sequence[float]:
        return [number / self.fps for number in range(self.total)]

    @property
    def duration(self) -> float:
        return self.total / self.fps

    def frames(self, indices: Sequence[int]) -> Iterator[torch.Tensor]:
        assert self.pixels is not None
        for index in indices:
            yield torch.from_numpy(self.pixels[index])


def video_item(**options: Any) -> MediaItem:
    return MediaItem(modality=Modality.MODALITY_VIDEO, video=VideoOptions(**options))


def measure(adapter: Any, file: bytes, **options: Any) -> Layout:
    item = video_item(**options)
    layout: Layout = adapter.measure(item, open_media(item, [file], LIMITS))
    return layout


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("family", FAMILIES)
def test_f30_frames_are_those_of_the_reference(adapters: dict[str, Any], family: str) -> None:
    for sample in SAMPLES:
        layout = adapters[family].measure(video_item(**sample.wanted), DecodedVideo(sample.rate, sample.total))
        golden = GOLDEN[family]["frames"][sample.name]
        # The rounding of a step can add an index that no frame has, which the reference's decoder passes over.
        expected = [index for index in golden if index < sample.total]
        assert len(golden) - len(expected) <= 1
        assert list(layout.frames) == expected, sample.name
        assert layout.chunk.grid_dim[0] == -(-len(expected) // 2)
        metadata = ReferenceMetadata(sample.total, fps=sample.rate, frames_indices=expected)
        assert layout.chunk.video.sampled_fps == metadata.sampled_fps
        assert list(layout.chunk.video.frame_times) == metadata.timestamps
        if family == "qwen3_vl":
            times = REFERENCE._calculate_timestamps(list(expected), sample.rate, 2)
            assert list(layout.chunk.video.video_timestamps) == times


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.name)
def test_pixels_are_those_of_the_reference(adapters: dict[str, Any], family: str, cut: Cut) -> None:
    adapter = adapters[family]
    defaults = WholeVideoPreprocessing() if family == "qwen3_vl" else VideoPreprocessing()
    constants = defaults.model_copy(
        update={name: value for name, value in (("min_pixels", cut.least), ("max_pixels", cut.greatest)) if value}
    )
    vision = adapter.vision
    before, vision.video = vision.video, constants
    try:
        item = MediaItem(modality=Modality.MODALITY_VIDEO, frames=FrameSequence(fps=2.0))
        probe = DecodedVideo(2.0, cut.frames, cut.pixels())
        layout = adapter.measure(item, probe)
        (patches,) = adapter.prepare(item, probe, layout)
    finally:
        vision.video = before
    golden = GOLDEN[family]["pixels"][cut.name]
    assert list(layout.chunk.grid_dim) == golden["grid"]
    assert digest(patches) == golden["patches_uint8"]
    assert digest(normalised(patches, constants)) == golden["pixel_values_float32"]


@pytest.mark.skipif(
    ORACLE_PYTHON not in os.environ,
    reason=f"set {ORACLE_PYTHON} to a Python with torchvision (tests/models/make_golden.py says how to make one)",
)
def test_the_golden_videos_are_what_the_oracle_says_today() -> None:
    oracle = subprocess.run(
        [os.environ[ORACLE_PYTHON], FOLDER / "make_golden_videos.py"], capture_output=True, text=True, check=True
    )
    assert json.loads(oracle.stdout) == GOLDEN


CLIPS = {
    "shorter than the minimum": Clip(frames=3),
    "longer than the maximum": Clip(frames=60, height=32, width=32),
    "one frame": Clip(frames=1),
    "240 fps": Clip(frames=120, rate=Fraction(240), height=32, width=32),
    "0.5 fps": Clip(frames=6, rate=Fraction(1, 2)),
    "mkv": Clip("matroska"),
    "webm": Clip("webm", "libvpx", frames=12),
    "no duration in the header": Clip("matroska", container_options=(("live", "1"),)),
    "odd sizes": Clip("matroska", "ffv1", height=45, width=67, pixel_format="bgr0"),
    "rotated": Clip(rotation=90),
}


@pytest.mark.parametrize("name", CLIPS)
def test_f30_what_a_file_says_is_measured(adapters: dict[str, Any], name: str) -> None:
    clip = CLIPS[name]
    file, rate = clip.make(), float(clip.rate)
    options: dict[str, Any] = {"fps": 2.0, "max_frames": 20} if name != "longer than the maximum" else {
        "fps": 60.0, "max_frames": 20,
    }  # fmt: skip
    for family in (*FAMILIES, "qwen2_5_vl"):
        layout = measure(adapters[family], file, **options)
        video, frames = layout.chunk.video, layout.frames
        by_number = adapters[family].measure(video_item(**options), DecodedVideo(rate, clip.frames))
        assert frames == by_number.frames
        assert video.sampled_fps == pytest.approx(len(frames) / clip.frames * rate)
        assert list(video.frame_times) == pytest.approx([index / rate for index in frames], abs=1e-3)
        sides = (clip.height, clip.width) if clip.rotation else (clip.width, clip.height)
        assert (video.width, video.height) == sides
        values = {value.name: value for value in layout.chunk.placeholder_metadata}
        assert list(values["video_grid_thw"].ints.values) == list(layout.chunk.grid_dim)
        if family == "qwen2_5_vl":
            assert list(values["second_per_grid_ts"].doubles.values) == [pytest.approx(2 / video.sampled_fps)]
        if family == "qwen3_vl":
            assert list(video.video_timestamps) == list(by_number.chunk.video.video_timestamps), "as the reference"
            assert len(video.video_timestamps) == layout.chunk.grid_dim[0]


def test_f30_times_of_a_variable_rate_are_the_frames_own(adapters: dict[str, Any]) -> None:
    file = MP4.with_times(VARIABLE_TIMES).make()
    layout = measure(adapters["qwen3_vl"], file, num_frames=5)
    shown = [float(VARIABLE_TIMES[index]) for index in layout.frames]
    assert list(layout.chunk.video.frame_times) == pytest.approx(shown, abs=1e-3)
    padded = [*shown, shown[-1]]
    means = [(padded[place] + padded[place + 1]) / 2 for place in range(0, 6, 2)]
    assert list(layout.chunk.video.video_timestamps) == pytest.approx(means, abs=1e-3)


def test_f30_a_span_is_a_video_of_its_own(adapters: dict[str, Any]) -> None:
    layout = measure(
        adapters["qwen2_5_vl"], replace(MP4, frames=90).make(), fps=4.0, start_seconds=1.0, end_seconds=2.5
    )
    assert layout.frames == tuple(range(0, 45, 45 // 6))[:6] or len(layout.frames) == 6
    assert layout.chunk.video.frame_times[0] == 0.0
    assert layout.chunk.video.sampled_fps == pytest.approx(4.0)


def test_a_clock_of_milliseconds_tells_the_times_of_the_reference() -> None:
    rounded = [round(number / 30, 3) for number in range(90)]
    assert times_of(range(90), 30.0, rounded) == [number / 30.0 for number in range(90)]


def test_frames_that_come_as_images_are_all_taken(adapters: dict[str, Any]) -> None:
    files = [png(number) for number in range(9)]
    for fps, family, expected in ((4.0, "qwen3_vl", 4.0), (0.0, "qwen3_vl", 2.0), (0.0, "qwen2_5_vl", 2.0)):
        item = MediaItem(modality=Modality.MODALITY_VIDEO, frames=FrameSequence(fps=fps))
        layout = adapters[family].measure(item, open_media(item, files, LIMITS))
        assert layout.frames == tuple(range(9))
        assert layout.chunk.video.sampled_fps == expected
        assert list(layout.chunk.video.frame_times) == [number / expected for number in range(9)]
    item.video.fps = 1.0
    with pytest.raises(ServiceError, match="rate is not known"):
        adapters["qwen2_5_vl"].measure(item, open_media(item, files, LIMITS))
    item.frames.fps = 4.0
    assert len(adapters["qwen2_5_vl"].measure(item, open_media(item, files, LIMITS)).frames) == 4


@pytest.mark.parametrize(
    ("family", "options", "field"),
    [
        ("qwen2_vl", {"num_frames": 100}, "num_frames"),
        ("qwen2_vl", {"num_frames": 1}, "num_frames"),
        ("qwen2_vl", {"max_frames": 8}, "fps"),
        ("qwen3_vl", {"num_frames": 8, "max_frames": 8}, "num_frames"),
        ("qwen3_vl", {"max_frames": 3}, "max_frames"),
        ("qwen3_vl", {"min_frames": 800}, "min_frames"),
        ("qwen2_vl", {"min_pixels": 900_000}, "min_pixels"),
        ("qwen2_vl", {"total_pixels": 100}, "total_pixels"),
        ("qwen2_vl", {"use_audio_in_video": True}, "use_audio_in_video"),
    ],
)
def test_options_that_cannot_be_met_are_refused(
    adapters: dict[str, Any], family: str, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(ServiceError) as refused:
        adapters[family].measure(video_item(**options), DecodedVideo(30.0, 60))
    assert (refused.value.reason, refused.value.field) == (Reason.REQUEST_INVALID, f"options.{field}")


@pytest.mark.parametrize("family", FAMILIES)
def test_options_bound_the_pixels(adapters: dict[str, Any], family: str) -> None:
    probe = DecodedVideo(30.0, 8, np.zeros((8, 480, 640, 3), np.uint8))

    def pixels(**options: Any) -> int:
        video = adapters[family].measure(video_item(num_frames=8, **options), probe).chunk.video
        return int(video.resized_width * video.resized_height)

    assert pixels(min_pixels=3136, max_pixels=40_000) <= 40_000
    assert pixels(min_pixels=600_000, max_pixels=700_000) >= 600_000
    assert pixels(min_pixels=3136, total_pixels=8 * 50_000) <= 50_000


def test_a_cap_of_pixels_for_each_frame_is_that_of_the_reference() -> None:
    # From the text of Qwen2VLVideoProcessor.resize and Qwen3VLVideoProcessor.resize.
    two = VideoPreprocessing(cap_pixels_per_frame=True, max_video_tokens=2000)
    height, width = two.frame_size(40, 1080, 1920, VideoOptions())
    assert height * width <= max(int(2000 * 28 * 28 * 0.9) * 2 // 40, int(128 * 28 * 28 * 1.05))
    assert VideoPreprocessing().frame_size(40, 1080, 1920, VideoOptions()) != (height, width)
    three = WholeVideoPreprocessing(cap_pixels_per_frame=True, max_video_tokens=64, max_pixels=10_000_000)
    height, width = three.frame_size(8, 1080, 1920, VideoOptions())
    assert height * width <= max(64 * 32 * 32, int(128 * 32 * 32 * 1.05))


@pytest.mark.parametrize("settings", [{"resample": 2}, {"fps": 0}, {"min_frames": "few"}, {"do_resize": False}])
def test_preprocessing_that_we_do_not_do_is_refused_at_start(settings: dict[str, Any]) -> None:
    with pytest.raises(SetupError, match="video processor"):
        read_video_preprocessing(VideoPreprocessing, settings)


def test_each_sample_has_a_name_of_its_own() -> None:
    assert len({sample.name for sample in SAMPLES}) == len(SAMPLES)
    assert Sample(9, 1.0).wanted == {}
