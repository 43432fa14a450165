"""The front's end of the link to a child: a pair of unix stream sockets, one of which the child inherits.

:mod:`encoder_svc.link_messages` says how messages lie in the stream. The event loop writes as much as the kernel takes
(a few hundred kilobytes) and the rest when the child has read: neither a media file nor a child that is busy holds it.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self, cast

from google.protobuf.message import Message

from encoder_svc.link_messages import PREFIX_BYTES, header, read_prefix

Receive = Callable[[bytes], None]
"""Takes the envelope of a message of the child."""

_BUFFER_BYTES = 1 << 20
"""Asked of the kernel, which gives what it allows."""


class Link(asyncio.Protocol):
    """One link to one life of a child. Made by :meth:`open`.

    What is under way is bounded by the credits of the scheduler (two items, two batches), so no send has to wait.
    """

    def __init__(self, receive: Receive, far: socket.socket) -> None:
        self._receive = receive
        self._far = far
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()
        self._ended = asyncio.Event()

    @classmethod
    async def open(cls, receive: Receive) -> Self:
        """Makes both ends.

        Args:
            receive: called on the event loop for each message. What it raises is told by the loop and ends nothing.
        """
        near, far = socket.socketpair()
        for end in (near, far):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        near.setblocking(False)
        _, link = await asyncio.get_running_loop().create_unix_connection(lambda: cls(receive, far), sock=near)
        return link

    @property
    def far(self) -> int:
        """The descriptor of the child's end, until :meth:`handed_over`."""
        return self._far.fileno()

    def handed_over(self) -> None:
        """The child has its end: lets go of ours, so that each side sees the other's death as the end of the stream."""
        self._far.close()

    def send(self, message: Message, files: Sequence[bytes] = ()) -> None:
        """Sends an envelope and media files; it never waits. After the child's death it goes nowhere."""
        if self._transport is None or self._transport.is_closing():
            return
        envelope = message.SerializeToString()
        self._transport.writelines((header(envelope, files), envelope, *files))

    async def drain(self, seconds: float) -> None:
        """Waits until all that the child has sent is received; to be called when it has ended."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()

    def close(self) -> None:
        """Ends the link. Idempotent."""
        self._far.close()
        if self._transport is not None:
            self._transport.abort()

    # What the transport calls (asyncio.Protocol).

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The near end is on the loop."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are no subclass

    def data_received(self, data: bytes) -> None:
        """Bytes of the child's reports have come."""
        self._unread += data
        try:
            envelopes = self._take_envelopes()
        except ValueError as error:
            # Without this end of the stream the child ends too.
            self.close()
            _tell_loop("a child sent what is no report", error)
            return
        for envelope in envelopes:
            try:
                self._receive(envelope)
            except Exception as error:
                # Those behind it have their turn all the same.
                _tell_loop("a report of a child was not taken", error)

    def connection_lost(self, error: Exception | None) -> None:
        """The child's end is closed. That it has ended is told by its exit, not by this."""
        self._ended.set()

    def _take_envelopes(self) -> list[bytes]:
        envelopes = []
        unread, at = self._unread, 0
        while len(unread) - at >= PREFIX_BYTES:
            envelope_bytes, files = read_prefix(unread, at)
            if files:
                raise ValueError("a report comes with files")
            start, end = at + PREFIX_BYTES, at + PREFIX_BYTES + envelope_bytes
            if end > len(unread):
                break
            envelopes.append(bytes(unread[start:end]))
            at = end
        del unread[:at]
        return envelopes


def _tell_loop(message: str, error: Exception) -> None:
    asyncio.get_running_loop().call_exception_handler({"message": message, "exception": error})
