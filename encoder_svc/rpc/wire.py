"""Takes an ``EncodeRequest`` apart as it came over the wire: media on one side, everything else on the other.

The protobuf runtime would copy the media into a message of its own, which keeps them until the whole message goes, and
then once more for whoever reads the field. Here they are copied once, into objects that can go one by one.

Encoding: https://protobuf.dev/programming-guides/encoding. A field is a varint ``number << 3 | type`` and a value; of
the types only LEN (a varint and that many bytes) is looked into, and only on the way to ``items[].data``.
"""

from __future__ import annotations

import contextlib

from google.protobuf.message import DecodeError

from encoder_svc.rpc.media_options import invalid
from epd.encoder.v1.encoder_service_pb2 import EncodeRequest
from epd.encoder.v1.media_pb2 import MediaItem

_VARINT, _FIXED64, _LEN, _FIXED32 = 0, 1, 2, 5
_FIXED_BYTES = {_FIXED64: 8, _FIXED32: 4}

_ITEMS = EncodeRequest.ITEMS_FIELD_NUMBER << 3 | _LEN
_DATA = MediaItem.DATA_FIELD_NUMBER << 3 | _LEN
_NO_DATA = bytes((_DATA, 0))
"""An empty ``data``: it stands for the file, so that a later ``uri`` or ``frames`` still takes its place."""

_LONGEST_VARINT = 10
_SMALL_BYTES = 64 << 10
"""A message up to here is parsed and its media taken out in less time than it takes to look for them."""


class _UnusualError(Exception):
    """The message is damaged, or holds what no protobuf runtime of today writes."""


def parse_encode_request(wire: bytes) -> tuple[EncodeRequest, dict[int, bytes]]:
    """Parses a serialised ``EncodeRequest``.

    Returns:
        The message, in which each ``items[i].data`` is set but empty; and for each such ``i`` the file.

    Raises:
        ServiceError: it is no ``EncodeRequest``.
    """
    lean: bytes = wire
    files: dict[int, bytes] = {}
    if len(wire) > _SMALL_BYTES:
        # The protobuf runtime is the judge of what is unusual. If it takes the message, the files are in it.
        with contextlib.suppress(_UnusualError):
            lean, files = _split_request(wire)
    try:
        request = EncodeRequest.FromString(lean)
    except DecodeError:
        raise invalid("request", "is not a serialised EncodeRequest") from None
    for index, item in enumerate(request.items):
        if item.WhichOneof("source") != "data":
            files.pop(index, None)
        elif item.data:
            files[index] = item.data
            item.data = b""
    return request, files


def _split_request(wire: bytes) -> tuple[bytes, dict[int, bytes]]:
    lean: list[bytes] = []
    files: dict[int, bytes] = {}
    at = items = kept = 0
    while at < len(wire):
        field, start, end = _field(wire, at, len(wire))
        if field == _ITEMS:
            item, file = _split_item(wire, start, end)
            if file is not None:
                files[items] = file
                lean += (wire[kept:at], bytes((_ITEMS,)), _varint(len(item)), item)
                kept = end
            items += 1
        at = end
    lean.append(wire[kept:])
    return b"".join(lean), files


def _split_item(wire: bytes, at: int, end: int) -> tuple[bytes, bytes | None]:
    """An item without its file, and the file; of several the last one counts."""
    lean: list[bytes] = []
    file = None
    kept = at
    while at < end:
        field, value, following = _field(wire, at, end)
        if field == _DATA:
            file = wire[value:following]
            lean += (wire[kept:at], _NO_DATA)
            kept = following
        at = following
    if file is None:
        return b"", None
    lean.append(wire[kept:end])
    return b"".join(lean), file


def _field(wire: bytes, at: int, end: int) -> tuple[int, int, int]:
    """A field's number and type as they are written, where its value begins, and where the field ends."""
    field, at = _read_varint(wire, at, end)
    kind = field & 7
    start = at
    if kind == _LEN:
        size, start = _read_varint(wire, at, end)
        at = start + size
    elif kind == _VARINT:
        _, at = _read_varint(wire, at, end)
    elif kind in _FIXED_BYTES:
        at += _FIXED_BYTES[kind]
    else:
        raise _UnusualError
    if at > end:
        raise _UnusualError
    return field, start, at


def _read_varint(wire: bytes, at: int, end: int) -> tuple[int, int]:
    value = 0
    for place in range(min(_LONGEST_VARINT, end - at)):
        byte = wire[at + place]
        value |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return value, at + place + 1
    raise _UnusualError


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
