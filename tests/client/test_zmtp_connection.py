"""The ZeroMQ peer of our own, byte by byte: what a ROUTER says, however it is cut, and what none would say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from typing import Self

import pytest
import uvloop
import zmq
from hypothesis import given
from hypothesis import strategies as st

from encoder_client import EmbeddingPool
from encoder_client.checksums import UNCHECKED
from encoder_client.pool.embedding_pool import Slot
from encoder_client.transports import TransportError
from encoder_client.transports.zeromq import ZeroMqReader
from encoder_client.transports.zeromq_link import Answers
from encoder_client.transports.zeromq_peer import WINDOW, ZeroMqPeer
from encoder_client.transports.zmtp_connection import ZmtpConnection
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, LeaseGrant, Locator, ZeroMqLocator
from epd.zeromq_reads import PIECE_BYTES, Request, State, parse_request, write_answer
from tests.waiting import PATIENCE_SECONDS, eventually

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
KEY = bytes(range(16))


def command(body: bytes) -> bytes:
    return bytes((4, len(body))) + body


READY = command(b"\x05READY\x0bSocket-Type\0\0\0\x06ROUTER")


def frame(body: bytes, more: bool = False, *, long: bool = False) -> bytes:
    if long or len(body) > 255:
        return bytes((2 | more,)) + len(body).to_bytes(8) + body
    return bytes((more, len(body))) + body


class Encoder:
    """A server on a socket that says what a test tells it to, and parses what it is asked."""

    def __init__(self) -> None:
        self.connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        self._came = asyncio.Condition()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        for _reader, writer in self.connections:
            writer.close()
        self._server.close()
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with self._came:
            self.connections.append((reader, writer))
            self._came.notify_all()

    async def connection(self, number: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        async with asyncio.timeout(PATIENCE_SECONDS), self._came:
            await self._came.wait_for(lambda: len(self.connections) > number)
        return self.connections[number]

    async def shake_hands(self, number: int = 0) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.connection(number)
        assert await reader.readexactly(64) == GREETING
        assert (await read_frame(reader)).startswith(b"\x05READY\x0bSocket-Type\0\0\0\x06DEALER")
        writer.write(GREETING + READY)
        return reader, writer

    @property
    def locator(self) -> Locator:
        return Locator(zeromq=ZeroMqLocator(endpoint=f"tcp://127.0.0.1:{self.port}"))


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The body of a short frame."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        _, nbytes = await reader.readexactly(2)
        return await reader.readexactly(nbytes)


async def read_request(reader: asyncio.StreamReader) -> Request:
    request = parse_request(await read_frame(reader))
    assert request is not None
    return request


def chunk_of(nbytes: int) -> EmbeddingChunk:
    return EmbeddingChunk(nbytes=nbytes, generation=7, slot_key=KEY)


async def read_into(
    reader: ZeroMqReader, slot: Slot, chunk: EmbeddingChunk, locator: Locator, timeout: float = PATIENCE_SECONDS
) -> bytes:
    await reader.read(chunk, locator, LeaseGrant(), slot, UNCHECKED, timeout)
    return bytes(slot.view[: chunk.nbytes])


async def slot_of(pool: EmbeddingPool, nbytes: int) -> Slot:
    return (await pool.reserve("prompt", [nbytes])).take(0)


@pytest.fixture
def reader() -> Iterator[ZeroMqReader]:
    with closing(ZeroMqReader()) as reader:
        yield reader


class Unread(asyncio.Transport):
    """Sends nothing: the other side does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.unsent = b""
        self.aborted = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.unsent += data

    def get_write_buffer_size(self) -> int:
        return len(self.unsent)

    def abort(self) -> None:
        self.aborted = True


def connected() -> tuple[ZeroMqPeer, ZmtpConnection, Unread]:
    """A peer by a connection that a test feeds, and what it writes to."""
    made: list[ZmtpConnection] = []

    def connect(answers: Answers) -> ZmtpConnection:
        made.append(ZmtpConnection("127.0.0.1", 1, answers))
        made[0]._connecting.cancel()
        return made[0]

    peer, transport = ZeroMqPeer(connect), Unread()
    made[0].connection_made(transport)
    return peer, made[0], transport


def receive(connection: ZmtpConnection, wire: bytes, most: int = 1 << 20) -> None:
    """Hands bytes over as the event loop does, at most so many at a time."""
    while wire:
        buffer = connection.get_buffer(-1)
        came = min(len(wire), len(buffer), most)
        buffer[:came] = wire[:came]
        connection.buffer_updated(came)
        wire = wire[came:]


