"""Videos: which frames there are, when they are shown, their pixels, and what is refused before it is decoded."""

from __future__ import annotations

import io
import resource
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import av
import numpy as np
import pytest
import torch
from av.video.frame import VideoFrame

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media import video_file
from encoder_svc.media.limits import MediaLimits
from encoder_svc.media.video import open_video
from encoder_svc.media.video_file import VideoFileProbe
from encoder_svc.models.adapter import VideoProbe
from epd.encoder.v1.media_pb2 import FrameSequence, MediaItem, Modality, VideoOptions
from tests.media.videos import CLIPS, MP4, VARIABLE_TIMES, Clip, animated_webp, decoded, picture, png

LIMITS = MediaLimits(
    image_pixels=1_000_000, video_pixels=1_000_000, video_frames=1000, video_seconds=600.0, audio_seconds=600.0
)


@cache
def file_of(name: str) -> bytes:
    return CLIPS[name][0].make()


def probe_of(*files: bytes, fps: float | None = None, limits: MediaLimits = LIMITS, **options: Any) -> VideoProbe:
    item = MediaItem(modality=Modality.MODALITY_VIDEO, video=VideoOptions(**options))
    if fps is not None:
        item.frames.CopyFrom(FrameSequence(fps=fps))
    return open_video(item, files, limits)


def refused(*files: bytes, **options: Any) -> ServiceError:
    with pytest.raises(ServiceError) as error:
        probe_of(*files, **options)
    return error.value


@pytest.mark.parametrize("name", CLIPS)
def test_frames_and_times_are_those_of_the_file(name: str) -> None:
    clip, reader = CLIPS[name]
    file = file_of(name)
    frames, times = decoded(file, reader)
    probe = probe_of(file)
    assert len(frames) == clip.frames
    assert len(probe.frame_times) == clip.frames
    assert (probe.width, probe.height) == (clip.width, clip.height)
    tick = 1e-3 if reader == "matroska" else 1e-9
    if reader != "avi":  # its decoder makes up times that leave gaps
        assert probe.frame_times == pytest.approx(times, abs=1e-9)
    assert probe.frame_times == pytest.approx([number / clip.rate for number in range(clip.frames)], abs=tick)
    assert probe.fps == pytest.approx(float(clip.rate), rel=1e-2 if reader == "matroska" else 1e-9)
    assert probe.duration == pytest.approx(clip.frames / float(clip.rate), abs=2e-3)
    last = clip.frames - 1
    choices: list[list[int]] = [list(range(clip.frames)), [last], [0, 0, last, last], [*range(0, clip.frames, 7)]]
    choices += [[number] for number in range(0, clip.frames, 11)]
    for indices in choices:
        found = list(probe.frames(indices))
        assert len(found) == len(indices)
        for index, pixels in zip(indices, found, strict=True):
            assert pixels.dtype == torch.uint8
            assert np.array_equal(pixels.numpy(), frames[index]), f"frame {index} of {indices}"


def test_hidden_frames_of_vp8_are_not_counted() -> None:
    file = file_of("webm vp8")
    with av.open(io.BytesIO(file), "r", format="matroska") as container:
        packets = [bytes(packet) for packet in container.demux(video=0) if packet.size]
    hidden = bytes([packets[5][0] & ~0x10]) + packets[5][1:]
    altered = file.replace(packets[5], hidden)
    frames, times = decoded(altered, "matroska")
    probe = probe_of(altered)
    assert len(frames) == len(probe.frame_times) == len(packets) - 1
    assert probe.frame_times == pytest.approx(times)
    assert np.array_equal(next(iter(probe.frames([5]))), frames[5])


def test_a_key_frame_that_decoding_cannot_begin_at_is_found_out() -> None:
    probe = probe_of(file_of("mkv that refreshes bit by bit"))
    assert isinstance(probe, VideoFileProbe)
    assert len(probe._index.random_access) > 1, "the file has one group: the test shows nothing"


