"""``FetchResponse`` to and from its wire form, without the copies that a message object would make.

A message is field 1, ``data``: a tag byte, the length as a varint, the bytes.
https://protobuf.dev/programming-guides/encoding
"""

from __future__ import annotations

from google.protobuf.message import DecodeError

from epd.encoder.v1.encoder_service_pb2 import FetchResponse

_TAG = FetchResponse.DATA_FIELD_NUMBER << 3 | 2
_LONGEST_LENGTH = 4
"""Bytes of the varint: a length below 256 MiB, far above that of a piece."""


def write_piece(data: memoryview) -> bytes:
    """A serialised ``FetchResponse``: one copy of the bytes, shape (nbytes,)."""
    head, rest = bytearray((_TAG,)), len(data)
    while rest > 0x7F:
        head.append(rest & 0x7F | 0x80)
        rest >>= 7
    head.append(rest)
    return b"".join((head, data))


def parse_piece(wire: bytes) -> memoryview:
    """The data of a serialised ``FetchResponse``, without a copy.

    Raises:
        ValueError: it is none.
    """
    if not wire:
        return memoryview(b"")
    length = 0
    if wire[0] == _TAG:
        for index, byte in enumerate(wire[1 : 1 + _LONGEST_LENGTH]):
            length |= (byte & 0x7F) << 7 * index
            if byte < 0x80:
                data = memoryview(wire)[2 + index :]
                if len(data) == length:
                    return data
                break
    # More than today's message holds: a later server's, or none at all.
    try:
        return memoryview(FetchResponse.FromString(wire).data)
    except DecodeError:
        raise ValueError("it is no FetchResponse") from None
