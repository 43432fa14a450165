"""When the frames of a video are shown, and what is told of those that were sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.models.adapter import VideoProbe
from encoder_svc.models.frame_sampling import DEFAULT_RATE, times_of
from epd.encoder.v1.embedding_pb2 import VideoMetadata
from epd.encoder.v1.media_pb2 import VideoOptions


@dataclass(frozen=True)
class Timeline:
    """The clock of one video."""

    fps: float
    """Frames a second: of the file on average, or else what is assumed of frames that came as images."""
    times: Sequence[float]
    """When each frame is shown, in seconds from the first."""

    @staticmethod
    def of(probe: VideoProbe, options: VideoOptions, assumed: float | None) -> Timeline:
        """The clock of a probe.

        Args:
            probe: the video.
            options: of the item.
            assumed: frames a second where the probe knows none. None: :data:`DEFAULT_RATE`.

        Raises:
            ServiceError: frames of an unknown rate are to be sampled by rate.
        """
        if options.fps and not probe.fps:
            raise ServiceError(
                Reason.REQUEST_INVALID,
                "fps cannot be sampled from frames whose rate is not known; set frames.fps, or num_frames",
                field="options.fps",
            )
        if probe.fps:
            return Timeline(probe.fps, probe.frame_times)
        fps = assumed or DEFAULT_RATE
        return Timeline(fps, [index / fps for index in range(len(probe.frame_times))])

    @property
    def total(self) -> int:
        """Frames that there are."""
        return len(self.times)

    def sampled_fps(self, indices: Sequence[int]) -> float:
        """Frames a second of those that were sampled, on average."""
        return len(indices) / self.total * self.fps

    def told(self, indices: Sequence[int]) -> list[float]:
        """When frames are shown, as the model is told (:func:`~encoder_svc.models.frame_sampling.times_of`)."""
        return times_of(indices, self.fps, self.times)

    def metadata(
        self, probe: VideoProbe, indices: Sequence[int], height: int, width: int, timestamps: Sequence[float] = ()
    ) -> VideoMetadata:
        """What a chunk tells of a video.

        Args:
            probe: the video.
            indices: of the sampled frames.
            height: of a resized frame, in pixels.
            width: of a resized frame, in pixels.
            timestamps: the times that the prompt shows, in seconds.
        """
        return VideoMetadata(
            width=probe.width,
            height=probe.height,
            resized_width=width,
            resized_height=height,
            sampled_fps=self.sampled_fps(indices),
            frame_times=[self.times[index] for index in indices],
            video_timestamps=timestamps,
        )
