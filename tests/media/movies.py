"""Video files with sound: any number of tracks, of any rate and layout, that begin when they are told to."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any

import av
import numpy as np

from tests.media.sounds import Waves
from tests.media.videos import picture


@dataclass(frozen=True)
class Track:
    """One sound track."""

    waves: Waves
    """Shape (frames, channels), from -1 to 1."""
    rate: int
    layout: str = "mono"
    codec: str = "aac"
    begins: float = 0.0
    """Seconds after the first frame of the picture."""


def movie(
    seconds: float, *tracks: Track, fps: int = 10, container: str = "mp4", height: int = 64, width: int = 96
) -> bytes:
    """A video file whose pictures all differ."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream("libx264", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        sounds: list[Any] = [output.add_stream(track.codec, rate=track.rate, layout=track.layout) for track in tracks]
        for number in range(round(seconds * fps)):
            frame = av.VideoFrame.from_ndarray(picture(number, height, width), "rgb24")
            frame.pts = number
            output.mux(stream.encode(frame.reformat(format="yuv420p")))
        output.mux(stream.encode())
        for track, sound in zip(tracks, sounds, strict=True):
            whole = av.AudioFrame.from_ndarray(np.ascontiguousarray(track.waves.T), "fltp", track.layout)
            whole.sample_rate = track.rate
            whole.pts = round(track.begins * track.rate)
            size = sound.codec_context.frame_size or 1024
            resampler = av.AudioResampler(format=sound.format, layout=track.layout, rate=track.rate, frame_size=size)
            for part in (*resampler.resample(whole), *resampler.resample(None), None):
                output.mux(sound.encode(part))
    return file.getvalue()
