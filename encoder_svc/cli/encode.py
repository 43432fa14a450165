"""``encoder-svc encode``: sends media files to a server as one prompt, and shows what comes back as it comes."""

from __future__ import annotations

import argparse
import asyncio
import mimetypes
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import encoder_client
from encoder_client import ClientSettings, EncoderClient, EncoderClientError
from encoder_client.credential_arguments import add_credential_arguments, credentials_of
from encoder_client.dtypes import name as dtype_name
from encoder_client.transports import TRANSPORTS
from encoder_svc.errors import SetupError
from epd.encoder.v1.embedding_pb2 import DataType
from epd.encoder.v1.media_pb2 import MediaItem

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    import numpy.typing as npt

    from encoder_client import Embedding
    from encoder_client.events import Event

_ITEM_OF: dict[str, Callable[[bytes], MediaItem]] = {
    "image": encoder_client.image,
    "video": encoder_client.video,
    "audio": encoder_client.audio,
}

_EPILOG = """\
examples:
  encoder-svc encode photo.jpg
  encoder-svc encode --target 10.0.0.7:50051 --save embeddings/ one.jpg two.png

It exits with 0 if every file was encoded, with 1 if not.
"""


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "encode",
        help="send media files to a server and show what comes back",
        description="Sends media files to a server as one prompt, and shows the events as they come.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="an image, a video, or a sound file")
    parser.add_argument(
        "--target", default="127.0.0.1:50051", metavar="HOST:PORT", help="the server (default: 127.0.0.1:50051)"
    )
    parser.add_argument(
        "--modality", choices=sorted(_ITEM_OF), help="what the files are (default: as their names say, else image)"
    )
    parser.add_argument("--transport", choices=TRANSPORTS, default="inline", help="how rows are read (default: inline)")
    parser.add_argument("--save", type=Path, metavar="DIR", help="folder to write FILE.npy to; bfloat16 as float32")
    add_credential_arguments(parser)
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="seconds to wait (default: 120)")
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Encodes the files.

    Returns:
        0 if all were, else 1.

    Raises:
        SetupError: a file cannot be read.
    """
    items = [_item(file, arguments.modality) for file in arguments.files]
    try:
        return asyncio.run(_encode(arguments, items))
    except EncoderClientError as error:
        print(f"encoder-svc encode: {error}", file=sys.stderr)
        return 1


async def _encode(arguments: argparse.Namespace, items: list[MediaItem]) -> int:
    begin = time.monotonic()
    print(f"{'ms':>8}  {'event':<9}  {'part':>4}  what")
    settings = ClientSettings(credentials_of(arguments), transports=(arguments.transport,))
    async with EncoderClient(arguments.target, settings) as client:
        async with client.encode(items, timeout=arguments.timeout) as call:
            async for event in call:
                _show(begin, *_describe(event))
                if isinstance(event, encoder_client.Ready):
                    embedding = await client.read(event.chunk)
                    part = event.chunk.part_idx
                    _show(begin, "read", str(part), _describe_read(embedding))
                    if arguments.save is not None:
                        _show(begin, "saved", str(part), str(_save(arguments.save, arguments.files[part], embedding)))
        complete = call.complete
    return 0 if complete is not None and complete.ready == len(items) else 1


def _item(file: Path, modality: str | None) -> MediaItem:
    kind = modality or (mimetypes.guess_type(file.name)[0] or "").partition("/")[0]
    return _ITEM_OF.get(kind, _ITEM_OF["image"])(_read(file))


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise SetupError(f"cannot read {file}: {error.strerror}") from None


def _show(begin: float, event: str, part: str, what: str) -> None:
    print(f"{1000 * (time.monotonic() - begin):8.1f}  {event:<9}  {part:>4}  {what}", flush=True)


def _describe(event: Event) -> tuple[str, str, str]:
    """The columns of an event: its name, its part, and what it says."""
    match event:
        case encoder_client.Accepted():
            return "accepted", "", f"request {event.request_id}, {event.num_parts} parts"
        case encoder_client.Layout(chunk):
            return "layout", str(chunk.part_idx), f"grid {tuple(chunk.grid_dim)}, {chunk.token_count} rows"
        case encoder_client.Ready(chunk) if chunk.from_cache:
            return "ready", str(chunk.part_idx), f"{chunk.nbytes} bytes; from the server's cache"
        case encoder_client.Ready(chunk):
            times = chunk.timings
            stages = {"prepare": times.prepare, "forward": times.forward, "total": times.total}
            told = ", ".join(f"{stage} {duration.ToMicroseconds() / 1000:.1f} ms" for stage, duration in stages.items())
            return "ready", str(chunk.part_idx), f"{chunk.nbytes} bytes; {told}"
        case encoder_client.PartFailed():
            return "failed", str(event.part_idx), str(event.error)
        case encoder_client.PartCancelled():
            return "cancelled", str(event.part_idx), ""
        case encoder_client.Complete():
            return "complete", "", f"{event.ready} ready, {event.failed} failed, {event.cancelled} cancelled"


def _describe_read(embedding: Embedding) -> str:
    spec = embedding.chunk.tensors[0]
    shape = "×".join(str(size) for size in spec.shape)
    milliseconds = 1000 * embedding.read_seconds
    return f"{shape} {dtype_name(spec.dtype)} by {embedding.transport} in {milliseconds:.1f} ms"


def _save(folder: Path, file: Path, embedding: Embedding) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{file.name}.npy"
    np.save(path, _rows(embedding), allow_pickle=False)
    return path


def _rows(embedding: Embedding) -> npt.NDArray[np.generic]:
    rows = embedding.numpy()
    if embedding.chunk.tensors[0].dtype != DataType.DATA_TYPE_BFLOAT16:
        return rows
    # NumPy files know no bfloat16: it is the upper half of a float32.
    return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
