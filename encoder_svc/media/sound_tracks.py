"""The two libraries that decode sound: libsndfile for plain sound files, FFmpeg (PyAV) for the tracks of containers.

Neither may guess: each gets what :mod:`~encoder_svc.media.sound_formats` recognised. FFmpeg's guess would include
playlists, which make it open other files and addresses.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import av
import numpy as np
import numpy.typing as npt
import soundfile
from av.error import FFmpegError

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.sound_formats import SoundFormat, behind_tag, recognize

Samples = npt.NDArray[np.float32]
"""Shape (frames, channels), from -1 to 1. A frame is one sample of each channel."""

BLOCK_SAMPLES = 1 << 18
"""Samples of all channels together that are decoded at a time."""

UNKNOWN_FRAMES = 1 << 40
"""libsndfile gives more than so many for a stream whose header does not tell."""

LOST_FRAMES = 2304
"""An MP3 file may have less by so many (two of its blocks) than its header counts."""


class SoundTrack(Protocol):
    """A sound track whose header was read."""

    @property
    def sampling_rate(self) -> int:
        """Frames a second."""
        ...

    @property
    def channels(self) -> int:
        """Samples in a frame."""
        ...

    @property
    def frames(self) -> int | None:
        """Its length as the header tells it. None: it does not."""
        ...

    def blocks(self) -> Iterator[Samples]:
        """Decodes from the start, a few frames at a time.

        Raises:
            ServiceError: the file is truncated or corrupt.
        """
        ...


def open_track(data: bytes) -> SoundTrack:
    """Recognises a file and reads its header.

    Raises:
        ServiceError: the bytes are no file with sound, or a damaged or truncated one.
    """
    found = recognize(data)
    if found.ends_early(data):
        raise _truncated(found)
    if found.container:
        return ContainerTrack(data, found)
    plain = PlainTrack(data, found)
    # libsndfile misses the end of a FLAC stream whose header does not tell its length.
    return ContainerTrack(data, replace(found, container="flac")) if plain.frames is None else plain


class PlainTrack:
    """A file that libsndfile decodes.

    Args:
        data: the file.
        found: its format.

    Raises:
        ServiceError: its header is damaged.
    """

    def __init__(self, data: bytes, found: SoundFormat) -> None:
        self._format = found
        # What players write before a FLAC file is no part of it.
        self._bytes = io.BytesIO(data[behind_tag(data) :] if found.title == "FLAC" else data)
        try:
            self._file = soundfile.SoundFile(self._bytes)
        except soundfile.SoundFileError as error:
            raise _corrupt(found, "header") from error
        self.sampling_rate: int = self._file.samplerate
        self.channels: int = self._file.channels
        self.frames: int | None = self._file.frames if self._file.frames < UNKNOWN_FRAMES else None
        # Without a count in its first block, the length of an MP3 file is a guess.
        counted = found.title != "MP3" or any(mark in data[: 1 << 16] for mark in (b"Xing", b"Info", b"VBRI"))
        self._promised = self.frames - LOST_FRAMES if counted and self.frames is not None else 0

    def blocks(self) -> Iterator[Samples]:
        """See :meth:`SoundTrack.blocks`."""
        size, read = max(1, BLOCK_SAMPLES // self.channels), 0
        while True:
            try:
                block: Samples = self._file.read(size, dtype="float32", always_2d=True)
            except soundfile.SoundFileError as error:
                at_end = self._bytes.tell() >= len(self._bytes.getbuffer())
                raise (_truncated(self._format) if at_end else _corrupt(self._format, "sound")) from error
            if not len(block):
                break
            read += len(block)
            yield block
        if read < self._promised:
            raise _truncated(self._format)


class ContainerTrack:
    """The best sound track of a container, decoded by FFmpeg.

    Args:
        data: the file.
        found: its format.

    Raises:
        ServiceError: its header is damaged, or it has no sound.
    """

    def __init__(self, data: bytes, found: SoundFormat) -> None:
        self._format = found
        self._size = len(data)
        self._bytes = io.BytesIO(data)
        try:
            container = av.open(self._bytes, mode="r", format=found.container, metadata_errors="ignore")
            stream = container.streams.best("audio")
        except (FFmpegError, ValueError) as error:
            raise _corrupt(found, "header") from error
        if not isinstance(stream, av.AudioStream):
            raise ServiceError(Reason.MEDIA_UNSUPPORTED, "the file has no sound; send one that has a sound track")
        self._container = container
        self._stream = stream
        self.begins: float = 0.0
        """When its first block is heard, in seconds of the file's clock. Known once that is decoded."""
        self.sampling_rate: int = stream.codec_context.sample_rate
        self.channels: int = stream.codec_context.channels
        if self.sampling_rate <= 0 or self.channels <= 0:
            raise _corrupt(found, "header")
        self.frames: int | None = None
        if stream.duration is not None and stream.time_base is not None:
            self.frames = int(stream.duration * stream.time_base * self.sampling_rate)
        elif container.duration is not None:
            self.frames = int(container.duration / av.time_base * self.sampling_rate)

    def blocks(self) -> Iterator[Samples]:
        """See :meth:`SoundTrack.blocks`."""
        try:
            for number, frame in enumerate(self._container.decode(self._stream)):
                if not number:
                    self.begins = frame.time or 0.0
                if frame.sample_rate != self.sampling_rate or frame.layout.nb_channels != self.channels:
                    raise ServiceError(
                        Reason.MEDIA_UNSUPPORTED,
                        "the sound changes its sampling rate or channels midway; convert it to one of each",
                    )
                yield _floats(frame)
        except FFmpegError as error:
            at_end = self._bytes.tell() >= self._size
            raise (_truncated(self._format) if at_end else _corrupt(self._format, "sound")) from error


def _floats(frame: av.AudioFrame) -> Samples:
    array = frame.to_ndarray()
    samples = array.T if frame.format.is_planar else array.reshape(-1, frame.layout.nb_channels)
    if samples.dtype.kind == "f":
        return samples.astype(np.float32)
    full = float(1 << 8 * samples.dtype.itemsize - 1)
    center = full if samples.dtype.kind == "u" else 0.0
    return ((samples.astype(np.float64) - center) / full).astype(np.float32)


def _corrupt(found: SoundFormat, place: str) -> ServiceError:
    return ServiceError(
        Reason.MEDIA_CORRUPT, f"the {place} of the {found.title} file cannot be decoded; save the sound again"
    )


def _truncated(found: SoundFormat) -> ServiceError:
    return ServiceError(Reason.MEDIA_TRUNCATED, f"the {found.title} file ends too early; send the whole file")
