"""How messages lie in the stream between the front and a child.

All numbers are little-endian::

    4 bytes   length of the envelope, a serialised protobuf message
    4 bytes   number of files
    8 bytes   length of a file, for each
    envelope, then the files

Commands may have files; reports have none.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

PREFIX_BYTES = 8
FILE_LENGTH_BYTES = 8
ENVELOPE_LIMIT = 64 << 20
"""Bytes of an envelope: above it the stream is damaged, or its writer is."""

_PREFIX = struct.Struct("<II")
_LENGTH = struct.Struct("<Q")
assert (_PREFIX.size, _LENGTH.size) == (PREFIX_BYTES, FILE_LENGTH_BYTES)


def header(envelope: bytes, files: Sequence[bytes]) -> bytes:
    """What goes before an envelope and its files."""
    return _PREFIX.pack(len(envelope), len(files)) + b"".join(_LENGTH.pack(len(file)) for file in files)


def read_prefix(data: bytes | bytearray | memoryview, at: int = 0) -> tuple[int, int]:
    """The length of the envelope and the number of files.

    Raises:
        ValueError: no message begins here.
    """
    envelope_bytes, files = _PREFIX.unpack_from(data, at)
    if envelope_bytes > ENVELOPE_LIMIT:
        raise ValueError(f"an envelope of {envelope_bytes} bytes is announced")
    return envelope_bytes, files


def read_lengths(data: bytes) -> list[int]:
    """The lengths of the files."""
    return [length for (length,) in _LENGTH.iter_unpack(data)]
