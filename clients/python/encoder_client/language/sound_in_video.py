"""The texts that stand for videos with sound: where the rows of pictures and of sound stand among each other."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import groupby, zip_longest

from encoder_client.language.expansion import rows_alone, share
from encoder_client.language.family import RowToken, sound_rows
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk

OMNI_MARKS = ("audio_token_id", "audio_start_token_id", "audio_end_token_id")
"""What Qwen2.5-Omni and Qwen3-Omni write beside the pictures' tokens."""

MIMO_MARKS = (
    "audio_token_id",
    "audio_start_token_id",
    "audio_end_token_id",
    "video_start_token_id",
    "video_end_token_id",
    "vision_start_token_id",
    "vision_end_token_id",
)
"""What MiMo-V2 writes beside the pictures' tokens."""

WITHOUT_TIME = ""


def in_chunks(token: RowToken, chunk: EmbeddingChunk) -> str:
    """Qwen2.5-Omni: for each 2 s the pictures' rows, then those of sound (``Qwen2_5OmniProcessor``).

    A row of a picture has the time at which it is shown, row k of the sound has time k, in positions. As there, a row
    begins at most one chunk.
    """
    sound = sound_rows(chunk)
    if not sound:
        return rows_alone(token, chunk)
    size = int(token.config.position_id_per_seconds * token.config.seconds_per_chunk)
    times = _step_times(token, chunk)
    rows = chunk.token_count // len(times)
    seen = _chunk_lengths((time for time in times for _ in range(rows)), size)
    heard = _chunk_lengths(range(sound), size)
    pieces = (
        token.text * pictures + token.marks["audio_token_id"] * tones
        for pictures, tones in zip_longest(seen, heard, fillvalue=0)
    )
    return _between_audio_marks(token, "".join(pieces))


def in_time(token: RowToken, chunk: EmbeddingChunk) -> str:
    """Qwen3-Omni: all rows in the order of their times, pictures before sound (``Qwen3OmniMoeProcessor``)."""
    sound = sound_rows(chunk)
    if not sound:
        return rows_alone(token, chunk)
    times = _step_times(token, chunk)
    rows = chunk.token_count // len(times)
    pieces, told = [], 0
    for time in times:
        before = min(math.ceil(time), sound)
        pieces.append(token.marks["audio_token_id"] * (before - told) + token.text * rows)
        told = before
    pieces.append(token.marks["audio_token_id"] * (sound - told))
    return _between_audio_marks(token, "".join(pieces))


def in_units(token: RowToken, chunk: EmbeddingChunk) -> str:
    """MiMo-V2: a unit is a temporal step of the grid, with its time (mm:ss) before its pictures.

    ``video_audio_interleave_length`` says how often sound stands between pictures: 0, behind each unit; -1, once,
    behind all; k, behind all units of each k seconds. A group without sound has none of its marks.
    """
    settings, marks = token.config.processor_config, token.marks
    times = list(chunk.video.video_timestamps)
    lengths = list(chunk.video.audio.video_audio_segment_lens_flat) or [0] * len(times)
    rows = share(chunk, times, "video.video_timestamps")
    if len(lengths) != len(times) or sum(lengths) != sound_rows(chunk):
        raise ValueError("video.audio that cuts its sound into its units")
    every = settings.get("video_audio_interleave_length", 0)

    def group_of(unit: int) -> float:
        return unit if every == 0 else 0 if every < 0 else times[unit] // every

    pieces = []
    for _, units in groupby(range(len(times)), group_of):
        shown = list(units)
        for unit in shown:
            clock = _minutes(times[unit]) if settings.get("use_video_timestamps", True) else WITHOUT_TIME
            pieces.append(f"{clock}{marks['vision_start_token_id']}{token.text * rows}{marks['vision_end_token_id']}")
        if heard := sum(lengths[unit] for unit in shown):
            pieces.append(_between_audio_marks(token, marks["audio_token_id"] * heard))
    return f"{marks['video_start_token_id']}{''.join(pieces)}{marks['video_end_token_id']}"


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"


def _between_audio_marks(token: RowToken, text: str) -> str:
    return f"{token.marks['audio_start_token_id']}{text}{token.marks['audio_end_token_id']}"


def _step_times(token: RowToken, chunk: EmbeddingChunk) -> list[float]:
    """When each temporal step of a video is shown, in positions."""
    given = {value.name: value.doubles.values for value in chunk.placeholder_metadata}
    seconds = given.get("video_second_per_grid") or given.get("second_per_grid_ts")
    if not seconds:
        raise ValueError("video_second_per_grid, which says when its pictures are shown")
    steps = range(chunk.grid_dim[0] if chunk.grid_dim else 0)
    share(chunk, steps, "grid_dim")
    return [step * seconds[0] * token.config.position_id_per_seconds for step in steps]


def _chunk_lengths(times: Iterable[float], size: int) -> list[int]:
    """How many of some ascending times are in each chunk."""
    lengths = [0]
    for time in times:
        if time >= len(lengths) * size:
            lengths.append(0)
        lengths[-1] += 1
    return lengths
