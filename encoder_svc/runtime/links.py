"""The front's end of the link to a child: a ZeroMQ PAIR socket over ipc, driven by the event loop.

ZeroMQ's own thread moves the bytes: sending a media file costs the loop a pointer, not a copy.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
from google.protobuf.message import Message

Receive = Callable[[bytes], None]
"""Takes the envelope of a message of the child."""

_MESSAGES_AT_ONCE = 64
"""Messages that are taken before other work of the loop gets its turn."""


class Link:
    """One link to one life of a child.

    Args:
        context: ZeroMQ's.
        receive: called on the event loop for each message.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], receive: Receive) -> None:
        self._receive = receive
        # A folder that only this user can enter.
        self._path = Path(tempfile.mkdtemp(prefix="encoder-svc-")) / "link"
        self.address = f"ipc://{self._path}"
        self._socket = context.socket(zmq.PAIR)
        self._socket.linger = 0
        # What is under way is bounded by the credits of the scheduler; a mark here could only lose a command.
        self._socket.set_hwm(0)
        self._socket.bind(self.address)
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._closed = False
        self._scheduled = False
        self._loop.add_reader(self._descriptor, self._readable)

    def hide(self) -> None:
        """The child is connected: takes the name away, so that nobody else can, and nothing is left behind."""
        shutil.rmtree(self._path.parent, ignore_errors=True)

    def send(self, message: Message, files: Sequence[bytes] = ()) -> None:
        """Sends an envelope and media files; it never waits. After the child's death it goes nowhere."""
        if self._closed:
            return
        with contextlib.suppress(zmq.Again):  # The child has disconnected: its death is about to be reported.
            self._socket.send_multipart([message.SerializeToString(), *files], zmq.NOBLOCK, copy=False)
        # ZeroMQ's descriptor signals edges: what came in while we sent would otherwise never be seen.
        self._schedule()

    def close(self) -> None:
        """Closes the socket. Idempotent."""
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._descriptor)
            self._socket.close()
            self.hide()

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._readable)

    def _readable(self) -> None:
        self._scheduled = False
        for _ in range(_MESSAGES_AT_ONCE):
            if self._closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._receive(frames[0])
            except BaseException:
                # The loop tells it. No new notice comes of the messages behind this one, so they get their turn here.
                self._schedule()
                raise
        self._schedule()
