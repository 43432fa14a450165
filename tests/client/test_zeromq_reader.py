"""Reads by ZeroMQ: who hangs, who lies, who asks for too much, and what is encrypted."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zmq
import zmq.auth
from zmq.utils import z85

from encoder_client import EmbeddingPool
from encoder_client.checksums import UNCHECKED
from encoder_client.transports import TransportError, zeromq_link
from encoder_client.transports.zeromq import ZeroMqReader
from encoder_svc.transports.zeromq_peers import EVENTS, MOST_PEERS, ZeroMqPeers
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, LeaseGrant, Locator, ZeroMqLocator
from epd.zeromq_reads import MOST_ANSWERS, PIECE_BYTES, Request, State, parse_answer, write_answer, write_request
from tests.client.arena_peer import SLOT_BYTES, ArenaPeer, arena_peer, let_go, payload_digest, read
from tests.waiting import PATIENCE_SECONDS

POOL_BYTES = 64 << 20
PATIENCE_MILLISECONDS = int(1000 * PATIENCE_SECONDS)


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ArenaPeer]:
    """A peer for all tests that leave it as it was."""
    with arena_peer(tmp_path_factory.mktemp("peer")) as peer:
        yield peer


async def test_f28_an_idle_connection_outlives_its_pings(peer: ArenaPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeromq_link, "HEARTBEAT_SECONDS", 0.1)
    monkeypatch.setattr(zeromq_link, "SILENCE_SECONDS", 10.0)
    reader, pool, locator = ZeroMqReader(), EmbeddingPool(POOL_BYTES), peer.locator("zeromq", 2)
    assert await read(reader, pool, peer.chunk(2), locator) == payload_digest(2)
    connection = reader._peers[locator.zeromq.endpoint, b""]
    # Not a wait for something to happen: that nothing does for many pings is what is tested.
    await asyncio.sleep(1)
    assert not connection.failed
    assert await read(reader, pool, peer.chunk(2), locator) == payload_digest(2)
    assert reader._peers[locator.zeromq.endpoint, b""] is connection
    reader.close()


async def test_a_host_that_is_gone_without_a_word_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeromq_link, "HEARTBEAT_SECONDS", 0.1)
    # Longer than a machine that is busy keeps the peer from answering the first read.
    monkeypatch.setattr(zeromq_link, "SILENCE_SECONDS", 5.0)
    reader, pool = ZeroMqReader(), EmbeddingPool(POOL_BYTES)
    with arena_peer(tmp_path) as peer:
        assert await read(reader, pool, peer.chunk(0), peer.locator("zeromq", 0)) == payload_digest(0)
        peer.stop()
        # The kernel still takes what is sent: only the pings tell, long before the read's own limit.
        with pytest.raises(TransportError, match="gone or unreachable"):
            await read(reader, pool, peer.chunk(0), peer.locator("zeromq", 0), timeout=1000)
    await let_go(pool)
    reader.close()


class Liar:
    """A ROUTER that answers as a test says."""

    def __init__(self) -> None:
        self.context = zmq.Context()
        self.socket: zmq.Socket[bytes] = self.context.socket(zmq.ROUTER)
        self.socket.linger = 0
        self.port = self.socket.bind_to_random_port("tcp://127.0.0.1")

    def answer(self, *frames: bytes) -> None:
        peer, request = self.socket.recv_multipart()
        number = int.from_bytes(request[8:16], "little")
        if not frames:
            frames = (write_answer(Request(number, b"", 0, 0, 0, 100), State.OK),)
        elif frames[0] == b"header":
            frames = (write_answer(Request(number, b"", 0, 0, 0, 100), State.OK), *frames[1:])
        self.socket.send_multipart([peer, *frames])

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.mark.parametrize(
    "frames",
    [
        (),
        (b"header", b"x" * 99),
        (b"header", b"x" * 101),
        (b"header", b"x" * 100, b"more"),
        (b"header", b""),
        (b"no answer at all",),
        (b"", b"x" * 100),
    ],
    ids=["header only", "short", "long", "more frames", "empty", "other bytes", "no header"],
)
async def test_f14_a_peer_that_sends_other_bytes_than_were_asked_for(frames: tuple[bytes, ...]) -> None:
    liar, reader, pool = Liar(), ZeroMqReader(), EmbeddingPool(1 << 20)
    locator = Locator(zeromq=ZeroMqLocator(endpoint=f"tcp://127.0.0.1:{liar.port}"))
    chunk = EmbeddingChunk(nbytes=100, generation=1, slot_key=bytes(16))
    reading = asyncio.create_task(read(reader, pool, chunk, locator, timeout=1.0))
    await asyncio.to_thread(liar.answer, *frames)
    with pytest.raises(TransportError):
        await reading
    reader.close()
    liar.close()


async def test_a_peer_that_encrypts_refuses_who_does_not(tmp_path: Path) -> None:
    zmq.auth.create_certificates(tmp_path, "encoder")
    pool = EmbeddingPool(POOL_BYTES)
    with arena_peer(tmp_path, curve_key=str(tmp_path / "encoder.key_secret")) as peer:
        locator = peer.locator("zeromq", 1)
        assert len(locator.zeromq.curve_public_key) == 32
        locator.zeromq.curve_public_key = b""
        reader = ZeroMqReader()
        with pytest.raises(TransportError):
            await read(reader, pool, peer.chunk(1), locator)
        reader.close()


async def test_who_encrypts_refuses_a_peer_with_another_key(tmp_path: Path) -> None:
    zmq.auth.create_certificates(tmp_path, "encoder")
    pool = EmbeddingPool(POOL_BYTES)
    with arena_peer(tmp_path, curve_key=str(tmp_path / "encoder.key_secret")) as peer:
        locator = peer.locator("zeromq", 1)
        locator.zeromq.curve_public_key = z85.decode(zmq.curve_keypair()[0])
        reader = ZeroMqReader()
        with pytest.raises(TransportError):
            await read(reader, pool, peer.chunk(1), locator, timeout=1.0)
        reader.close()


async def test_f39_a_peer_that_does_not_read_holds_nobody_up_and_is_owed_little(peer: ArenaPeer) -> None:
    place = peer.locator("zeromq", 1).zeromq
    context = zmq.Context()
    greedy: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    greedy.linger = 0
    greedy.rcvhwm = 1
    greedy.connect(place.endpoint)
    asked = 1000
    for number in range(asked):
        greedy.send(write_request(Request(number, bytes([1]) * 16, place.slot_offset, 1, 0, PIECE_BYTES)))
    reader, pool = ZeroMqReader(), EmbeddingPool(POOL_BYTES)
    for _ in range(3):
        assert await read(reader, pool, peer.chunk(2), peer.locator("zeromq", 2)) == payload_digest(2)
    reader.close()
    answered = 0
    # The first ones are there, or come; nothing tells that a last one was the last.
    while greedy.poll(int(1000 * PATIENCE_SECONDS) if answered < MOST_ANSWERS else 500):
        answer = parse_answer(greedy.recv_multipart()[0])
        assert answer is not None
        assert answer.state == State.OK
        answered += 1
    # What waited for it in the two hosts, and what the two systems held of it; all else was dropped.
    assert MOST_ANSWERS <= answered < asked
    greedy.close()
    context.term()


async def test_f39_connections_are_bounded_and_readers_keep_theirs(peer: ArenaPeer) -> None:
    """Twice as many as are served at a time: some say nothing, some shake hands and have no key, one is slow."""
    place = peer.locator("zeromq", 1).zeromq
    host, port = place.endpoint.removeprefix("tcp://").split(":")
    reader, pool = ZeroMqReader(), EmbeddingPool(POOL_BYTES)
    assert await read(reader, pool, peer.chunk(2), peer.locator("zeromq", 2)) == payload_digest(2)
    connection = reader._peers[place.endpoint, b""]
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        slow = stack.enter_context(context.socket(zmq.DEALER))
        slow.linger, slow.rcvhwm = 0, 1
        slow.connect(place.endpoint)
        for number in range(MOST_ANSWERS):
            slow.send(write_request(Request(number, bytes([1]) * 16, place.slot_offset, 1, 0, PIECE_BYTES)))
        assert await asyncio.to_thread(lambda: slow.poll(PATIENCE_MILLISECONDS))
        opened = []
        for number in range(2 * MOST_PEERS):
            half_open = stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_SECONDS))
            opened.append(half_open)
            if number % 8 == 0:
                guessing = stack.enter_context(context.socket(zmq.DEALER))
                guessing.linger = 0
                guessing.connect(place.endpoint)
                guessing.send(write_request(Request(number, bytes(16), place.slot_offset, 1, 0, 1)))
            if number % 64 == 0:
                assert await read(reader, pool, peer.chunk(2), peer.locator("zeromq", 2)) == payload_digest(2)
        # The oldest were told to go; the greeting of ZeroMQ comes before the end.
        for half_open in opened[:MOST_PEERS]:
            await asyncio.to_thread(read_to_the_end, half_open)
        # Who was there first, and reads, has the same connection, and so has who is slow; and a new one is served.
        assert await read(reader, pool, peer.chunk(2), peer.locator("zeromq", 2)) == payload_digest(2)
        assert reader._peers[place.endpoint, b""] is connection
        assert await asyncio.to_thread(answers_to, slow, MOST_ANSWERS) == MOST_ANSWERS
        newcomer = ZeroMqReader()
        assert await read(newcomer, pool, peer.chunk(0), peer.locator("zeromq", 0)) == payload_digest(0)
        newcomer.close()
    reader.close()


def read_to_the_end(connection: socket.socket) -> None:
    """Until the other side has closed it."""
    with suppress(ConnectionResetError):
        while connection.recv(4096):
            pass


def test_f39_who_reads_before_its_coming_is_told_is_a_reader() -> None:
    """The thread that answers may be ahead of the one that hears of connections."""
    with ExitStack() as stack:
        context = stack.enter_context(zmq.Context())
        router = stack.enter_context(context.socket(zmq.ROUTER))
        router.linger = 0
        monitor = stack.enter_context(router.get_monitor_socket(EVENTS))
        stack.callback(router.disable_monitor)
        port = router.bind_to_random_port("tcp://127.0.0.1")
        peers = ZeroMqPeers(monitor, port)
        reader = stack.enter_context(context.socket(zmq.DEALER))
        reader.linger = 0
        reader.connect(f"tcp://127.0.0.1:{port}")
        reader.send(b"a request")
        name, request = router.recv_multipart(copy=False)
        peers.has_read(int(request.get(zmq.SRCFD)))
        strangers = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), PATIENCE_SECONDS))
            for _ in range(MOST_PEERS)
        ]
        for _ in range(1 + MOST_PEERS):
            peers.handle(peers.receive())
        read_to_the_end(strangers[0])
        # A name of the router's is one connection's.
        router.router_mandatory = True
        router.send_multipart([name.bytes, b"an answer"])
        assert reader.poll(PATIENCE_MILLISECONDS)
        assert reader.recv() == b"an answer"


def answers_to(peer: zmq.Socket[bytes], expected: int) -> int:
    """How many messages come: those that are expected, and what half a second brings beyond them."""
    came = 0
    while peer.poll(PATIENCE_MILLISECONDS if came < expected else 500):
        peer.recv_multipart()
        came += 1
    return came


@pytest.mark.parametrize("request_", [b"", b"x" * 64, b"EPDREAD1", b"EPDREAD1" + bytes(4096)])
async def test_requests_of_no_form_are_not_answered_and_harm_nobody(peer: ArenaPeer, request_: bytes) -> None:
    place = peer.locator("zeromq", 1).zeromq
    context = zmq.Context()
    stranger: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    stranger.linger = 0
    stranger.connect(place.endpoint)
    stranger.send(request_)
    stranger.send_multipart([request_, request_])
    # What does have the form is answered, and nothing outside a slot is read.
    good = [
        Request(1, bytes([1]) * 16, place.slot_offset, 1, SLOT_BYTES - 10, 10),
        Request(2, bytes([1]) * 16, place.slot_offset, 1, SLOT_BYTES - 10, 11),
        Request(3, bytes([1]) * 16, place.slot_offset, 1, 0, PIECE_BYTES + 1),
        Request(4, bytes([1]) * 16, place.slot_offset, 1, (1 << 64) - 1, 1),
        Request(5, bytes([1]) * 16, place.slot_offset, 1, 0, 0),
    ]
    if len(request_) <= 64:  # else the connection is closed
        states = []
        for request in good:
            stranger.send(write_request(request))
            frames = await asyncio.to_thread(stranger.recv_multipart)
            answer = parse_answer(frames[0])
            assert answer is not None
            assert answer.number == request.number
            states.append((answer.state, len(frames)))
        assert states == [(State.OK, 2), *[(State.OUTSIDE, 1)] * 4]
    stranger.close()
    context.term()
    reader = ZeroMqReader()
    assert await read(reader, EmbeddingPool(POOL_BYTES), peer.chunk(0), peer.locator("zeromq", 0)) == payload_digest(0)
    reader.close()


async def test_f06_a_request_that_meets_a_fault_harms_no_other(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with arena_peer(tmp_path, log=log) as peer, zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        peer.tell("break 3")
        place = peer.locator("zeromq", 1).zeromq
        stranger.linger = 0
        stranger.connect(place.endpoint)
        broken = peer.locator("zeromq", 3).zeromq.slot_offset
        for number in range(3):
            stranger.send(write_request(Request(number, bytes([3]) * 16, broken, 1, 0, 10)))
        stranger.send(write_request(Request(7, bytes([1]) * 16, place.slot_offset, 1, 0, 10)))
        assert stranger.poll(PATIENCE_MILLISECONDS)
        head, _ = stranger.recv_multipart()
        answer = parse_answer(head)
        assert answer is not None
        assert answer.number == 7
        assert log.read_text().count("unexpected fault") == 1


def test_f06_a_transport_that_cannot_go_on_ends_its_engine(tmp_path: Path) -> None:
    """Its locators would be offered on, and readers wait for nobody. The front starts the engine again."""
    log = tmp_path / "log"
    with arena_peer(tmp_path, log=log) as peer:
        peer.end_zeromq()
        assert peer.process.wait(PATIENCE_SECONDS) == 1
    assert "cannot go on" in log.read_text()


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
async def test_f39_reads_that_are_cancelled_take_nothing_from_those_that_go_on(tmp_path: Path, encrypted: bool) -> None:
    """The encoder still owes their pieces, and drops what is asked for beyond a few: so no more is asked for."""
    zmq.auth.create_certificates(tmp_path, "encoder")
    key = str(tmp_path / "encoder.key_secret") if encrypted else ""
    reader, pool = ZeroMqReader(), EmbeddingPool(256 << 20)
    with arena_peer(tmp_path, curve_key=key) as peer:
        locator = peer.locator("zeromq", 1)
        for _ in range(3):
            kept = asyncio.create_task(read(reader, pool, peer.chunk(2), peer.locator("zeromq", 2)))
            given_up = [asyncio.create_task(read(reader, pool, peer.chunk(1), locator)) for _ in range(30)]
            # Some have asked, and few have come.
            await asyncio.sleep(0.001)
            for task in given_up:
                task.cancel()
            await asyncio.wait(given_up)
            assert await kept == payload_digest(2)
            assert await read(reader, pool, peer.chunk(1), locator) == payload_digest(1)
    reader.close()


@pytest.mark.parametrize(
    ("endpoint", "key"),
    [("tcp://127.0.0.1:7", b"short"), ("tcp://127.0.0.1:7/x", bytes(range(32)))],
    ids=["key of another length", "endpoint that libzmq refuses"],
)
async def test_f14_an_encrypted_place_that_can_be_none_leaves_nothing_open(endpoint: str, key: bytes) -> None:
    reader = ZeroMqReader()
    slot = (await EmbeddingPool(1 << 20).reserve("prompt", [100])).take(0)
    place = Locator(zeromq=ZeroMqLocator(endpoint=endpoint, curve_public_key=key))
    chunk = EmbeddingChunk(nbytes=100, generation=1, slot_key=bytes(16))
    with pytest.raises(TransportError) as kept:
        await reader.read(chunk, place, LeaseGrant(), slot, UNCHECKED, 1.0)
    # With a socket left open it would wait for it for ever.
    await asyncio.wait_for(asyncio.to_thread(reader.close), PATIENCE_SECONDS)
    assert "cannot be used" in str(kept.value)
