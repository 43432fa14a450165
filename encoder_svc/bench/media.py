"""What is sent: files of one kind, none of which comes twice."""

from __future__ import annotations

import io
import itertools
import struct
from fractions import Fraction
from typing import Literal, Protocol, get_args

import numpy as np

from encoder_client import audio as sound
from encoder_client import image, video
from encoder_svc.bench.photographs import Photographs
from encoder_svc.errors import SetupError
from epd.encoder.v1.media_pb2 import MediaItem, VideoOptions

MediumName = Literal["image", "video", "audio"]

MEDIUM_NAMES: tuple[MediumName, ...] = get_args(MediumName)

CLIP_SECONDS, CLIP_RATE, CLIP_KEY_FRAME_EVERY = 4, 30, 60
"""Of a video."""
SAMPLED_FPS = 2.0
"""Of a video, in the service and in the plain loop."""
SOUND_SECONDS, SOUND_RATE = 10, 16_000

_CLIPS = 4
_SOUNDS = 16
_SHIFT = 3
"""Pixels by which the picture of a video moves from frame to frame."""


class Media(Protocol):
    """Files that are sent again and again, each time with a number of its own in a place that decoders skip."""

    @property
    def suffix(self) -> str:
        """Of the files' names."""
        ...

    @property
    def files(self) -> list[bytes]:
        """What the plain loop goes round."""
        ...

    def next(self) -> MediaItem:
        """An item whose bytes were never given before: different bytes are different content."""
        ...


class ImageItems:
    """Photographs.

    Args:
        side: pixels.
        count: how many different pictures there are.
    """

    suffix = ".jpg"

    def __init__(self, side: int, count: int) -> None:
        self._photographs = Photographs(side, count)
        self.files = self._photographs.files

    def next(self) -> MediaItem:
        """See :class:`Media`."""
        return image(self._photographs.next())


class VideoItems:
    """H.264 in MP4: photographs that move.

    Args:
        side: pixels of a frame, which it keeps.
    """

    suffix = ".mp4"

    def __init__(self, side: int) -> None:
        if side % 2:
            raise SetupError(f"--image-size {side}: the sides of a video are even numbers")
        self.files = [_clip(picture) for picture in Photographs(2 * side, _CLIPS).pictures()]
        self._options = VideoOptions(fps=SAMPLED_FPS, min_pixels=side * side, max_pixels=side * side)
        self._numbers = itertools.count()

    def next(self) -> MediaItem:
        """See :class:`Media`: the number is in a box of free space (ISO 14496-12, 8.1.2)."""
        number = next(self._numbers)
        box = struct.pack(">I4sQ", 16, b"free", number)
        return video(self.files[number % len(self.files)] + box, options=self._options)


class SoundItems:
    """WAV files: noise that swells as speech does."""

    suffix = ".wav"

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        time = np.arange(SOUND_SECONDS * SOUND_RATE) / SOUND_RATE
        swell = np.abs(np.sin(2 * np.pi * 3 * time))
        self.files = [
            _wav((8000 * swell * generator.standard_normal(len(time))).clip(-32768, 32767).astype("<i2").tobytes())
            for _ in range(_SOUNDS)
        ]
        self._numbers = itertools.count()

    def next(self) -> MediaItem:
        """See :class:`Media`: the number is in a chunk that no reader knows."""
        number = next(self._numbers)
        file = self.files[number % len(self.files)] + struct.pack("<4sIQ", b"note", 8, number)
        return sound(file[:4] + struct.pack("<I", len(file) - 8) + file[8:])


def make_media(medium: MediumName, side: int, count: int) -> Media:
    """The media of a run.

    Args:
        medium: their kind.
        side: of images and videos, in pixels.
        count: of different images.

    Raises:
        SetupError: scikit-image is not installed, or there is no such video.
    """
    if medium == "image":
        return ImageItems(side, count)
    return VideoItems(side) if medium == "video" else SoundItems()


def _clip(picture: np.ndarray) -> bytes:
    """A window of half the picture's side that moves over it: uint8, shape (2·side, 2·side, 3) → a file."""
    import av
    from av.video.stream import VideoStream

    side = len(picture) // 2
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(CLIP_RATE), options={"g": str(CLIP_KEY_FRAME_EVERY)})
        assert isinstance(stream, VideoStream)
        stream.width, stream.height, stream.pix_fmt = side, side, "yuv420p"
        for number in range(CLIP_SECONDS * CLIP_RATE):
            place = (_SHIFT * number) % side
            window = np.ascontiguousarray(picture[place : place + side, place : place + side])
            frame = av.VideoFrame.from_ndarray(window, "rgb24")
            frame.pts = number
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


def _wav(samples: bytes) -> bytes:
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, SOUND_RATE, 2 * SOUND_RATE, 2, 16)
    body = b"WAVE" + form + struct.pack("<4sI", b"data", len(samples)) + samples
    return struct.pack("<4sI", b"RIFF", len(body)) + body
