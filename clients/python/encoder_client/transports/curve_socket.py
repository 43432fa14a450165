"""A socket of libzmq's, for what is encrypted by CURVE."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack

import zmq
from zmq.utils.monitor import parse_monitor_message

from encoder_client.transports import TransportError
from encoder_client.transports import zeromq_link as link
from encoder_client.transports.zeromq_link import LOST, Answers
from epd.zeromq_reads import MOST_ANSWERS, PIECE_BYTES

_CURVE_BYTES = 4096  # of what CURVE adds to a message, at most

_MESSAGES_AT_ONCE = 16
"""Pieces that are taken before other work of the loop gets its turn: each is a copy of up to a MiB."""

_LOST = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class CurveSocket:
    """An encrypted connection, which begins when it is made.

    Args:
        context: ZeroMQ's.
        endpoint: of a ROUTER socket, such as ``tcp://10.0.0.7:7000``.
        public_key: that it must have, 32 bytes.
        answers: takes what comes.

    Raises:
        zmq.ZMQError: there is no socket to be had.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, public_key: bytes, answers: Answers
    ) -> None:
        self._answers = answers
        self._loop = asyncio.get_running_loop()
        self._ended = False
        self._scheduled = False
        with ExitStack() as stack:
            self._socket: zmq.Socket[bytes] = stack.enter_context(context.socket(zmq.DEALER))
            _set_up(self._socket, public_key)
            self._monitor: zmq.Socket[bytes] = stack.enter_context(self._socket.get_monitor_socket(_LOST))
            self._socket.connect(endpoint)
            stack.pop_all()
        self._descriptors = [int(socket.getsockopt(zmq.FD)) for socket in (self._socket, self._monitor)]
        for descriptor, act in zip(self._descriptors, (self._readable, self._look_after), strict=True):
            self._loop.add_reader(descriptor, act)
        # A descriptor of ZeroMQ signals only once its socket was looked at and had nothing.
        self._loop.call_soon(self._look_after)

    def send(self, request: bytes) -> None:
        """See :class:`~encoder_client.transports.zeromq_link.ZeroMqLink`."""
        try:
            self._socket.send(request, zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise TransportError(f"the encoder cannot be asked: {error.strerror}") from None
        self._schedule()

    def look_again(self) -> None:
        """See :class:`~encoder_client.transports.zeromq_link.ZeroMqLink`. A piece comes as a whole, or not yet."""

    def close(self) -> None:
        """See :class:`~encoder_client.transports.zeromq_link.ZeroMqLink`."""
        if self._ended:
            return
        self._ended = True
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()

    def _schedule(self) -> None:
        """Looks soon. ZeroMQ's descriptor signals edges: what came in while we sent would otherwise never be seen."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._readable)

    def _readable(self) -> None:
        self._scheduled = False
        for _ in range(_MESSAGES_AT_ONCE):
            if self._ended or not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            answer, *frames = self._socket.recv_multipart(copy=False)
            nbytes = len(frames[0].buffer) if frames else 0
            self._answers.begin(answer.bytes, nbytes, len(frames) <= 1)
            if nbytes and (target := self._answers.target) is not None:
                target[:] = frames[0].buffer
                self._answers.took(nbytes)
        self._schedule()

    def _look_after(self) -> None:
        """The connection is lost, or was never made. What is asked by it is not worth waiting for."""
        while not self._ended and self._monitor.poll(0):
            if parse_monitor_message(self._monitor.recv_multipart())["event"] & _LOST:
                self.close()
                self._answers.lost(LOST)


def _set_up(socket: zmq.Socket[bytes], public_key: bytes) -> None:
    socket.linger = 0
    socket.ipv6 = True
    # An answer that nobody asked for is bounded, too.
    socket.maxmsgsize = PIECE_BYTES + _CURVE_BYTES
    socket.rcvhwm = MOST_ANSWERS
    socket.heartbeat_ivl = int(1000 * link.HEARTBEAT_SECONDS)
    socket.heartbeat_timeout = int(1000 * link.SILENCE_SECONDS)
    socket.curve_serverkey = public_key
    socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
