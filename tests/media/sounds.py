"""Sound files of many kinds, made here: real encoders, known samples."""

from __future__ import annotations

import io
import struct
from typing import Any

import av
import numpy as np
import numpy.typing as npt
import soundfile

Waves = npt.NDArray[np.float32]


def tones(seconds: float, rate: int, channels: int = 1) -> Waves:
    """A chord that differs from channel to channel, with a slow swell; shape (frames, channels)."""
    times = np.arange(round(seconds * rate)) / rate
    swell = 0.6 + 0.4 * np.sin(2 * np.pi * 0.7 * times)
    columns = [
        swell * (0.3 * np.sin(2 * np.pi * (220 + 90 * channel) * times) + 0.1 * np.sin(2 * np.pi * 1870 * times))
        for channel in range(channels)
    ]
    return np.stack(columns, axis=1).astype(np.float32)


def plain(waves: Waves, rate: int, kind: str = "WAV", subtype: str | None = None) -> bytes:
    """A file of one of libsndfile's formats."""
    file = io.BytesIO()
    soundfile.write(file, waves, rate, format=kind, subtype=subtype)
    return file.getvalue()


def contained(waves: Waves, rate: int, container: str, codec: str, layout: str = "mono", **options: str) -> bytes:
    """A file of one of FFmpeg's formats."""
    file = io.BytesIO()
    with av.open(file, "w", format=container, options=options) as output:
        stream: Any = output.add_stream(codec, rate=rate, layout=layout)
        _encode(output, stream, waves, rate, layout)
    return file.getvalue()


def silent_movie() -> bytes:
    """An MP4 file without a sound track."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream: Any = output.add_stream("mpeg4", rate=10)
        stream.width = stream.height = 64
        stream.pix_fmt = "yuv420p"
        for _ in range(3):
            frame = av.VideoFrame.from_ndarray(np.zeros((64, 64, 3), np.uint8), format="rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def _encode(output: Any, stream: Any, waves: Waves, rate: int, layout: str) -> None:
    whole = av.AudioFrame.from_ndarray(np.ascontiguousarray(waves.T), format="fltp", layout=layout)
    whole.sample_rate = rate
    size = stream.codec_context.frame_size or 1024
    resampler = av.AudioResampler(format=stream.format, layout=layout, rate=rate, frame_size=size)
    for frame in (*resampler.resample(whole), *resampler.resample(None), None):
        output.mux(stream.encode(frame))


def with_promised_frames(flac: bytes, frames: int) -> bytes:
    """A FLAC file whose header promises so many frames; 0: it tells nothing."""
    bits = int.from_bytes(flac[18:26]) & ~((1 << 36) - 1) | frames
    return flac[:18] + bits.to_bytes(8) + flac[26:]


def with_promised_bytes(wav: bytes, size: int) -> bytes:
    """A WAV file whose header promises so many bytes of samples."""
    place = wav.index(b"data") + 4
    return wav[:place] + struct.pack("<I", size) + wav[place + 4 :]
