"""The texts that stand for media items in a prompt: what the families' processors in transformers 5.24 write."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from encoder_client.language.family import Expansion, RowToken
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk


def rows_alone(token: RowToken, chunk: EmbeddingChunk) -> str:
    """One token for each row. What stands around them is the chat template's."""
    return token.text * chunk.token_count


def between(before: str, after: str) -> Expansion:
    """The rows between two tokens, as InternVL has it."""

    def expand(token: RowToken, chunk: EmbeddingChunk) -> str:
        return f"{before}{token.text * chunk.token_count}{after}"

    return expand


def timed(step: Callable[[float, str], str]) -> Expansion:
    """The rows of each temporal patch with the time at which it is shown.

    Args:
        step: (seconds, the temporal patch's tokens) → its text.
    """

    def expand(token: RowToken, chunk: EmbeddingChunk) -> str:
        times = list(chunk.video.video_timestamps)
        rows = token.text * share(chunk, times, "video.video_timestamps")
        return "".join(step(seconds, rows) for seconds in times)

    return expand


def seconds_before(seconds: float, rows: str) -> str:
    """Qwen3-VL's text of a temporal patch."""
    return f"<{seconds:.1f} seconds><|vision_start|>{rows}<|vision_end|>"


def whole_seconds_after(seconds: float, rows: str) -> str:
    """GLM-4.1V's text of a temporal patch."""
    return f"<|begin_of_image|>{rows}<|end_of_image|>{int(seconds)}"


def seconds_after(seconds: float, rows: str) -> str:
    """GLM-4.6V's text of a temporal patch."""
    return f"<|begin_of_image|>{rows}<|end_of_image|>{seconds:.1f} seconds"


def clock_before(seconds: float, rows: str) -> str:
    """Kimi K2.5's text of a chunk of frames."""
    clock = f"{time.strftime('%H:%M:%S', time.gmtime(seconds))}.{int(seconds % 1 * 1000):03d}"
    return f"{clock}<|media_begin|>video<|media_content|>{rows}<|media_end|>"


def numbered_frames(before: str, after: str) -> Expansion:
    """The rows of each frame with its number, as InternVL has it. The grid's first dimension counts the frames."""

    def expand(token: RowToken, chunk: EmbeddingChunk) -> str:
        frames = range(_first(chunk))
        rows = token.text * share(chunk, frames, "grid_dim")
        return "\n".join(f"Frame{number + 1}: {before}{rows}{after}" for number in frames)

    return expand


def lines(line_break: str, end: str) -> Expansion:
    """A token after each line of rows, and another one after the last, as Pixtral has it. The grid is (h, w)."""

    def expand(token: RowToken, chunk: EmbeddingChunk) -> str:
        merge = getattr(token.config, "spatial_merge_size", 1)
        grid = list(chunk.grid_dim)[-2:]
        height, width = (size // merge for size in grid) if len(grid) == 2 else (0, 0)
        if height * width != chunk.token_count:
            raise ValueError(f"a grid_dim (h, w) that makes {chunk.token_count} rows")
        return line_break.join([token.text * width] * height) + end

    return expand


def crops(token: RowToken, chunk: EmbeddingChunk) -> str:
    """Gemma 3: the whole image, then its crops, if there are any. The grid's first dimension counts them all."""
    pieces = range(_first(chunk))
    rows = token.text * share(chunk, pieces, "grid_dim")
    whole = f"\n\n<start_of_image>{rows}<end_of_image>\n\n"
    if len(pieces) == 1:
        return whole
    shown = " ".join([whole] * (len(pieces) - 1))
    return f"Here is the original image {whole} and here are some crops to help you see better {shown}"


def sliced(sizes: str, grids: str) -> Expansion:
    """Images, or the frames of a video, each followed by its slices, behind their number, as MiniCPM-V has it.

    Args:
        sizes: the name of the sizes in patches of every image and slice; shape (all of them, 2).
        grids: the name of the rows and columns of slices of each image; shape (images, 2), zeros where there are none.
    """

    def expand(token: RowToken, chunk: EmbeddingChunk) -> str:
        patches = [height * width for height, width in _pairs(chunk, sizes)]
        a_row, rest = divmod(sum(patches), chunk.token_count)
        shown = _pairs(chunk, grids)
        if rest or len(patches) != sum(1 + rows * columns for rows, columns in shown):
            raise ValueError(f"{sizes} and {grids} that make its {chunk.token_count} rows")
        texts = iter([token.text * (count // a_row) for count in patches])
        pieces = []
        for rows, columns in shown:
            whole = f"<image>{next(texts)}</image>"
            lines = ("".join(f"<slice>{next(texts)}</slice>" for _ in range(columns)) for _ in range(rows))
            pieces.append(whole + "\n".join(lines))
        return _number(token, chunk) + "".join(pieces)

    return expand


def _number(token: RowToken, chunk: EmbeddingChunk) -> str:
    switch = _ints(chunk, "use_image_id")
    return f"<image_id>{token.number}</image_id>" if any(switch) else ""


def _pairs(chunk: EmbeddingChunk, name: str) -> list[tuple[int, int]]:
    values = _ints(chunk, name)
    return list(zip(values[::2], values[1::2], strict=True))


def _ints(chunk: EmbeddingChunk, name: str) -> list[int]:
    for value in chunk.placeholder_metadata:
        if value.name == name:
            return list(value.ints.values)
    raise ValueError(name)


def _first(chunk: EmbeddingChunk) -> int:
    return chunk.grid_dim[0] if chunk.grid_dim else 0


def share(chunk: EmbeddingChunk, pieces: Sequence[object], name: str) -> int:
    """How many rows each piece has.

    Raises:
        ValueError: they cannot be shared out.
    """
    if not pieces or chunk.token_count % len(pieces):
        raise ValueError(f"{name} that divides its {chunk.token_count} rows")
    return chunk.token_count // len(pieces)
