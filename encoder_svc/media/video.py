"""From the bytes of a video item to something an adapter can measure and decode."""

from __future__ import annotations

from collections.abc import Sequence

from encoder_svc.media.animation import AnimatedWebPProbe
from encoder_svc.media.frame_sequence import FrameSequenceProbe
from encoder_svc.media.limits import MediaLimits
from encoder_svc.media.video_file import VideoFileProbe
from encoder_svc.models.adapter import VideoProbe
from epd.encoder.v1.media_pb2 import MediaItem


def open_video(item: MediaItem, files: Sequence[bytes], limits: MediaLimits) -> VideoProbe:
    """Counts the frames of a video, in the span that its options name.

    Args:
        item: the item without its bytes; if they came as a frame sequence, with that field set.
        files: the video, or its frames.
        limits: what is allowed.

    Raises:
        ServiceError: the bytes are no video that the server knows, a damaged one, or beyond a limit; or the span lies
            outside of it.
    """
    span = item.video.start_seconds, item.video.end_seconds
    if item.WhichOneof("source") == "frames":
        return FrameSequenceProbe(files, item.frames.fps, limits, *span)
    (data,) = files
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return AnimatedWebPProbe(data, limits, *span)
    return VideoFileProbe(data, limits, *span)
