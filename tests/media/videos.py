"""Video files made by FFmpeg's own encoders, out of pictures that integer arithmetic makes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import av
import numpy as np
from av.audio.stream import AudioStream
from av.video.stream import VideoStream
from PIL import Image


def picture(number: int, height: int, width: int) -> np.ndarray:
    """A frame that no other equals: uint8, shape (height, width, 3). A grating that moves over a still one."""
    y, x = np.mgrid[0:height, 0:width]
    still = ((x >> 2) ^ (y >> 2)) * 9
    moving = ((x * 5 + number * 11) & 127) + ((y * 3 + number * 7) & 127)
    return np.stack([moving, (moving + still) // 2, (still + 6 * number) & 255], axis=-1).clip(0, 255).astype(np.uint8)


@dataclass(frozen=True)
class Clip:
    """How a file is made."""

    container: str = "mp4"
    codec: str = "libx264"
    frames: int = 30
    rate: Fraction = Fraction(30)
    height: int = 96
    width: int = 128
    pixel_format: str = "yuv420p"
    options: tuple[tuple[str, str], ...] = ()
    container_options: tuple[tuple[str, str], ...] = ()
    times: tuple[Fraction, ...] = field(default=(), repr=False)
    """When each frame is shown, in seconds; its rate says it otherwise."""
    rotation: int = 0
    """Degrees counter-clockwise by which a player turns the frames."""
    sound: bool = False

    def with_times(self, times: Sequence[Fraction]) -> Clip:
        return replace(self, times=tuple(times), frames=len(times))

    def make(self) -> bytes:
        file = io.BytesIO()
        with av.open(file, "w", format=self.container, options=dict(self.container_options)) as container:
            stream = container.add_stream(self.codec, rate=self.rate, options=dict(self.options))
            assert isinstance(stream, VideoStream)
            stream.width, stream.height, stream.pix_fmt = self.width, self.height, self.pixel_format
            tick = Fraction(1, 1000) if self.times else 1 / self.rate
            stream.codec_context.time_base = tick
            if self.rotation:
                stream.set_display_rotation(self.rotation)
            sound = container.add_stream("aac", rate=16000) if self.sound else None
            assert sound is None or isinstance(sound, AudioStream)
            for number in range(self.frames):
                frame = av.VideoFrame.from_ndarray(picture(number, self.height, self.width), "rgb24")
                frame.pts = round(self.times[number] / tick) if self.times else number
                frame.time_base = tick
                container.mux(stream.encode(frame.reformat(format=self.pixel_format)))
            container.mux(stream.encode())
            if sound is not None:
                silence = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), "fltp", "mono")
                silence.sample_rate = 16000
                container.mux(sound.encode(silence))
                container.mux(sound.encode())
        return file.getvalue()


def decoded(file: bytes, reader: str) -> tuple[list[np.ndarray], list[float]]:
    """All frames as the reference decodes them, and their own times in seconds from the first."""
    with av.open(io.BytesIO(file), "r", format=reader) as container:
        found = list(container.decode(video=0))
    times = [float(frame.time) for frame in found]
    return [frame.to_ndarray(format="rgb24") for frame in found], [time - times[0] for time in times]


def animated_webp(frames: int, durations: Sequence[int], height: int = 40, width: int = 56) -> bytes:
    """An animation of so many frames, each shown for so many milliseconds, without loss."""
    images = [Image.fromarray(picture(number, height, width)) for number in range(frames)]
    file = io.BytesIO()
    images[0].save(file, "WEBP", save_all=True, append_images=images[1:], duration=list(durations), lossless=True)
    return file.getvalue()


def png(number: int, height: int = 40, width: int = 56) -> bytes:
    """A frame as an image file."""
    file = io.BytesIO()
    Image.fromarray(picture(number, height, width)).save(file, "PNG")
    return file.getvalue()


MP4 = Clip(options=(("g", "8"), ("bf", "2"), ("sc_threshold", "0")))
CLIPS: dict[str, tuple[Clip, str]] = {
    "mp4": (MP4, "mov"),
    "mp4 with sound": (replace(MP4, sound=True), "mov"),
    "mov hevc": (Clip("mov", "libx265", options=(("x265-params", "log-level=none:keyint=8"),)), "mov"),
    "mp4 in fragments": (replace(MP4, container_options=(("movflags", "frag_keyframe+empty_moov"),)), "mov"),
    "mp4 of open groups": (
        Clip(frames=40, options=(("x264-params", "open-gop=1:keyint=8:bframes=3:b-adapt=0"),)),
        "mov",
    ),
    "mkv": (replace(MP4, container="matroska"), "matroska"),
    "mkv of open groups": (
        Clip("matroska", frames=40, options=(("x264-params", "open-gop=1:keyint=8:bframes=3:b-adapt=0"),)),
        "matroska",
    ),
    "mkv that refreshes bit by bit": (
        Clip("matroska", frames=40, options=(("x264-params", "intra-refresh=1:keyint=8"),)),
        "matroska",
    ),
    "mkv without a duration": (replace(MP4, container="matroska", container_options=(("live", "1"),)), "matroska"),
    "webm vp8": (
        Clip("webm", "libvpx", frames=40, options=(("g", "12"),)),
        "matroska",
    ),
    "webm vp9": (Clip("webm", "libvpx-vp9", frames=20, options=(("g", "8"), ("cpu-used", "8"))), "matroska"),
    "avi": (Clip("avi", "mpeg4", options=(("bf", "2"), ("g", "6"))), "avi"),
    "avi h264": (Clip("avi", options=(("bf", "2"), ("g", "6"))), "avi"),
    "gif": (Clip("gif", "gif", frames=12, rate=Fraction(20), pixel_format="rgb8"), "gif"),
    "odd sizes": (Clip(height=45, width=67, codec="ffv1", container="matroska", pixel_format="bgr0"), "matroska"),
    "one frame": (replace(MP4, frames=1), "mov"),
    "240 fps": (replace(MP4, rate=Fraction(240), frames=48), "mov"),
    "0.5 fps": (replace(MP4, rate=Fraction(1, 2), frames=6), "mov"),
    "30000/1001 fps": (replace(MP4, rate=Fraction(30000, 1001)), "mov"),
}
"""Files of many kinds, and FFmpeg's name of their reader."""

VARIABLE_TIMES = tuple(Fraction(step, 1000) for step in (0, 40, 80, 500, 540, 1500, 1520, 1540, 3000, 3033, 3067, 4000))
"""A variable rate, in seconds."""
