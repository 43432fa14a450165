"""Which frames a video file has and when each is shown, found by reading its packets once and decoding none.

Headers are not asked: Matroska and WebM hold no count, files that were recorded live hold no duration, and a variable
rate is no rate. A packet holds one frame, but for two kinds that are left out: those that an edit list hides, and
VP8's alternate references, which are never shown.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from av.container import InputContainer
from av.packet import Packet
from av.video.stream import VideoStream

from encoder_svc.media.limits import MediaLimits
from encoder_svc.media.video_checks import check_frame_count

PLAUSIBLE_RATE = 0.01
"""A rate in a header that is further, in proportion, from what the packets say is not believed."""

_VP8_IS_SHOWN = 0x10  # show_frame of the frame tag (RFC 6386, section 9.1)


@dataclass(frozen=True)
class FrameIndex:
    """The frames of one video track, in the order in which they are shown."""

    stamps: tuple[int, ...]
    """The presentation time of each, in ticks of the track's clock."""
    times: tuple[float, ...]
    """The same in seconds from the first."""
    fps: float
    """Frames a second on average: the header's rate if the packets bear it out, else theirs."""
    seconds: float
    """From the first frame to the end of the last."""
    packets: tuple[int, ...]
    """For each frame, its packet's place in the file. Empty: the file does not tell which packet makes which frame, so
    frames must be counted while they are decoded."""
    random_access: tuple[int, ...]
    """The places of the packets at which decoding can begin, ascending."""
    leading: frozenset[int]
    """Frames that are shown before the key frame that their packet follows: they need the group before it too."""

    def runs(self, frames: Iterable[int]) -> list[tuple[range, list[int]]]:
        """What has to be decoded for some frames.

        Args:
            frames: ascending.

        Returns:
            Packets that follow one another, beginning where decoding can begin, and the frames that come out of them.
        """
        groups: dict[int, list[int]] = {}
        for frame in frames:
            group = bisect_right(self.random_access, self.packets[frame]) - 1
            groups.setdefault(group, []).append(frame)
            if frame in self.leading and group:
                groups.setdefault(group - 1, [])
        ends = [*self.random_access[1:], 1 << 62]
        runs = []
        for _, run in groupby(enumerate(sorted(groups)), key=lambda place: place[1] - place[0]):
            members = [group for _, group in run]
            packets = range(self.random_access[members[0]], ends[members[-1]])
            runs.append((packets, sorted(frame for group in members for frame in groups[group])))
        return runs


@dataclass(frozen=True)
class _Entry:
    stamp: int
    packet: int
    group_stamp: int
    """The presentation time of the key frame that begins its group."""
    duration: int


def coded_packets(container: InputContainer, stream: VideoStream) -> Iterator[Packet[VideoStream]]:
    """The packets of a track that hold something, in the file's order: the n-th is the same at every reading."""
    return (packet for packet in container.demux(stream) if packet.size)


def read_frame_index(container: InputContainer, stream: VideoStream, limits: MediaLimits) -> FrameIndex:
    """Reads all packets of a track.

    Args:
        container: a file that was just opened.
        stream: its video track.
        limits: what is allowed.

    Raises:
        ServiceError: there is no frame, or there are too many.
        av.FFmpegError: the file is damaged.
    """
    # AVI stores no presentation times: FFmpeg makes them up from the order of the packets.
    counted = container.format.name == "avi"
    is_vp8 = stream.codec_context.name == "vp8"
    entries: list[_Entry] = []
    random_access: list[int] = []
    group_stamp = 0
    for number, packet in enumerate(coded_packets(container, stream)):
        stamp = packet.dts if counted or packet.pts is None else packet.pts
        if stamp is None:
            stamp, counted = number, True
        if packet.is_keyframe or not random_access:
            random_access.append(number)
            group_stamp = stamp
        if packet.is_discard or (is_vp8 and not memoryview(packet)[0] & _VP8_IS_SHOWN):
            continue
        counted = counted or packet.pts is None
        check_frame_count(len(entries) + 1, limits)
        entries.append(_Entry(stamp, number, group_stamp, packet.duration or 0))
    check_frame_count(len(entries), limits)
    entries.sort(key=lambda entry: entry.stamp)
    stamps = tuple(entry.stamp for entry in entries)
    counted = counted or len(set(stamps)) < len(stamps)
    return _index(entries, stamps, tuple(random_access), counted, stream)


def _index(
    entries: Sequence[_Entry],
    stamps: tuple[int, ...],
    random_access: tuple[int, ...],
    counted: bool,
    stream: VideoStream,
) -> FrameIndex:
    tick = stream.time_base
    assert tick is not None
    span = stamps[-1] - stamps[0]
    told = stream.average_rate or stream.guessed_rate
    last = entries[-1].duration
    if not last and len(entries) > 1:
        last = round(span / (len(entries) - 1))
    measured = len(entries) / float((span + last) * tick) if span + last else 0.0
    fps = float(told) if told else measured
    if len(entries) > 1 and measured and abs(fps - measured) > PLAUSIBLE_RATE * measured:
        fps = measured
    return FrameIndex(
        stamps=stamps,
        times=tuple(float((stamp - stamps[0]) * tick) for stamp in stamps),
        fps=fps or 1.0,
        seconds=float((span + last) * tick) if span + last else 1 / (fps or 1.0),
        packets=() if counted else tuple(entry.packet for entry in entries),
        random_access=random_access,
        leading=frozenset(frame for frame, entry in enumerate(entries) if entry.stamp < entry.group_stamp),
    )
