"""A caller of gRPC that takes in no message, by a plain socket: gRPC's own clients always take in a little."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from epd.addresses import split_address

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0x0, 0x1, 0x4
_END_STREAM, _END_HEADERS = 0x1, 0x4
_INITIAL_WINDOW_SIZE = 0x4


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(first: bytes, *texts: bytes) -> bytes:
    """A header field of HPACK that enters no table."""
    return first + b"".join(bytes([len(text)]) + text for text in texts)


@asynccontextmanager
async def deaf_call(target: str, method: str, request: bytes = b"") -> AsyncIterator[None]:
    """A call under way, to a method that streams: its first message waits, since the caller has no room for any.

    Args:
        target: of a server without TLS.
        method: such as ``/grpc.health.v1.Health/Watch``.
        request: the one message, serialised.
    """
    reader, writer = await asyncio.open_connection(*split_address(target))
    try:
        headers = b"\x83\x86" + b"".join((  # POST, http
            _literal(b"\x04", method.encode()),
            _literal(b"\x01", target.encode()),
            _literal(b"\x0f\x10", b"application/grpc"),
            _literal(b"\x00", b"te", b"trailers"),
        ))  # fmt: skip
        writer.write(
            _PREFACE
            + _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW_SIZE, 0))
            + _frame(_HEADERS, _END_HEADERS, 1, headers)
            + _frame(_DATA, _END_STREAM, 1, b"\0" + struct.pack(">I", len(request)) + request)
        )
        kind = None
        while kind != _HEADERS:  # gRPC sends them with the first message
            head = await reader.readexactly(9)
            kind = head[3]
            await reader.readexactly(int.from_bytes(head[:3]))
        yield
    finally:
        writer.transport.abort()
