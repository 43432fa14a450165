"""Videos of families with a tower of transformers: frames, sizes, pixels and times are those of their processors."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from encoder_svc.checkpoints.writer import write_checkpoint
from encoder_svc.errors import Reason, ServiceError, SetupError
from encoder_svc.media.item import open_media
from encoder_svc.models.registry import open_adapter
from epd.encoder.v1.media_pb2 import FrameSequence, MediaItem, Modality
from tests.media.videos import MP4, VARIABLE_TIMES, png
from tests.models.family_cases import LIMITS
from tests.models.library_videos import LIBRARY_CASES, digest_of
from tests.models.test_videos import CLIPS, ORACLE_PYTHON, DecodedVideo, digest, video_item
from tests.models.video_samples import CUTS, Cut

FOLDER = Path(__file__).parent
GOLDEN: dict[str, Any] = json.loads((FOLDER / "golden_library_videos.json").read_text())


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Where the checkpoint of a family is; it is written when it is asked for first."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def find(family: str) -> Path:
        if not (folder / family).exists():
            write_checkpoint(family, folder / family)
        return folder / family

    return find


def adapter_of(checkpoint: Path, **settings: Any) -> Any:
    """An adapter whose video processor has these settings and the defaults of transformers otherwise."""
    (checkpoint / "video_preprocessor_config.json").write_text(json.dumps({"do_convert_rgb": True, **settings}))
    return open_adapter(checkpoint, "float32")


@pytest.mark.parametrize("family", LIBRARY_CASES)
def test_f30_frames_are_those_of_the_reference(family: str, checkpoints: Any) -> None:
    case = LIBRARY_CASES[family]
    adapter = adapter_of(checkpoints(family))
    for sample in case.samples:
        probe = DecodedVideo(sample.rate, sample.total)
        expected = GOLDEN[family]["frames"][sample.name]
        if expected is None and sample.num_frames:
            with pytest.raises(ServiceError, match="num_frames"):
                adapter.measure(video_item(**sample.wanted), probe)
            continue
        frames = adapter.measure(video_item(**sample.wanted), probe).frames
        # Where it finds none, or fails for want of frames, we take one, or all.
        assert expected or len(set(frames)) in (1, sample.total), sample.name
        assert expected is None or digest_of(frames) == expected, sample.name


@pytest.mark.parametrize("family", LIBRARY_CASES)
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: cut.name)
def test_pixels_are_those_of_the_reference(family: str, cut: Cut, checkpoints: Any) -> None:
    adapter = adapter_of(checkpoints(family), **LIBRARY_CASES[family].settings_of(cut))
    probe = DecodedVideo(2.0, cut.frames, cut.pixels())
    layout = adapter.measure(video_item(), probe)
    pixels = adapter._videos.normalisation(adapter.prepare(video_item(), probe, layout)[0])
    golden = GOLDEN[family]["pixels"][cut.name]
    flat = pixels.flatten(1) if family.startswith("glm") else pixels
    shown = flat if flat.dim() == len(golden["shape"]) else flat[None]
    assert list(shown.shape) == golden["shape"]
    assert digest(shown) == golden["pixel_values_float32"]
    told = {value.name: list(value.ints.values) for value in layout.chunk.placeholder_metadata}
    for name in ("video_grid_thw", "target_sizes_videos", "grids_videos"):
        assert told.get(name) == (torch.tensor(golden[name]).flatten().tolist() if name in golden else None)


@pytest.mark.skipif(
    ORACLE_PYTHON not in os.environ,
    reason=f"set {ORACLE_PYTHON} to a Python with torchvision (tests/models/make_golden.py says how to make one)",
)
def test_the_golden_videos_are_what_the_oracle_says_today() -> None:
    oracle = subprocess.run(
        [os.environ[ORACLE_PYTHON], FOLDER / "make_golden_library_videos.py"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(oracle.stdout) == GOLDEN


@pytest.mark.parametrize("name", CLIPS)
def test_f30_what_a_file_says_is_measured(name: str, checkpoints: Any) -> None:
    clip = CLIPS[name]
    file = clip.make()
    for family, depth in (("glm4v", 2), ("glm46v", 2), ("kimi_k25", 4), ("minicpmv4_6", 0), ("internvl", 0)):
        adapter = adapter_of(checkpoints(family))
        item = video_item()
        layout = adapter.measure(item, open_media(item, [file], LIMITS))
        video, frames = layout.chunk.video, layout.frames
        assert frames == adapter.measure(item, DecodedVideo(float(clip.rate), clip.frames)).frames
        assert video.sampled_fps == pytest.approx(len(frames) / clip.frames * float(clip.rate))
        assert list(video.frame_times) == pytest.approx([index / float(clip.rate) for index in frames], abs=1e-3)
        # As the processors of images and text pick them out of VideoMetadata.timestamps.
        stamps = [index / float(clip.rate) for index in frames][::depth] if depth else []
        assert list(video.video_timestamps) == pytest.approx(stamps, abs=1e-6)
        sides = (clip.height, clip.width) if clip.rotation else (clip.width, clip.height)
        assert (video.width, video.height) == sides
        assert adapter.prepare(item, open_media(item, [file], LIMITS), layout)[0].shape == tuple(
            layout.input.tensors[0].shape
        )


def test_f30_times_of_a_variable_rate_are_the_frames_own(checkpoints: Any) -> None:
    file = MP4.with_times(VARIABLE_TIMES).make()
    item = video_item()
    for family, depth in (("glm46v", 2), ("kimi_k25", 4)):
        layout = adapter_of(checkpoints(family)).measure(item, open_media(item, [file], LIMITS))
        shown = [float(VARIABLE_TIMES[index]) for index in layout.frames]
        assert list(layout.chunk.video.video_timestamps) == pytest.approx(shown[::depth], abs=1e-3)


def test_frames_that_come_as_images_are_all_taken(checkpoints: Any) -> None:
    files = [png(number) for number in range(9)]
    item = MediaItem(modality=Modality.MODALITY_VIDEO, frames=FrameSequence(fps=4.0))
    for family in LIBRARY_CASES:
        layout = adapter_of(checkpoints(family)).measure(item, open_media(item, files, LIMITS))
        assert layout.frames == tuple(range(9)), family
        assert layout.chunk.video.sampled_fps == 4.0
    item.frames.fps = 0.0
    item.video.fps = 1.0
    with pytest.raises(ServiceError, match="rate is not known"):
        adapter_of(checkpoints("kimi_k25")).measure(item, open_media(item, files, LIMITS))


@pytest.mark.parametrize(
    ("family", "options", "field"),
    [
        ("glm4v", {"num_frames": 4}, "num_frames"),
        ("glm46v", {"fps": 1.0}, "fps"),
        ("glm4v", {"min_pixels": 600_000_000}, "min_pixels"),
        ("internvl", {"max_pixels": 1000}, "max_pixels"),
        ("internvl", {"num_frames": 100}, "num_frames"),
        ("llava_onevision", {"max_frames": 4}, "fps"),
        ("kimi_k25", {"min_pixels": 1000}, "min_pixels"),
        ("minicpmv4_6", {"fps": 1.0}, "fps"),
        ("minicpmv4_6", {"use_audio_in_video": True}, "use_audio_in_video"),
    ],
)
def test_options_that_cannot_be_met_are_refused(
    family: str, options: dict[str, Any], field: str, checkpoints: Any
) -> None:
    with pytest.raises(ServiceError) as refused:
        adapter_of(checkpoints(family)).measure(video_item(**options), DecodedVideo(30.0, 60))
    assert (refused.value.reason, refused.value.field) == (Reason.REQUEST_INVALID, f"options.{field}")


def test_options_bound_frames_and_pixels(checkpoints: Any) -> None:
    probe = DecodedVideo(30.0, 240)

    def measured(family: str, **options: Any) -> Any:
        return adapter_of(checkpoints(family)).measure(video_item(**options), probe)

    assert len(measured("internvl", fps=4.0, max_frames=10).frames) == 10
    assert len(measured("kimi_k25", num_frames=9).frames) == 9
    assert len(measured("minicpmv4_6", max_frames=3).frames) == 3
    video = measured("glm4v", max_pixels=3000).chunk.video
    assert video.resized_height * video.resized_width <= 3000
    video = measured("kimi_k25", total_pixels=16 * 1000).chunk.video
    assert (video.resized_height // 14) * (video.resized_width // 14) * 14**2 <= 1000


@pytest.mark.parametrize(
    ("family", "settings", "told"),
    [
        ("glm4v", {"patch_size": 16}, "patch_size"),
        ("kimi_k25", {"temporal_patch_size": 5}, "pos_emb_time"),
        ("kimi_k25", {"size": {"max_height": 2, "max_width": 3}}, "max_width"),
        ("internvl", {"size": {"shortest_edge": 448}}, "height and width"),
        ("internvl", {"do_center_crop": True}, "do_center_crop"),
        ("llava_onevision", {"resample": 2}, "bicubic"),
        ("minicpmv4_6", {"stack_frames": 4}, "stack_frames"),
    ],
)
def test_settings_that_we_do_not_follow_are_refused_at_start(
    family: str, settings: dict[str, Any], told: str, checkpoints: Any
) -> None:
    with pytest.raises(SetupError, match=told):
        adapter_of(checkpoints(family), **settings)
