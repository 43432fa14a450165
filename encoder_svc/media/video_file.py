"""Videos: from the bytes of a file to upright RGB frames, one at a time.

Frames are counted and timed from the file's packets (:mod:`~encoder_svc.media.frame_index`), so a variable rate and a
header without count or duration are nothing special. Pixels are those of the reference, transformers'
``read_video_pyav``: FFmpeg's decoder and its conversion to ``rgb24``; what the reference does not do is to turn frames
as the file's display matrix says. Groups of pictures that hold no wanted frame are not decoded.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property

import av
import numpy as np
import torch
from av.container import InputContainer
from av.packet import Packet
from av.stream import Disposition
from av.video.codeccontext import VideoCodecContext
from av.video.frame import VideoFrame
from av.video.stream import VideoStream

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.frame_index import coded_packets, read_frame_index
from encoder_svc.media.limits import MediaLimits
from encoder_svc.media.truncation import ends_early
from encoder_svc.media.video_checks import check_frame_size, check_length, select_span
from encoder_svc.media.video_sound import VideoSoundProbe

MAX_PIXELS_PER_BYTE = 250_000
"""Pixels of all frames for a byte of the file. A still 1080p scene, as frugal as x264 codes it, has 50,000."""

# Formats by what their files begin with, and FFmpeg's name of their reader. FFmpeg may not choose: some of its readers
# (playlists) open other files.
_READERS: tuple[tuple[str, int, tuple[bytes, ...], str], ...] = (
    ("MP4", 4, (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"), "mov"),
    ("Matroska", 0, (b"\x1a\x45\xdf\xa3",), "matroska"),
    ("AVI", 8, (b"AVI ",), "avi"),
    ("GIF", 0, (b"GIF87a", b"GIF89a"), "gif"),
)
_KNOWN = "MP4, MOV, MKV, WebM, AVI, GIF or animated WebP"

# Decoders that see wide use, and so are hardened, by FFmpeg's names. It has some 200 more for video.
_DECODERS = (
    "h264", "hevc", "libdav1d", "av1", "vp8", "vp9", "libvpx", "libvpx-vp9", "mpeg4", "mpeg2video", "mpeg1video",
    "h263", "msmpeg4", "mjpeg", "gif", "png", "prores", "dnxhd", "ffv1", "rawvideo", "theora",
)  # fmt: skip

_DAMAGE = (av.FFmpegError, ValueError, LookupError, EOFError, ArithmeticError)


class VideoFileProbe:
    """A video file whose frames were counted. Its first frame was decoded, since only that tells how it is turned.

    Args:
        data: the file.
        limits: what is allowed.
        start_seconds: where the span begins: with the frame that is shown then. From the file's first frame.
        end_seconds: before which the span ends. 0: at the file's end.

    Raises:
        ServiceError: the bytes are no video of a known format, a damaged one, or beyond a limit; or it ends before the
            span begins.

    Example:
        >>> probe = VideoFileProbe(Path("dog.mp4").read_bytes(), limits)
        >>> frames = [frame for frame in probe.frames(range(0, len(probe.frame_times), 30))]
        >>> frames[0].shape == (probe.height, probe.width, 3)
        True
    """

    def __init__(self, data: bytes, limits: MediaLimits, start_seconds: float = 0.0, end_seconds: float = 0.0) -> None:
        self._data = data
        self._format, self._reader = _recognize(data)
        # Headers lie, so the decoder is bounded too. Twice what is allowed: it counts in whole blocks.
        self._options = {"max_pixels": str(2 * limits.video_pixels), "codec_whitelist": ",".join(_DECODERS)}
        self._limits = limits
        with self._opened("header") as (container, stream):
            self._has_sound = bool(container.streams.audio)
            check_frame_size(stream.codec_context.width, stream.codec_context.height, limits)
            index = read_frame_index(container, stream, limits)
            # Matroska holds no count of frames; its size alone tells.
            lacks_frames = self._format == "Matroska" or stream.frames > len(index.stamps)
            if lacks_frames and ends_early(self._format, data):
                raise ServiceError(Reason.MEDIA_TRUNCATED, "the video ends too early; send the whole file")
        check_length(index.seconds, limits)
        self._index = index
        first = next(self._decode_all([0]))
        self._coded_size = (first.width, first.height)
        self._begins = first.time or 0.0
        check_frame_size(*self._coded_size, limits)
        _check_ratio(first.width * first.height * len(index.stamps), len(data))
        self._quarter_turns = round(first.rotation / 90) % 4
        self._span = select_span(index.times, index.seconds, start_seconds, end_seconds)

    @property
    def width(self) -> int:
        """The upright width in pixels."""
        return self._coded_size[self._quarter_turns % 2]

    @property
    def height(self) -> int:
        """The upright height in pixels."""
        return self._coded_size[1 - self._quarter_turns % 2]

    @property
    def fps(self) -> float:
        """Frames a second: of the whole file on average, as its header says, or as measured if that is no use."""
        return self._index.fps

    @cached_property
    def frame_times(self) -> Sequence[float]:
        """When each frame of the span is shown, in seconds from the first of them."""
        times = self._index.times[self._span.start : self._span.stop]
        return tuple(time - times[0] for time in times)

    @property
    def duration(self) -> float:
        """Seconds of the span: to its last frame's end."""
        index, span = self._index, self._span
        end = index.times[span.stop] if span.stop < len(index.times) else index.seconds
        return end - index.times[span.start]

    @cached_property
    def audio(self) -> VideoSoundProbe | None:
        """The sound of the span, from its first frame on. None: the file has no sound track.

        Raises:
            ServiceError: the sound cannot be decoded, or is too long.
        """
        if not self._has_sound:
            return None
        return VideoSoundProbe(
            self._data,
            self._format,
            self._reader,
            start=self._begins + self._index.times[self._span.start],
            seconds=self.duration if self._span.stop < len(self._index.times) else None,
            max_seconds=self._limits.audio_seconds,
        )

    def frames(self, indices: Sequence[int]) -> Iterator[torch.Tensor]:
        """Decodes frames, one at a time.

        Args:
            indices: into :attr:`frame_times`, ascending; one may stand there more than once.

        Yields:
            For each index its frame: uint8, shape (height, width, 3), RGB, upright.

        Raises:
            ServiceError: the file is truncated or corrupt, or its frames are not all of one size.
        """
        repeats = Counter(self._span.start + index for index in indices)
        decode = self._decode_groups if self._index.packets else self._decode_all
        for count, frame in zip(repeats.values(), decode(list(repeats)), strict=True):
            pixels = self._pixels(frame)
            for _ in range(count):
                yield pixels

    def _pixels(self, frame: VideoFrame) -> torch.Tensor:
        if (frame.width, frame.height) != self._coded_size:
            raise ServiceError(
                Reason.MEDIA_UNSUPPORTED,
                "the size of the video's frames changes in the middle; save it again with one size",
            )
        with self._damage_told("frames"):
            pixels: np.ndarray = frame.to_ndarray(format="rgb24")
        return torch.from_numpy(np.ascontiguousarray(np.rot90(pixels, self._quarter_turns)))

    def _decode_groups(self, wanted: Sequence[int]) -> Iterator[VideoFrame]:
        """Frames by their time stamps, out of the groups of pictures that hold them."""
        done = 0
        with self._opened("frames") as (container, stream):
            packets = enumerate(coded_packets(container, stream))
            for run, members in self._index.runs(wanted):
                found = 0
                for frame in _decode(stream, _packets_of(run, packets)):
                    if frame.pts == self._index.stamps[members[found]]:
                        yield frame
                        found += 1
                        if found == len(members):
                            break
                done += found
                if found < len(members):
                    break
                stream.codec_context.flush_buffers()
        if done < len(wanted):
            # Some files mark packets as key frames at which decoding cannot begin.
            yield from self._decode_all(wanted[done:])

    def _decode_all(self, wanted: Sequence[int]) -> Iterator[VideoFrame]:
        """Frames out of the whole file: by their time stamps, or if those say nothing, by counting."""
        stamps = self._index.stamps if self._index.packets else range(len(self._index.stamps))
        done = 0
        with self._opened("frames") as (container, stream):
            for place, frame in enumerate(_decode(stream, coded_packets(container, stream))):
                if (frame.pts if self._index.packets else place) == stamps[wanted[done]]:
                    yield frame
                    done += 1
                    if done == len(wanted):
                        return
        raise self._damage("frames")

    @contextmanager
    def _opened(self, place: str) -> Iterator[tuple[InputContainer, VideoStream]]:
        """The file and its video track, from the beginning."""
        with (
            self._damage_told(place),
            av.open(
                io.BytesIO(self._data), "r", format=self._reader, options=self._options, metadata_errors="replace"
            ) as container,
        ):
            tracks = [track for track in container.streams.video if not track.disposition & Disposition.attached_pic]
            if not tracks:
                raise ServiceError(Reason.MEDIA_UNSUPPORTED, "the file has no video track; send it as what it is")
            track = tracks[0]
            # Typed as always there, but missing where FFmpeg has no decoder.
            context: VideoCodecContext | None = track.codec_context
            codec = "something unknown" if context is None else context.codec.name
            if codec not in _DECODERS:
                raise ServiceError(
                    Reason.MEDIA_UNSUPPORTED,
                    f"the video is coded as {codec}, which the server does not decode; save it as H.264, H.265, VP9 or "
                    "AV1",
                )
            track.codec_context.options = self._options
            # FFmpeg chooses, as in the reference: one for each core, if the file is coded in slices.
            track.codec_context.thread_count = 0
            yield container, track

    @contextmanager
    def _damage_told(self, place: str) -> Iterator[None]:
        """Turns what FFmpeg raises into the error for the caller."""
        try:
            yield
        except _DAMAGE as error:
            raise self._damage(place) from error

    def _damage(self, place: str) -> ServiceError:
        if ends_early(self._format, self._data):
            return ServiceError(Reason.MEDIA_TRUNCATED, "the video ends too early; send the whole file")
        return ServiceError(
            Reason.MEDIA_CORRUPT, f"the {place} of the {self._format} file cannot be decoded; save the video again"
        )


def _check_ratio(pixels: int, nbytes: int) -> None:
    if pixels > MAX_PIXELS_PER_BYTE * nbytes:
        raise ServiceError(
            Reason.MEDIA_TOO_LARGE,
            f"the video unpacks to {pixels // nbytes} pixels a byte and the server takes {MAX_PIXELS_PER_BYTE}; cut it",
        )


def _decode(stream: VideoStream, packets: Iterator[Packet[VideoStream]]) -> Iterator[VideoFrame]:
    context = stream.codec_context
    for packet in packets:
        yield from context.decode(packet)
    yield from context.decode(None)


def _packets_of(run: range, packets: Iterator[tuple[int, Packet[VideoStream]]]) -> Iterator[Packet[VideoStream]]:
    """Those that belong to a run. By counting and not by a seek: where that lands depends on an index in the file."""
    for number, packet in packets:
        if number >= run.stop:
            return
        if number >= run.start:
            yield packet


def _recognize(data: bytes) -> tuple[str, str]:
    for name, offset, signatures, reader in _READERS:
        if data[offset : offset + 8].startswith(signatures):
            return name, reader
    raise ServiceError(Reason.MEDIA_UNRECOGNIZED, f"the bytes are no video that the server knows; send {_KNOWN}")
