"""Lengths of MiMo-V2's sound: from mel frames to codes to rows, and the rows that belong to each unit of a video.

A unit is one temporal step of a video's grid. Sound is encoded whole; what no unit shows is cut away behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from encoder_svc.models.mimo_v2_config import MimoAudio, MimoTokenizer


def split_segments(frames: int, segment: int) -> list[int]:
    """The lengths of the segments that a sound is tokenized in, in mel frames; the last may be shorter."""
    whole, rest = divmod(frames, segment)
    return [segment] * whole + ([rest] if rest else [])


def positions_of(frames: int) -> int:
    """Positions behind the tokenizer's two convolutions (kernel 3, padding 1; the second with stride 2)."""
    return (frames - 1) // 2 + 1


def codes_of(frames: int, tokenizer: MimoTokenizer, segment: int) -> int:
    """Codes of each channel that a sound is tokenized into.

    Args:
        frames: of mel, at least one.
        tokenizer: the tokenizer.
        segment: mel frames that are tokenized together.
    """
    return sum(-(-positions_of(length) // tokenizer.avg_pooler) for length in split_segments(frames, segment))


def rows_of(frames: int, tokenizer: MimoTokenizer, audio: MimoAudio) -> int:
    """Rows of a sound of so many mel frames: 6.25 a second with the published settings."""
    return -(-codes_of(frames, tokenizer, audio.audio_segment_size) // audio.group_size)


@dataclass(frozen=True)
class SoundUnits:
    """What of a sound belongs to which unit of its video."""

    lengths: tuple[int, ...]
    """Rows of each unit; 0 behind the end of the sound."""
    start: int
    """The first row that a unit shows."""

    @property
    def shown(self) -> int:
        """Rows that units show; they follow one another."""
        return sum(self.lengths)


def cut_units(unit_times: Sequence[float], end: float, rows: int, rate: float) -> SoundUnits:
    """Cuts a sound at the times of a video's units.

    A unit begins at row ``int(time · rate)`` and ends where the next begins, the last one at ``end``. A unit
    behind the end of the sound has no rows.

    Args:
        unit_times: when each unit begins, in seconds from the start of the sound, ascending.
        end: of the last unit, in seconds.
        rows: of the whole sound.
        rate: rows a second.
    """
    bounds = [min(int(time * rate), rows) for time in (*unit_times, end)]
    lengths = tuple(max(0, after - before) for before, after in pairwise(bounds))
    return SoundUnits(lengths, bounds[0])
