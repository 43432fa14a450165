"""One engine's ZeroMQ socket, as a reader sees it: asks for pieces and says where each belongs."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from encoder_client.checksums import RunningChecksum
from encoder_client.pool.embedding_pool import Slot
from encoder_client.transports import SlotClosedError, TransportError
from encoder_client.transports.zeromq_link import Answers, ZeroMqLink
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.zeromq_reads import PIECE_BYTES, Request, State, parse_answer, write_request

WINDOW = 8
"""Pieces that are asked for and have not come. The encoder owes a reader a few only, and drops what is beyond them."""


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


@dataclass
class _Piece:
    read: _Read
    offset: int
    end: int


class ZeroMqPeer:
    """A connection to one engine. It belongs to the event loop that it is made in.

    Args:
        connect: makes the link, whose answers the argument takes.
    """

    def __init__(self, connect: Callable[[Answers], ZeroMqLink]) -> None:
        self.failed = False
        """It is lost: no read may begin."""
        self._waiting: deque[_Read] = deque()
        self._under_way: dict[int, _Piece | None] = {}
        """None: of a read that is over. The encoder owes it still, and drops what it would owe beyond a few."""
        self._coming: _Piece | None = None
        """The bytes of which come now, from its offset on. None: those that come belong nowhere."""
        self._number = 0
        self._link = connect(self)

    @property
    def is_idle(self) -> bool:
        """Nobody reads by it."""
        return not (self._waiting or self._coming or any(self._under_way.values()))

    async def read(
        self, chunk: EmbeddingChunk, slot_offset: int, slot: Slot, checksum: RunningChecksum, timeout: float
    ) -> None:
        """Reads a chunk's payload into a slot.

        Raises:
            SlotClosedError: the slot is not open any more.
            TransportError: it did not come, not in time, or not as it was asked for.
        """
        read = _Read(chunk, slot_offset, slot, checksum, asyncio.get_running_loop().create_future())
        self._waiting.append(read)
        self._ask()
        try:
            async with asyncio.timeout(timeout):
                await read.ended
        except TimeoutError:
            # What is owed to it, and to reads that were over before, may never come: that holds no place for ever.
            self._under_way = {
                number: piece for number, piece in self._under_way.items() if piece and piece.read is not read
            }
            raise TransportError(f"{read.came} of {chunk.nbytes} bytes came in {timeout:.3g} s") from None
        finally:
            self._drop(read)

    def close(self, fault: str = "the client is closed") -> None:
        """Ends the connection, and all reads by it with this fault. Idempotent."""
        if self.failed:
            return
        self.failed = True
        self._link.close()
        pieces = [*self._under_way.values(), self._coming]
        for read in {*self._waiting, *(piece.read for piece in pieces if piece is not None)}:
            _fail(read, TransportError(fault))
        self._coming = None

    def begin(self, answer: bytes, nbytes: int, whole: bool) -> None:
        """See :class:`~encoder_client.transports.zeromq_link.Answers`."""
        parsed = parse_answer(answer)
        piece = self._under_way.pop(parsed.number, None) if parsed is not None else None
        if parsed is None or piece is None or piece.read.ended.done():
            self._ask()
            return
        wanted = piece.end - piece.offset
        if parsed.state == State.CLOSED:
            _fail(piece.read, SlotClosedError("the slot is not open any more"))
        elif parsed.state != State.OK or (parsed.offset, parsed.length) != (piece.offset, wanted):
            _fail(piece.read, TransportError("another piece was answered than was asked for"))
        elif nbytes != wanted or not whole:
            _fail(piece.read, TransportError(f"{nbytes} bytes came where {wanted} were asked for"))
        else:
            self._coming = piece

    @property
    def target(self) -> memoryview | None:
        """See :class:`~encoder_client.transports.zeromq_link.Answers`."""
        piece = self._coming
        return piece.read.view[piece.offset : piece.end] if piece is not None else None

    def took(self, nbytes: int) -> None:
        """See :class:`~encoder_client.transports.zeromq_link.Answers`."""
        piece = self._coming
        assert piece is not None
        read, start = piece.read, piece.offset
        piece.offset += nbytes
        read.came += nbytes
        # What has just come is in the processor's cache.
        read.checksum.take(read.view[start : piece.offset], start)
        if piece.offset == piece.end:
            self._coming = None
            self._ask()
        if read.came == read.chunk.nbytes and not read.ended.done():
            read.ended.set_result(None)

    def lost(self, fault: str) -> None:
        """See :class:`~encoder_client.transports.zeromq_link.Answers`."""
        self.close(fault)

    def _ask(self) -> None:
        """Asks for pieces, in turns for each read, as long as the window has room."""
        while self._waiting and len(self._under_way) < WINDOW:
            read = self._waiting.popleft()
            chunk, offset = read.chunk, read.asked
            end = min(chunk.nbytes, offset + PIECE_BYTES)
            read.asked = end
            if end < chunk.nbytes:
                self._waiting.append(read)
            self._number += 1
            request = Request(self._number, chunk.slot_key, read.slot_offset, chunk.generation, offset, end - offset)
            try:
                self._link.send(write_request(request))
            except TransportError as error:
                _fail(read, error)
                continue
            self._under_way[self._number] = _Piece(read, offset, end)

    def _drop(self, read: _Read) -> None:
        """What still comes for a read is thrown away: its slot is not touched any more."""
        if read in self._waiting:
            self._waiting.remove(read)
        for number, piece in self._under_way.items():
            if piece is not None and piece.read is read:
                self._under_way[number] = None
        if self._coming is not None and self._coming.read is read:
            self._coming = None
            self._link.look_again()
        read.view.release()
        if not self.failed:
            self._ask()


def _fail(read: _Read, error: TransportError) -> None:
    if not read.ended.done():
        read.ended.set_exception(error)