@given(
    payload=st.binary(min_size=1, max_size=3000),
    cuts=st.lists(st.integers(0, 6000)),
    early=st.booleans(),
    between=st.booleans(),
    long=st.booleans(),
    unasked=st.booleans(),
    most=st.integers(1, 4000),
)
def test_what_a_router_says_is_understood_however_it_is_cut(
    payload: bytes, cuts: list[int], early: bool, between: bool, long: bool, unasked: bool, most: int
) -> None:
    """Commands come between any two frames, lengths may have eight bytes, and messages of nobody are passed over."""
    slot = Slot.outside(len(payload))

    async def talk() -> bytes:
        peer, connection, transport = connected()
        reading = asyncio.create_task(peer.read(chunk_of(len(payload)), 64, slot, UNCHECKED, PATIENCE_SECONDS))
        await asyncio.sleep(0)
        ping = command(b"\x04PING\0\x05context")
        head = write_answer(Request(1, KEY, 64, 7, 0, len(payload)), State.OK)
        said = b"".join(
            (
                GREETING, READY, ping if early else b"",
                frame(b"of nobody", True) + frame(b"x" * 300, True) + frame(b"") if unasked else b"",
                frame(head, True, long=long), ping if between else b"", frame(payload, long=long),
            )
        )  # fmt: skip
        bounds = sorted({0, len(said), *(cut for cut in cuts if cut < len(said))})
        for place, end in pairwise(bounds):
            receive(connection, said[place:end], most)
        await reading
        peer.close()
        assert transport.unsent.count(command(b"\x04PONGcontext")) == early + between
        return bytes(slot.view[: len(payload)])

    assert asyncio.run(talk()) == payload


async def test_f39_a_peer_that_pings_and_does_not_read_is_left() -> None:
    peer, connection, transport = connected()
    reading = asyncio.create_task(peer.read(chunk_of(5), 64, Slot.outside(5), UNCHECKED, PATIENCE_SECONDS))
    await asyncio.sleep(0)
    receive(connection, GREETING + READY)
    while not transport.aborted:
        receive(connection, command(b"\x04PING\0\0context"))
        assert len(transport.unsent) < 1 << 20
    with pytest.raises(TransportError, match="does not read"):
        await reading


async def test_an_embedding_of_many_pieces_comes_whole(reader: ZeroMqReader) -> None:
    nbytes = 3 * PIECE_BYTES + 5
    pool = EmbeddingPool(nbytes + 64)
    async with Encoder() as encoder:
        reading = asyncio.create_task(read_into(reader, await slot_of(pool, nbytes), chunk_of(nbytes), encoder.locator))
        asked, writer = await encoder.shake_hands()
        expected = b""
        for number in range(4):
            request = await read_request(asked)
            assert (request.key, request.generation, request.offset) == (KEY, 7, number * PIECE_BYTES)
            piece = bytes((number + 1,)) * request.length
            writer.write(frame(write_answer(request, State.OK), True) + frame(piece))
            expected += piece
        assert await reading == expected


