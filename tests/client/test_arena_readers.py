"""Reads of an arena by shared memory and by ZeroMQ: what is right, what has changed, and who is gone."""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import resource
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from pathlib import Path
from threading import Event

import pytest
import zmq
import zmq.auth

from encoder_client import EmbeddingPool
from encoder_client.transports import Reader, SlotClosedError, TransferStuckError, TransportError, shared_memory
from encoder_client.transports.mapped_arena import MappedArena
from encoder_client.transports.shared_memory import SharedMemoryReader
from encoder_client.transports.zeromq import ZeroMqReader
from encoder_svc.transports.shared_memory import MOST_RECEIVERS
from epd import arena_socket
from epd.encoder.v1.embedding_pb2 import Locator, SharedMemoryLocator
from tests.client.arena_peer import SLOT_BYTES, SLOTS, ArenaPeer, arena_peer, let_go, payload_digest, read
from tests.waiting import PATIENCE_SECONDS, eventually

POOL_BYTES = 64 << 20
ENCRYPTED = "zeromq, encrypted"

Serve = Callable[..., AbstractContextManager[ArenaPeer]]
"""Makes an :func:`arena_peer` in a folder."""


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ArenaPeer]:
    """A peer for all tests that leave it as it was."""
    with arena_peer(tmp_path_factory.mktemp("peer")) as peer:
        yield peer