def test_groups_without_a_wanted_frame_are_not_decoded() -> None:
    probe = VideoFileProbe(replace(MP4, frames=80).make(), LIMITS)
    runs = probe._index.runs([41, 43, 72])
    fed = sum(sum(place in run for place in range(80)) for run, _ in runs)
    assert [wanted for _, wanted in runs] == [[41, 43], [72]]
    assert fed == 16, "two groups of eight"
    opened = VideoFileProbe(file_of("mp4 of open groups"), LIMITS)
    frame = next(iter(opened._index.leading))
    ((run, _),) = opened._index.runs([frame])
    assert sum(place in run for place in opened._index.random_access) == 2, "a frame shown before its key frame"


@pytest.mark.parametrize("container", ["mp4", "matroska"])
def test_a_variable_rate_keeps_its_times(container: str) -> None:
    clip = replace(MP4, container=container).with_times(VARIABLE_TIMES)
    probe = probe_of(clip.make())
    assert probe.frame_times == pytest.approx([float(time) for time in VARIABLE_TIMES], abs=1e-3)
    assert probe.fps == pytest.approx(len(VARIABLE_TIMES) / probe.duration, rel=1e-2)


@pytest.mark.parametrize("degrees", [90, 180, 270])
def test_frames_are_turned_as_a_player_turns_them(degrees: int) -> None:
    probe = probe_of(replace(MP4, rotation=degrees, frames=2).make())
    upright = probe_of(replace(MP4, frames=2).make())
    for turned, plain in zip(probe.frames([0, 1]), upright.frames([0, 1]), strict=True):
        assert np.array_equal(turned.numpy(), np.rot90(plain.numpy(), degrees // 90))
        assert turned.shape == (probe.height, probe.width, 3)
        assert turned.is_contiguous()


@pytest.mark.parametrize(
    ("start", "end", "first", "count"),
    [
        (0.0, 0.0, 0, 30),
        (0.5, 0.0, 15, 15),
        (0.0, 0.5, 0, 15),
        (0.1, 0.2, 3, 3),
        (0.11, 0.12, 3, 1),
        (0.99, 0.0, 29, 1),
        (0.2, 9.0, 6, 24),
    ],
)
def test_a_span_begins_with_the_frame_that_is_shown_then(start: float, end: float, first: int, count: int) -> None:
    whole = probe_of(file_of("mp4"))
    probe = probe_of(file_of("mp4"), start_seconds=start, end_seconds=end)
    assert len(probe.frame_times) == count
    assert probe.frame_times == pytest.approx([number / 30 for number in range(count)])
    assert probe.duration == pytest.approx(count / 30)
    (pixels,) = probe.frames([count - 1])
    (expected,) = whole.frames([first + count - 1])
    assert torch.equal(pixels, expected)


def test_the_sound_of_the_span_goes_with_it() -> None:
    assert probe_of(file_of("mp4")).audio is None
    file = file_of("mp4 with sound")
    whole = probe_of(file).audio
    part = probe_of(file, start_seconds=0.25, end_seconds=0.5).audio
    assert whole is not None
    assert part is not None
    assert whole.source_sampling_rate == 16000
    assert len(part.waveform(16000)) == pytest.approx(0.25 * 16000, abs=700)  # whole frames of the video
    assert len(whole.waveform(16000)) >= 16000


def test_a_span_behind_the_end_is_refused() -> None:
    error = refused(file_of("mp4"), start_seconds=1.0)
    assert (error.reason, error.field) == (Reason.REQUEST_INVALID, "options.start_seconds")
    assert "1.000 s" in error.message


def test_an_animated_webp_is_a_video() -> None:
    durations = [40, 0, 200, 40, 100]
    probe = probe_of(animated_webp(5, durations))
    assert probe.frame_times == pytest.approx([0, 0.04, 0.14, 0.34, 0.38])
    assert probe.duration == pytest.approx(0.48)
    found = [pixels.numpy() for pixels in probe.frames([0, 2, 2, 4])]
    for number, pixels in zip([0, 2, 2, 4], found, strict=True):
        assert np.array_equal(pixels, picture(number, 40, 56))
    assert len(probe_of(animated_webp(5, durations), start_seconds=0.2).frame_times) == 3


def test_frames_may_come_as_images() -> None:
    files = [png(number) for number in range(4)]
    probe = probe_of(*files, fps=2.0)
    assert (probe.fps, probe.duration, list(probe.frame_times)) == (2.0, 2.0, [0.0, 0.5, 1.0, 1.5])
    for number, pixels in zip([1, 1, 3], probe.frames([1, 1, 3]), strict=True):
        assert np.array_equal(pixels.numpy(), picture(number, 40, 56))
    assert probe_of(*files, fps=0.0).fps == 0.0
    assert refused(*files, fps=0.0, start_seconds=1.0).field == "frames.fps"
    assert "frame 1" in refused(files[0], png(1, 48), fps=1.0).message


@pytest.mark.parametrize(
    ("clip", "limits", "word"),
    [
        (MP4, {"video_frames": 29}, "frames"),
        (MP4, {"video_seconds": 0.9}, "lasts"),
        (MP4, {"video_pixels": 96 * 128 - 1}, "128×96"),
    ],
)
def test_f20_limits_are_named(clip: Clip, limits: dict[str, Any], word: str) -> None:
    error = refused(clip.make(), limits=replace(LIMITS, **limits))
    assert error.reason == Reason.MEDIA_TOO_LARGE
    assert word in error.message
    images = [png(number) for number in range(4)]
    assert refused(*images, fps=1.0, limits=replace(LIMITS, video_frames=3)).reason == Reason.MEDIA_TOO_LARGE
    assert refused(*images, fps=0.01, limits=replace(LIMITS, video_seconds=99)).reason == Reason.MEDIA_TOO_LARGE
    webp = animated_webp(5, [100] * 5)
    assert refused(webp, limits=replace(LIMITS, video_frames=4)).reason == Reason.MEDIA_TOO_LARGE
    assert refused(webp, limits=replace(LIMITS, video_seconds=0.4)).reason == Reason.MEDIA_TOO_LARGE


def still_bomb(width: int, height: int, frames: int) -> bytes:
    """One grey picture, repeated: each frame takes a few bytes and unpacks to all its pixels."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("libx264", rate=60, options={"preset": "ultrafast", "g": "100000"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        frame = av.VideoFrame(width, height, "yuv420p")
        for plane in frame.planes:
            plane.update(b"\x80" * plane.buffer_size)
        for number in range(frames):
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def test_f20_a_video_bomb_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    # Large frames of a few bytes each.
    file = still_bomb(2560, 1440, 120)
    assert len(file) < 40_000
    roomy = replace(LIMITS, video_pixels=9_000_000)
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    decoded = 0
    decode = video_file._decode

    def counted(*arguments: Any) -> Iterator[VideoFrame]:
        nonlocal decoded
        for frame in decode(*arguments):
            decoded += 1
            yield frame

    monkeypatch.setattr(video_file, "_decode", counted)
    assert refused(file, limits=LIMITS).reason == Reason.MEDIA_TOO_LARGE
    # Frames beyond any memory behind a header that tells of small ones.
    small = Clip("avi", "mjpeg", frames=3, pixel_format="yuvj420p").make()
    told = b"\xff\xc0\x00\x11\x08" + (96).to_bytes(2, "big") + (128).to_bytes(2, "big")
    bomb = small.replace(told, told[:5] + (40_000).to_bytes(2, "big") * 2)
    assert bomb != small
    assert refused(bomb, limits=roomy).reason == Reason.MEDIA_CORRUPT
    assert decoded == 0
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held < 200_000


def test_f20_frames_that_unpack_too_far_are_refused() -> None:
    # A GIF of a large canvas, then thousands of frames of one pixel.
    canvas = b"GIF89a" + (3000).to_bytes(2, "little") * 2 + b"\x80\0\0" + bytes(6)
    frame = b"!\xf9\x04\0\x04\0\0\0" + b"," + bytes(4) + b"\x01\0\x01\0\0" + b"\x02\x02D\x01\0"
    first = b"!\xf9\x04\0\x04\0\0\0" + b"," + bytes(4) + b"\x01\0\x01\0\0" + b"\x02\x02D\x01\0"
    file = canvas + first + frame * 900 + b";"
    error = refused(file, limits=replace(LIMITS, video_pixels=9_000_000))
    assert error.reason == Reason.MEDIA_TOO_LARGE
    assert "pixels a byte" in error.message


@pytest.mark.parametrize("name", ["mp4", "mkv", "webm vp9", "avi", "gif"])
def test_damaged_and_cut_files_fail_with_words_of_our_own(name: str) -> None:
    file = file_of(name)
    generator = np.random.default_rng(7)
    for trial in range(24):
        bad = bytearray(file if trial % 3 else file[: int(len(file) * generator.uniform(0.02, 0.95))])
        if trial % 3:
            for place in generator.integers(0, len(bad), 1 + trial):
                bad[place] = generator.integers(256)
        # Anything else than a ServiceError ends the test.
        with suppress(ServiceError):
            probe = probe_of(bytes(bad))
            assert sum(1 for _ in probe.frames(range(len(probe.frame_times)))) == len(probe.frame_times)


def moov_first(file: bytes) -> bytes:
    """The same MP4 with its index before the frames, as servers send it."""
    boxes = {}
    position = 0
    while position < len(file):
        size = int.from_bytes(file[position : position + 4], "big")
        boxes[file[position + 4 : position + 8]] = file[position : position + size]
        position += size
    index = bytearray(boxes[b"moov"])
    place = index.index(b"stco") + 8
    for number in range(int.from_bytes(index[place : place + 4], "big")):
        entry = place + 4 + 4 * number
        index[entry : entry + 4] = (int.from_bytes(index[entry : entry + 4], "big") + len(index)).to_bytes(4, "big")
    return boxes.pop(b"ftyp") + bytes(index) + b"".join(box for kind, box in boxes.items() if kind != b"moov")


def test_a_cut_mp4_is_told_as_cut() -> None:
    assert refused(file_of("mp4")[:-2000]).reason == Reason.MEDIA_TRUNCATED
    pieces = file_of("mp4 in fragments")
    probe = probe_of(file_of("mp4"))
    moved = moov_first(file_of("mp4"))
    assert len(probe_of(moved).frame_times) == len(probe.frame_times)
    assert refused(moved[: len(moved) * 2 // 3]).reason == Reason.MEDIA_TRUNCATED
    assert refused(pieces[:600]).reason in (Reason.MEDIA_TRUNCATED, Reason.MEDIA_CORRUPT)


@pytest.mark.parametrize("name", ["mkv", "webm vp8"])
def test_a_cut_matroska_file_is_told_as_cut(name: str) -> None:
    file = file_of(name)
    for size in (len(file) - 1, len(file) * 9 // 10, len(file) // 2):
        assert refused(file[:size]).reason == Reason.MEDIA_TRUNCATED
    # What was recorded live has no size to end before.
    live = file_of("mkv without a duration")
    assert len(probe_of(live[: len(live) * 2 // 3]).frame_times) < len(probe_of(live).frame_times)


def test_what_is_no_video_is_refused() -> None:
    assert refused(b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n" * 9).reason == Reason.MEDIA_UNRECOGNIZED
    assert refused(b"ffconcat version 1.0\nfile /etc/passwd\n" * 9).reason == Reason.MEDIA_UNRECOGNIZED
    assert refused(png(0)).reason == Reason.MEDIA_UNRECOGNIZED
    sound = io.BytesIO()
    with av.open(sound, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), "fltp", "mono")
        frame.sample_rate = 16000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    error = refused(sound.getvalue())
    assert error.reason == Reason.MEDIA_UNSUPPORTED
    assert "no video track" in error.message


def test_a_codec_that_few_have_hardened_is_refused() -> None:
    error = refused(Clip("avi", "huffyuv", frames=2, pixel_format="yuv422p", rate=Fraction(10)).make())
    assert error.reason == Reason.MEDIA_UNSUPPORTED
    assert "huffyuv" in error.message
