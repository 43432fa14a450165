"""The serving half of ZeroMQ: peers ask for pieces of a slot that they have the key of, and get them without a copy.

Its threads are its own: one of Python that looks at requests, and one of ZeroMQ that moves the bytes. A peer that does
not read is owed a few pieces at most; what it asks for beyond them is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils import z85

from encoder_svc.shared_memory import SharedMemory
from encoder_svc.transports import TransportUnavailableError
from encoder_svc.transports.serving_thread import ServingThread
from encoder_svc.transports.zeromq_peers import EVENTS, ZeroMqPeers
from epd import slot_header
from epd.encoder.v1.embedding_pb2 import Locator, ZeroMqLocator
from epd.zeromq_reads import (
    MOST_ANSWERS,
    PIECE_BYTES,
    Request,
    State,
    parse_request,
    write_answer,
)

log = logging.getLogger(__name__)

FindSlot = Callable[[int], int | None]
"""From where a header begins to the bytes of its payload; None: there is no slot."""

_WAITING_CONNECTIONS = 128
_MESSAGE_BYTES = 4096  # of a request 64, with CURVE some more, and of CURVE's handshake some hundreds
_HANDSHAKE_MILLISECONDS = 10_000
# A peer that is gone without a word is noticed, and what waits for it dropped.
_HEARTBEAT_MILLISECONDS, _SILENCE_MILLISECONDS = 10_000, 60_000


class ZeroMqServer(ServingThread[list[zmq.Frame]]):
    """Answers reads of one arena, for the life of the process.

    Args:
        socket: a bound ROUTER, which belongs to this thread from now on.
        peers: bounds its connections.
        arena: what is read.
        find: where its slots are.
        locator: see :class:`~encoder_svc.transports.TransportServer`.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], peers: ZeroMqPeers, arena: SharedMemory, find: FindSlot, locator: Locator
    ) -> None:
        super().__init__("zeromq")
        self.locator = locator
        self._socket = socket
        self._peers = peers
        self._arena = arena
        self._find = find

    def receive(self) -> list[zmq.Frame]:
        """Waits for a message: the name of a peer, and what it sends."""
        return self._socket.recv_multipart(copy=False)

    def handle(self, received: list[zmq.Frame]) -> None:
        """Answers it if it is a request."""
        peer, *frames = received
        request = parse_request(frames[0].bytes) if len(frames) == 1 else None
        if request is not None:
            self._answer(peer, int(frames[0].get(zmq.SRCFD)), request)

    def _answer(self, peer: zmq.Frame, descriptor: int, request: Request) -> None:
        state, piece = self._look_up(request)
        frames: list[zmq.Frame | bytes | memoryview] = [peer, write_answer(request, state)]
        if piece is not None:
            self._peers.has_read(descriptor)
            frames.append(piece)
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError as error:
            # Again: it asks for more than it reads. No route: it has gone.
            log.debug("a piece was not sent: %s", error)

    def _look_up(self, request: Request) -> tuple[State, memoryview | None]:
        nbytes = self._find(request.slot_offset)
        if nbytes is None or not slot_header.is_open(
            self._arena.view, request.slot_offset, request.generation, nbytes, request.key
        ):
            return State.CLOSED, None
        if not 0 < request.length <= PIECE_BYTES or request.offset + request.length > nbytes:
            return State.OUTSIDE, None
        start = request.slot_offset + slot_header.SIZE + request.offset
        return State.OK, self._arena.view[start : start + request.length]


def serve_by_zeromq(
    arena: SharedMemory, find: FindSlot, listen: str, port: int, host: str, curve_key: Path | None
) -> ZeroMqServer:
    """Binds a socket and answers reads of an arena.

    Args:
        arena: what peers may read, slot by slot, if they have the slot's key.
        find: where its slots are.
        listen: the address to listen on.
        port: 0 takes a free one.
        host: the address that peers reach this host by.
        curve_key: the file with this server's CURVE key pair, as ``zmq.auth.create_certificates`` writes it. None: what
            travels, keys of slots among it, is not encrypted.

    Raises:
        TransportUnavailableError: it cannot listen, or cannot encrypt.
    """
    public = b""
    socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.ROUTER)
    socket.linger = 0
    socket.ipv6 = True
    socket.router_mandatory = True
    socket.sndhwm = MOST_ANSWERS
    socket.rcvhwm = MOST_ANSWERS
    socket.maxmsgsize = _MESSAGE_BYTES
    socket.backlog = _WAITING_CONNECTIONS
    socket.handshake_ivl = _HANDSHAKE_MILLISECONDS
    socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MILLISECONDS, _SILENCE_MILLISECONDS
    monitor: zmq.Socket[bytes] = socket.get_monitor_socket(EVENTS)
    try:
        if curve_key is not None:
            public = _encrypt(socket, curve_key)
        socket.bind(f"tcp://{_bracketed(listen)}:{port or '*'}")
    except zmq.ZMQError as error:
        monitor.close()
        socket.close()
        raise TransportUnavailableError(
            f"ZeroMQ cannot listen on {_bracketed(listen)}:{port}: {error.strerror}; set zeromq_listen to an address "
            "of this host, and port 0 or a free one"
        ) from None
    except TransportUnavailableError:
        monitor.close()
        socket.close()
        raise
    bound = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    place = ZeroMqLocator(endpoint=f"tcp://{_bracketed(host)}:{bound}", curve_public_key=public)
    peers = ZeroMqPeers(monitor, int(bound))
    peers.start()
    server = ZeroMqServer(socket, peers, arena, find, Locator(zeromq=place))
    server.start()
    return server


def _encrypt(socket: zmq.Socket[bytes], curve_key: Path) -> bytes:
    """Lets only peers connect that encrypt; returns the public key, 32 bytes."""
    if not zmq.has("curve"):
        raise TransportUnavailableError("this build of ZeroMQ has no CURVE; install a wheel: `pip install -U pyzmq`")
    try:
        public, secret = zmq.auth.load_certificate(curve_key)
    except (OSError, ValueError):
        secret = None
    if secret is None:
        raise TransportUnavailableError(
            f"{curve_key} holds no CURVE key pair; make one: "
            '`python -c \'import zmq.auth; zmq.auth.create_certificates(".", "encoder")\'` writes encoder.key_secret'
        )
    socket.curve_server = True
    socket.curve_secretkey = secret
    return z85.decode(public)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