@pytest.fixture(scope="module", params=["shared_memory", "zeromq", ENCRYPTED])
def way(request: pytest.FixtureRequest) -> str:
    """How it is read."""
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def serve(way: str, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    if way != ENCRYPTED:
        return arena_peer
    keys = tmp_path_factory.mktemp("keys")
    zmq.auth.create_certificates(keys, "encoder")
    return partial(arena_peer, curve_key=str(keys / "encoder.key_secret"))


@pytest.fixture(scope="module")
def served(serve: Serve, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ArenaPeer]:
    """A peer that is read in one of the ways, for all tests that leave it as it was."""
    with serve(tmp_path_factory.mktemp("served")) as peer:
        yield peer


@pytest.fixture
async def new_reader(way: str) -> Callable[[], Reader]:
    return SharedMemoryReader if way == "shared_memory" else ZeroMqReader


@pytest.fixture
async def reader(new_reader: Callable[[], Reader]) -> Reader:
    return new_reader()


async def test_reads_at_the_same_time_do_not_mix(served: ArenaPeer, reader: Reader) -> None:
    pool = EmbeddingPool(POOL_BYTES)
    reads = [
        read(reader, pool, served.chunk(index % SLOTS), served.locator(reader.name, index % SLOTS))
        for index in range(24)
    ]
    assert await asyncio.gather(*reads) == [payload_digest(index % SLOTS) for index in range(24)]
    reader.close()
    await let_go(pool)


@pytest.mark.parametrize("wrong", ["key", "generation", "place"])
async def test_f12_another_slot_than_was_leased_is_not_read(served: ArenaPeer, reader: Reader, wrong: str) -> None:
    chunk = served.chunk(1, generation=2 if wrong == "generation" else 1)
    if wrong == "key":
        chunk.slot_key = bytes(16)
    # Zeroes lie behind every payload here, and a header at no place but a slot's.
    locator = served.locator(reader.name, 1)
    if wrong == "place":
        getattr(locator, reader.name).slot_offset += 64
    with pytest.raises(SlotClosedError):
        await read(reader, EmbeddingPool(POOL_BYTES), chunk, locator)
    reader.close()


async def test_a_slot_outside_the_arena_is_not_read(served: ArenaPeer, reader: Reader) -> None:
    locator = served.locator(reader.name, 1)
    getattr(locator, reader.name).slot_offset = 1 << 63
    with pytest.raises(SlotClosedError):
        await read(reader, EmbeddingPool(POOL_BYTES), served.chunk(1), locator)
    reader.close()


async def test_f12_a_slot_that_was_closed_or_used_again_is_not_read(
    tmp_path: Path, serve: Serve, reader: Reader
) -> None:
    pool = EmbeddingPool(POOL_BYTES)
    with serve(tmp_path) as peer:
        chunk, locator = peer.chunk(2), peer.locator(reader.name, 2)
        assert await read(reader, pool, chunk, locator) == payload_digest(2)
        peer.tell("close 2")
        with pytest.raises(SlotClosedError):
            await read(reader, pool, chunk, locator)
        peer.tell("fill 2 5")
        with pytest.raises(SlotClosedError):
            await read(reader, pool, chunk, locator)
        assert await read(reader, pool, peer.chunk(2, generation=5), locator) == payload_digest(2, 5)
    reader.close()


async def test_an_engine_that_is_gone_is_an_error_at_once(tmp_path: Path, serve: Serve, reader: Reader) -> None:
    pool = EmbeddingPool(POOL_BYTES)
    with serve(tmp_path) as peer:
        assert await read(reader, pool, peer.chunk(0), peer.locator(reader.name, 0)) == payload_digest(0)
        peer.process.kill()
        peer.process.wait()
        if reader.name == "shared_memory":
            # Until its end is noticed, what is mapped is what it was.
            arenas = reader._arenas  # type: ignore[attr-defined]
            await eventually(lambda: not arenas)
        for _ in range(2):
            # The limit is the test's: far more than it takes, and far less than it would take to run into the read's.
            async with asyncio.timeout(PATIENCE_SECONDS):
                with pytest.raises(TransportError):
                    await read(reader, pool, peer.chunk(0), peer.locator(reader.name, 0), timeout=1000)
    await let_go(pool)
    reader.close()


async def test_an_engine_that_hangs_costs_the_time_of_the_read(tmp_path: Path, serve: Serve, reader: Reader) -> None:
    pool = EmbeddingPool(POOL_BYTES)
    with serve(tmp_path) as peer:
        peer.stop()
        with pytest.raises(TransportError):
            await read(reader, pool, peer.chunk(0), peer.locator(reader.name, 0), timeout=0.2)
        await let_go(pool)
        peer.process.send_signal(signal.SIGCONT)
        assert await read(reader, pool, peer.chunk(0), peer.locator(reader.name, 0)) == payload_digest(0)
    reader.close()


async def test_a_read_that_is_cancelled_lets_go_and_the_next_one_is_right(served: ArenaPeer, reader: Reader) -> None:
    pool = EmbeddingPool(2 * SLOT_BYTES)
    for _ in range(20):
        task = asyncio.create_task(read(reader, pool, served.chunk(3), served.locator(reader.name, 3)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        del task
        assert await read(reader, pool, served.chunk(0), served.locator(reader.name, 0)) == payload_digest(0)
    reader.close()


async def test_f41_two_engines_of_one_host_are_two(
    tmp_path: Path, serve: Serve, reader: Reader, new_reader: Callable[[], Reader]
) -> None:
    """Each has its own slots under the same keys; a chunk of one, with the place of the other, is not read."""
    pool = EmbeddingPool(POOL_BYTES)
    with serve(tmp_path / "one", "1" * 32) as one, serve(tmp_path / "two", "2" * 32) as two:
        one.tell("fill 0 2")
        two.tell("fill 0 3")
        for _ in range(2):
            assert await read(reader, pool, one.chunk(0, 2), one.locator(reader.name, 0)) == payload_digest(0, 2)
            assert await read(reader, pool, two.chunk(0, 3), two.locator(reader.name, 0)) == payload_digest(0, 3)
        stranger = new_reader()
        with pytest.raises(TransportError):
            await read(stranger, pool, one.chunk(0, 2), two.locator(reader.name, 0))
        stranger.close()
    reader.close()


async def test_shared_memory_is_for_this_host_only(peer: ArenaPeer) -> None:
    reader = SharedMemoryReader()
    assert reader.reaches(peer.locator("shared_memory", 0))
    elsewhere = peer.locator("shared_memory", 0)
    elsewhere.shared_memory.host_boot_id = "7" * 36
    assert not reader.reaches(elsewhere)
    assert not reader.reaches(Locator(shared_memory=SharedMemoryLocator()))


async def test_a_copy_that_no_thread_has_time_for_is_given_up(peer: ArenaPeer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "COPIED_AT_ONCE", 0)
    reader, pool, locator = SharedMemoryReader(), EmbeddingPool(POOL_BYTES), peer.locator("shared_memory", 1)
    assert await read(reader, pool, peer.chunk(1), locator) == payload_digest(1)
    busy = Event()
    with ThreadPoolExecutor(1) as executor:
        asyncio.get_running_loop().set_default_executor(executor)
        executor.submit(busy.wait, PATIENCE_SECONDS)
        with pytest.raises(TransferStuckError, match="threads are busy"):
            await read(reader, pool, peer.chunk(1), locator, timeout=0.2)
        busy.set()
        assert await read(reader, pool, peer.chunk(1), locator) == payload_digest(1)
    reader.close()


def test_f12_an_arena_that_was_let_go_is_not_mapped(peer: ArenaPeer) -> None:
    """What its number stands for by then would be mapped instead: zeros."""
    place = peer.locator("shared_memory", 1).shared_memory
    arena = MappedArena.open(place.socket_path, peer.boot_id, PATIENCE_SECONDS)
    arena.close()
    arena.check(peer.chunk(1), place.slot_offset)
    with pytest.raises(SlotClosedError):
        arena.map_slot(peer.chunk(1), place.slot_offset)


def test_a_receiver_cannot_write_the_arena(peer: ArenaPeer) -> None:
    path = Path(peer.locator("shared_memory", 0).shared_memory.socket_path)
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == 0o600
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(path))
        message, (descriptor,), _, _ = socket.recv_fds(connection, 1024, 2)
    boot_id, nbytes = arena_socket.parse(message)
    assert boot_id == peer.boot_id
    try:
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
    finally:
        os.close(descriptor)


async def test_f39_receivers_of_shared_memory_are_bounded(tmp_path: Path) -> None:
    """Those beyond the bound are closed at once; who has the arena keeps it, and a place that gets free is taken."""
    reader, pool = SharedMemoryReader(), EmbeddingPool(POOL_BYTES)
    with arena_peer(tmp_path) as peer, ExitStack() as stack:
        locator = peer.locator("shared_memory", 0)
        assert await read(reader, pool, peer.chunk(0), locator) == payload_digest(0)
        served = []
        for _ in range(MOST_RECEIVERS + 20):
            connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            connection.settimeout(PATIENCE_SECONDS)
            connection.connect(locator.shared_memory.socket_path)
            message, descriptors, _, _ = socket.recv_fds(connection, arena_socket.SIZE, 1)
            for descriptor in descriptors:
                os.close(descriptor)
            served.append(bool(message))
        assert served == [True] * (MOST_RECEIVERS - 1) + [False] * 21
        late = SharedMemoryReader()
        with pytest.raises(TransportError):
            await read(late, pool, peer.chunk(0), locator)
        assert await read(reader, pool, peer.chunk(0), locator) == payload_digest(0)
        stack.close()

        async def is_served() -> bool:
            try:
                return await read(late, pool, peer.chunk(0), locator) == payload_digest(0)
            except TransportError:
                return False

        await eventually(is_served)
        late.close()
    reader.close()


async def test_f39_receivers_of_shared_memory_wait_while_no_descriptor_is_left(tmp_path: Path) -> None:
    """The kernel tells of one that waits again and again: it is tried now and then, and the log says so once."""
    log = tmp_path / "log"
    with arena_peer(tmp_path, log=log) as peer, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        before = resource.prlimit(peer.process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(peer.process.pid, resource.RLIMIT_NOFILE, (3, before[1]))
        connection.settimeout(PATIENCE_SECONDS)
        connection.connect(peer.locator("shared_memory", 0).shared_memory.socket_path)
        await eventually(lambda: len(log.read_text()) > 0)
        resource.prlimit(peer.process.pid, resource.RLIMIT_NOFILE, before)
        message, descriptors, _, _ = await asyncio.to_thread(socket.recv_fds, connection, arena_socket.SIZE, 1)
        for descriptor in descriptors:
            os.close(descriptor)
        assert message
        assert len(log.read_text().splitlines()) == 1