async def test_a_read_given_up_amid_a_piece_is_not_written_to_any_more(reader: ZeroMqReader) -> None:
    nbytes = PIECE_BYTES
    pool = EmbeddingPool(nbytes)
    async with Encoder() as encoder:
        slot = await slot_of(pool, nbytes)
        reading = asyncio.create_task(read_into(reader, slot, chunk_of(nbytes), encoder.locator))
        asked, writer = await encoder.shake_hands()
        request = await read_request(asked)
        late = frame(write_answer(request, State.OK), True) + frame(b"\x01" * nbytes)
        writer.write(late[: nbytes // 2])
        seen = slot.view
        await eventually(lambda: seen[1000] == 1)
        reading.cancel()
        await asyncio.wait([reading])
        seen.release()
        del reading, slot
        # Its memory is free at once, and another read's.
        again = await asyncio.wait_for(slot_of(pool, nbytes), PATIENCE_SECONDS)
        again.view[:] = bytes(nbytes)
        reading = asyncio.create_task(read_into(reader, again, chunk_of(nbytes), encoder.locator))
        request = await read_request(asked)
        writer.write(late[nbytes // 2 :])
        writer.write(frame(write_answer(request, State.OK), True) + frame(b"\x02" * nbytes)[:-1])
        await eventually(lambda: again.view[nbytes - 2] == 2)
        assert bytes(again.view[: nbytes - 1]) == b"\x02" * (nbytes - 1)
        writer.write(b"\x02")
        assert await reading == b"\x02" * nbytes


async def test_what_is_never_answered_holds_up_no_read_but_the_next(reader: ZeroMqReader) -> None:
    """An encoder drops what it owes beyond a few, also of reads that were cancelled."""
    nbytes = WINDOW * PIECE_BYTES
    pool = EmbeddingPool(nbytes)
    async with Encoder() as encoder:
        reading = asyncio.create_task(read_into(reader, await slot_of(pool, nbytes), chunk_of(nbytes), encoder.locator))
        asked, writer = await encoder.shake_hands()
        for _ in range(WINDOW):
            await read_request(asked)
        reading.cancel()
        await asyncio.wait([reading])
        del reading
        with pytest.raises(TransportError, match="0 of 100 bytes came"):
            await read_into(reader, await slot_of(pool, 100), chunk_of(100), encoder.locator, timeout=0.1)
        reading = asyncio.create_task(read_into(reader, await slot_of(pool, 100), chunk_of(100), encoder.locator))
        request = await read_request(asked)
        writer.write(frame(write_answer(request, State.OK), True) + frame(b"x" * 100))
        assert await reading == b"x" * 100
        assert len(encoder.connections) == 1


@pytest.mark.parametrize(
    ("says", "fault"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "does not speak ZMTP"),
        (GREETING[:10] + b"\x01" + GREETING[11:], "older protocol"),
        (GREETING[:12] + b"CURVE".ljust(20, b"\0") + GREETING[32:], "encrypts, and the chunk has no key"),
        (GREETING + command(b"\x05ERROR\x06denied"), "refuses the connection"),
        (GREETING + frame(b"x" * 40), "before the handshake"),
        (GREETING + b"\x04\x00", "a command came without a name"),
        (GREETING + READY + command(b"\x04PING\0\0" + bytes(17)), "longer than ZMTP allows"),
        (GREETING + b"\x06" + (1 << 40).to_bytes(8), "longer than any of ZMTP's"),
        (GREETING + READY + b"\x02" + (PIECE_BYTES + 1).to_bytes(8), "more bytes came than can be asked for"),
        (GREETING + READY + b"\x03" + bytes((255,)) * 8, "more bytes came than can be asked for"),
        (GREETING + READY + b"\x80\x00", "flags that ZMTP does not have"),
        (GREETING[:20], "gone or unreachable"),
        (GREETING + READY, "gone or unreachable"),
    ],
    ids=[
        "HTTP", "old", "CURVE", "refusal", "early message", "no name", "long PING", "long command", "long frame",
        "longest frame", "flags", "end in greeting", "end",
    ],
)  # fmt: skip
async def test_f14_a_peer_that_does_not_keep_to_the_protocol_is_left(
    reader: ZeroMqReader, says: bytes, fault: str
) -> None:
    """At once, with what is wrong, and the next read connects again."""
    pool = EmbeddingPool(1 << 20)
    async with Encoder() as encoder:
        for number in range(2):
            slot = await slot_of(pool, 100)
            reading = asyncio.create_task(read_into(reader, slot, chunk_of(100), encoder.locator))
            _, writer = await encoder.connection(number)
            writer.write(says)
            if fault == "gone or unreachable":
                writer.write_eof()
            with pytest.raises(TransportError, match=fault):
                await reading
            del slot, reading


async def test_who_is_not_there_is_an_error_at_once(reader: ZeroMqReader) -> None:
    pool = EmbeddingPool(1 << 20)
    async with Encoder() as encoder:
        locator = encoder.locator
    for endpoint in (locator.zeromq.endpoint, "tcp://a..b:7", "tcp://" + "x" * 300 + ":7"):
        with pytest.raises(TransportError, match="gone or unreachable"):
            await read_into(
                reader, await slot_of(pool, 100), chunk_of(100), Locator(zeromq=ZeroMqLocator(endpoint=endpoint))
            )


@pytest.mark.parametrize(
    "endpoint", ["ipc://socket", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "tcp://:7", "", "tcp://[::1"]
)
async def test_an_endpoint_that_is_no_tcp_address_is_an_error(reader: ZeroMqReader, endpoint: str) -> None:
    slot = await slot_of(EmbeddingPool(1 << 20), 100)
    with pytest.raises(TransportError, match="no TCP address"):
        await read_into(reader, slot, chunk_of(100), Locator(zeromq=ZeroMqLocator(endpoint=endpoint)))


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_libzmq_is_understood_in_any_loop(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Two reads at a time, whose pieces a real ROUTER answers in turns."""
    nbytes = 2 * PIECE_BYTES + 77
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        locator = Locator(zeromq=ZeroMqLocator(endpoint=f"tcp://127.0.0.1:{port}"))

        def answer() -> None:
            for _ in range(6):
                assert router.poll(int(1000 * PATIENCE_SECONDS))
                peer, body = router.recv_multipart()
                request = parse_request(body)
                assert request is not None
                value = bytes((request.slot_offset + request.offset // PIECE_BYTES,))
                router.send_multipart([peer, write_answer(request, State.OK), value * request.length])

        async def read(reader: ZeroMqReader, slot_offset: int, slot: Slot) -> bytes:
            place = Locator()
            place.CopyFrom(locator)
            place.zeromq.slot_offset = slot_offset
            return await read_into(reader, slot, chunk_of(nbytes), place)

        async def talk() -> list[bytes]:
            pool = EmbeddingPool(2 * nbytes + 128)
            with closing(ZeroMqReader()) as reader:
                answers = asyncio.create_task(asyncio.to_thread(answer))
                reads = [read(reader, number, await slot_of(pool, nbytes)) for number in (16, 32)]
                came = await asyncio.gather(*reads)
                await answers
            return came

        with asyncio.Runner(loop_factory=new_loop) as runner:
            came = runner.run(talk())
    assert came == [
        b"".join(bytes((start + index,)) * length for index, length in enumerate((PIECE_BYTES, PIECE_BYTES, 77)))
        for start in (16, 32)
    ]
