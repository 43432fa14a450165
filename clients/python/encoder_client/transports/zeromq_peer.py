"""One engine's ZeroMQ socket, as a reader sees it: asks for pieces and puts them where they belong."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from encoder_client.checksums import RunningChecksum
from encoder_client.pool.embedding_pool import Slot
from encoder_client.transports import SlotClosedError, TransportError
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, ZeroMqLocator
from epd.zeromq_reads import PIECE_BYTES, Answer, Request, State, parse_answer, write_request

_CURVE_BYTES = 4096  # of what CURVE adds to a message, at most

WINDOW = 8
"""Pieces that are asked for and have not come. The encoder owes a reader a few only, and drops what is beyond them."""

_MESSAGES_AT_ONCE = 16
"""Pieces that are taken before other work of the loop gets its turn: each is a copy of up to a MiB."""
# A host that is gone without a word is noticed. Any message counts, and on a slow link a piece may take seconds.
_HEARTBEAT_MILLISECONDS, _SILENCE_MILLISECONDS = 5_000, 30_000

_LOST = (
    zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class _Read:
    """One slot on its way."""

    def __init__(
        self,
        chunk: EmbeddingChunk,
        slot_offset: int,
        slot: Slot,
        checksum: RunningChecksum,
        ended: asyncio.Future[None],
    ) -> None:
        self.chunk = chunk
        self.checksum = checksum
        self.slot_offset = slot_offset
        self.view = slot.view
        self.asked = 0
        """Bytes from the start that were asked for."""
        self.came = 0
        self.ended = ended


@dataclass(frozen=True)
class _Piece:
    read: _Read
    offset: int
    length: int


class ZeroMqPeer:
    """A connection to one engine. It belongs to the event loop that it is made in.

    Args:
        context: ZeroMQ's.
        place: where to connect, and the server's key if it has one.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], place: ZeroMqLocator) -> None:
        self.failed = False
        """It is lost: no read may begin."""
        self._loop = asyncio.get_running_loop()
        self._socket = _socket(context, place)
        self._monitor: zmq.Socket[bytes] = self._socket.get_monitor_socket(_LOST)
        self._socket.connect(place.endpoint)
        self._waiting: deque[_Read] = deque()
        self._under_way: dict[int, _Piece] = {}
        self._number = 0
        self._scheduled = False
        self._descriptors = [int(socket.getsockopt(zmq.FD)) for socket in (self._socket, self._monitor)]
        for descriptor, act in zip(self._descriptors, (self._readable, self._look_after), strict=True):
            self._loop.add_reader(descriptor, act)
        # A descriptor of ZeroMQ signals only once its socket was looked at and had nothing.
        self._loop.call_soon(self._look_after)

    @property
    def is_idle(self) -> bool:
        """Nobody reads by it."""
        return not (self._waiting or self._under_way)

    async def read(
        self, chunk: EmbeddingChunk, slot_offset: int, slot: Slot, checksum: RunningChecksum, timeout: float
    ) -> None:
        """Reads a chunk's payload into a slot.

        Raises:
            SlotClosedError: the slot is not open any more.
            TransportError: it did not come, not in time, or not as it was asked for.
        """
        read = _Read(chunk, slot_offset, slot, checksum, self._loop.create_future())
        self._waiting.append(read)
        self._ask()
        self._schedule()
        try:
            async with asyncio.timeout(timeout):
                await read.ended
        except TimeoutError:
            raise TransportError(f"{read.came} of {chunk.nbytes} bytes came in {timeout:.3g} s") from None
        finally:
            self._drop(read)

    def close(self, fault: str = "the client is closed") -> None:
        """Ends the connection, and all reads by it with this fault. Idempotent."""
        if self.failed:
            return
        self.failed = True
        for descriptor in self._descriptors:
            self._loop.remove_reader(descriptor)
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close()
        for read in {*self._waiting, *(piece.read for piece in self._under_way.values())}:
            _fail(read, TransportError(fault))

    def _ask(self) -> None:
        """Asks for pieces, in turns for each read, as long as the window has room."""
        while self._waiting and len(self._under_way) < WINDOW:
            read = self._waiting.popleft()
            chunk, offset = read.chunk, read.asked
            length = min(PIECE_BYTES, chunk.nbytes - offset)
            read.asked += length
            if read.asked < chunk.nbytes:
                self._waiting.append(read)
            self._number += 1
            request = Request(self._number, chunk.slot_key, read.slot_offset, chunk.generation, offset, length)
            try:
                self._socket.send(write_request(request), zmq.NOBLOCK)
            except zmq.ZMQError as error:
                _fail(read, TransportError(f"the encoder cannot be asked: {error.strerror}"))
                continue
            self._under_way[self._number] = _Piece(read, offset, length)

    def _schedule(self) -> None:
        """Looks soon. ZeroMQ's descriptor signals edges: what came in while we sent would otherwise never be seen."""
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._readable)

    def _readable(self) -> None:
        self._scheduled = False
        for _ in range(_MESSAGES_AT_ONCE):
            if self.failed or not int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
                return
            self._take(parse_answer(self._socket.recv()))
            while self._socket.rcvmore:  # of nobody, or more than belongs to it
                self._socket.recv()
            self._ask()
        self._schedule()

    def _take(self, answer: Answer | None) -> None:
        piece = self._under_way.pop(answer.number, None) if answer is not None else None
        if answer is None or piece is None:
            return
        read = piece.read
        if read.ended.done():
            return
        if answer.state == State.CLOSED:
            _fail(read, SlotClosedError("the slot is not open any more"))
        elif answer.state != State.OK or (answer.offset, answer.length) != (piece.offset, piece.length):
            _fail(read, TransportError("another piece was answered than was asked for"))
        elif not self._socket.rcvmore:
            _fail(read, TransportError("an answer came without its bytes"))
        else:
            place = read.view[piece.offset : piece.offset + piece.length]
            came = self._socket.recv_into(place)
            if came != piece.length or self._socket.rcvmore:
                _fail(read, TransportError(f"{came} bytes came where {piece.length} were asked for"))
                return
            read.came += came
            read.checksum.take(place, piece.offset)
            if read.came == read.chunk.nbytes:
                read.ended.set_result(None)

    def _drop(self, read: _Read) -> None:
        """What still comes for a read is thrown away: its slot is not touched any more."""
        if read in self._waiting:
            self._waiting.remove(read)
        self._under_way = {number: piece for number, piece in self._under_way.items() if piece.read is not read}
        read.view.release()
        if not self.failed:
            self._ask()
            self._schedule()

    def _look_after(self) -> None:
        """The connection is lost, or was never made. What is asked by it is not worth waiting for."""
        while not self.failed and self._monitor.poll(0):
            if parse_monitor_message(self._monitor.recv_multipart())["event"] & _LOST:
                self.close("the encoder is gone or unreachable")


def _socket(context: zmq.Context[zmq.Socket[bytes]], place: ZeroMqLocator) -> zmq.Socket[bytes]:
    if not place.endpoint.startswith("tcp://"):
        raise TransportError("the encoder's ZeroMQ endpoint is no TCP address")
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.linger = 0
    socket.ipv6 = True
    # An answer that nobody asked for is bounded, too.
    socket.maxmsgsize = PIECE_BYTES + _CURVE_BYTES
    socket.rcvhwm = 2 * WINDOW
    socket.heartbeat_ivl, socket.heartbeat_timeout = _HEARTBEAT_MILLISECONDS, _SILENCE_MILLISECONDS
    if place.curve_public_key:
        socket.curve_serverkey = place.curve_public_key
        socket.curve_publickey, socket.curve_secretkey = zmq.curve_keypair()
    return socket


def _fail(read: _Read, error: TransportError) -> None:
    if not read.ended.done():
        read.ended.set_exception(error)
