"""Reads by Mooncake from a peer that answers, that hangs, and that is gone."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from random import Random
from time import monotonic

import pytest
import xxhash

from encoder_client import EmbeddingPool
from encoder_client.checksums import RunningChecksum
from encoder_client.transports import TransferStuckError, TransportError, mooncake
from encoder_client.transports.mooncake import MooncakeReader
from encoder_client.transports.mooncake_transfer import MOST_PIECES
from epd.encoder.v1.embedding_pb2 import (
    CHECKSUM_ALGORITHM_XXH3_64,
    Checksum,
    EmbeddingChunk,
    LeaseGrant,
    Locator,
    MooncakeLocator,
)
from tests.waiting import eventually

SLOT_BYTES = 1 << 16
SLOTS = 16
PEER = f"""
import sys
from random import Random
from encoder_svc.shared_memory import SharedMemory
from encoder_svc.transports.mooncake import serve_by_mooncake
arena = SharedMemory.create("arena", {SLOTS * SLOT_BYTES})
for index in range({SLOTS}):
    arena.view[index * {SLOT_BYTES} : (index + 1) * {SLOT_BYTES}] = Random(index).randbytes({SLOT_BYTES})
server = serve_by_mooncake(arena, "127.0.0.1", "tcp", "")
print(server.session, server.address, flush=True)
sys.stdin.read()
"""


class Peer:
    """An arena whose slots hold bytes of their own, served by a process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        session, address = self.process.stdout.readline().split()
        self.session, self.address = session, int(address)

    def locator(self, index: int) -> Locator:
        location = MooncakeLocator(session=self.session, address=self.address + index * SLOT_BYTES, protocol="tcp")
        return Locator(mooncake=location)


@pytest.fixture
def peer() -> Iterator[Peer]:
    peer = Peer()
    try:
        yield peer
    finally:
        peer.process.kill()
        peer.process.communicate()


def payload(index: int) -> bytes:
    """What a slot holds."""
    return Random(index).randbytes(SLOT_BYTES)


def digest(index: int) -> bytes:
    """The SHA-256 of what a slot holds."""
    return hashlib.sha256(payload(index)).digest()


async def read(
    reader: MooncakeReader, pool: EmbeddingPool, locator: Locator, timeout: float = 60.0, nbytes: int = SLOT_BYTES
) -> bytes:
    """Reads one slot, or from its begin on, and lets go of its memory. Gives the SHA-256 of what came."""
    slot = (await pool.reserve("prompt", [nbytes])).take(0)
    chunk = EmbeddingChunk(nbytes=nbytes)
    await reader.read(chunk, locator, LeaseGrant(), slot, RunningChecksum(Checksum()), timeout)
    return hashlib.sha256(slot.view).digest()


@pytest.fixture(params=["by the thread", "by the loop"])
def pieces_of_a_slot(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads, a read of more than one slot is cut at the slots' bounds."""
    monkeypatch.setattr(mooncake, "QUICK_SECONDS", 600.0 if request.param == "by the loop" else 0.0)
    monkeypatch.setattr(mooncake, "QUICK_PIECE_BYTES", SLOT_BYTES)
    monkeypatch.setattr(mooncake, "PIECE_BYTES", SLOT_BYTES)


@asynccontextmanager
async def reading_from_stopped(peer: Peer, slots: int) -> AsyncIterator[tuple[MooncakeReader, EmbeddingPool]]:
    """A reader that has read once, and a pool of so many slots; the peer answers nothing until it is told to go on."""
    pool = EmbeddingPool(slots * SLOT_BYTES)
    reader = MooncakeReader(pool)
    try:
        await read(reader, pool, peer.locator(0))
        peer.process.send_signal(signal.SIGSTOP)
        await asyncio.to_thread(os.waitid, os.P_PID, peer.process.pid, os.WSTOPPED)
        yield reader, pool
    finally:
        reader.close()


async def nothing_is_held(pool: EmbeddingPool) -> None:
    """The thread that read may be the last to let go of a slot."""
    await eventually(lambda: gc.collect() >= 0 and pool.statistics.used == 0)


async def test_reads_at_the_same_time_do_not_mix(peer: Peer) -> None:
    pool = EmbeddingPool(4 * SLOTS * SLOT_BYTES)
    reader = MooncakeReader(pool)
    try:
        digests = await asyncio.gather(*(read(reader, pool, peer.locator(index % SLOTS)) for index in range(64)))
        assert digests == [digest(index % SLOTS) for index in range(64)]
    finally:
        reader.close()


@pytest.mark.parametrize("seconds", [0.0, 60.0], ids=["by the thread", "by the loop"])
async def test_one_after_the_other_is_read_by_the_thread_and_by_the_loop(
    peer: Peer, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    monkeypatch.setattr(mooncake, "QUICK_SECONDS", seconds)
    pool = EmbeddingPool(SLOT_BYTES)
    reader = MooncakeReader(pool)
    try:
        for index in [*range(SLOTS), *range(SLOTS)]:
            assert await read(reader, pool, peer.locator(index)) == digest(index)
    finally:
        reader.close()


async def test_what_is_not_over_soon_is_left_to_the_thread(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    async with reading_from_stopped(peer, 1) as (reader, pool):
        monkeypatch.setattr(mooncake, "QUICK_SECONDS", 0.05)
        slow = asyncio.create_task(read(reader, pool, peer.locator(1)))
        await asyncio.sleep(0)
        over = monotonic() + 0.05
        await eventually(lambda: monotonic() > over)
        peer.process.send_signal(signal.SIGCONT)
        assert await slow == digest(1)


async def test_a_read_that_is_cancelled_while_the_loop_makes_it_keeps_its_memory(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with reading_from_stopped(peer, 1) as (reader, pool):
        monkeypatch.setattr(mooncake, "QUICK_SECONDS", 600.0)
        left = asyncio.create_task(read(reader, pool, peer.locator(1)))
        await asyncio.sleep(0)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert pool.statistics.used == SLOT_BYTES, "late bytes could hit memory that others have by now"
        peer.process.send_signal(signal.SIGCONT)
        await eventually(lambda: pool.statistics.used == 0)


async def test_a_transfer_that_hangs_keeps_its_memory_until_it_has_ended(peer: Peer) -> None:
    async with reading_from_stopped(peer, 4) as (reader, pool):
        given_up = asyncio.create_task(read(reader, pool, peer.locator(1)))
        with pytest.raises(TransferStuckError):
            await read(reader, pool, peer.locator(2), timeout=0.3)
        given_up.cancel()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        with pytest.raises(TransportError, match="hangs"):
            await read(reader, pool, peer.locator(3))
        assert pool.statistics.used == 2 * SLOT_BYTES, "late bytes could hit memory that others have by now"
        peer.process.send_signal(signal.SIGCONT)
        await eventually(lambda: pool.statistics.used == 0)
        await read(reader, pool, peer.locator(4))


async def test_a_peer_that_is_gone_is_an_error_at_once(peer: Peer) -> None:
    pool = EmbeddingPool(SLOT_BYTES)
    reader = MooncakeReader(pool)
    try:
        await read(reader, pool, peer.locator(0))
        peer.process.kill()
        peer.process.wait()
        for _ in range(2):
            with pytest.raises(TransportError):
                await read(reader, pool, peer.locator(1), timeout=10.0)
        await nothing_is_held(pool)
    finally:
        reader.close()


@pytest.mark.usefixtures("pieces_of_a_slot")
async def test_every_size_comes_whole_and_is_summed_on_the_way(peer: Peer) -> None:
    pool = EmbeddingPool(SLOTS * SLOT_BYTES)
    reader = MooncakeReader(pool)
    arena = b"".join(map(payload, range(SLOTS)))
    bounds = [pieces * SLOT_BYTES + more for pieces in (1, 2, 3, 7) for more in (-1, 0, 1)]
    try:
        for nbytes in [1, *bounds, 5 * SLOT_BYTES // 2 + 7, SLOTS * SLOT_BYTES - 1, SLOTS * SLOT_BYTES]:
            slot = (await pool.reserve("prompt", [nbytes])).take(0)
            expected = Checksum(algorithm=CHECKSUM_ALGORITHM_XXH3_64, value=xxhash.xxh3_64_intdigest(arena[:nbytes]))
            checksum = RunningChecksum(expected)
            await reader.read(EmbeddingChunk(nbytes=nbytes), peer.locator(0), LeaseGrant(), slot, checksum, 60.0)
            assert bytes(slot.view) == arena[:nbytes]
            assert checksum.matches(memoryview(b"")), "some of it is left to be summed"
            del slot
    finally:
        reader.close()


@pytest.mark.usefixtures("pieces_of_a_slot")
async def test_a_piece_that_fails_is_the_fault_of_its_read(peer: Peer) -> None:
    """What lies behind the arena cannot be read, wherever in the read it comes."""
    pool = EmbeddingPool(4 * SLOT_BYTES)
    reader = MooncakeReader(pool)

    async def is_read() -> bool:
        """Mooncake may take a connection again that the refusal has just ended."""
        try:
            return await read(reader, pool, peer.locator(1)) == digest(1)
        except TransportError:
            return False

    try:
        for inside in (1, 2, 3):
            await eventually(is_read)
            with pytest.raises(TransportError) as raised:
                await read(reader, pool, peer.locator(SLOTS - inside), nbytes=4 * SLOT_BYTES)
            assert raised.type is TransportError
            del raised
            await nothing_is_held(pool)
        await eventually(is_read)
    finally:
        reader.close()


@pytest.mark.usefixtures("pieces_of_a_slot")
async def test_a_read_whose_piece_has_failed_keeps_its_memory_while_another_is_under_way(peer: Peer) -> None:
    async with reading_from_stopped(peer, 2) as (reader, pool):
        # The second piece cannot be begun, at no address at all. The peer does not refuse the first one yet.
        locator = peer.locator(0)
        locator.mooncake.address = (1 << 64) - SLOT_BYTES
        with pytest.raises(TransferStuckError):
            await read(reader, pool, locator, timeout=0.3, nbytes=2 * SLOT_BYTES)
        gc.collect()
        assert pool.statistics.used == 2 * SLOT_BYTES, "late bytes could hit memory that others have by now"
        peer.process.send_signal(signal.SIGCONT)
        await nothing_is_held(pool)
        assert await read(reader, pool, peer.locator(2)) == digest(2)


@pytest.mark.usefixtures("pieces_of_a_slot")
async def test_a_read_that_is_cancelled_halfway_begins_nothing_more(peer: Peer) -> None:
    async with reading_from_stopped(peer, 8) as (reader, pool):
        left = asyncio.create_task(read(reader, pool, peer.locator(1), nbytes=8 * SLOT_BYTES))
        await asyncio.sleep(0)
        await eventually(reader._transfers.empty)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        peer.process.send_signal(signal.SIGCONT)
        await nothing_is_held(pool)
        unread = ctypes.string_at(pool.address + MOST_PIECES * SLOT_BYTES, (8 - MOST_PIECES) * SLOT_BYTES)
        assert not any(unread)
        assert await read(reader, pool, peer.locator(1)) == digest(1)


@pytest.mark.usefixtures("pieces_of_a_slot")
async def test_a_peer_that_dies_halfway_is_one_error(peer: Peer) -> None:
    async with reading_from_stopped(peer, 8) as (reader, pool):
        reading = asyncio.create_task(read(reader, pool, peer.locator(1), nbytes=8 * SLOT_BYTES))
        await asyncio.sleep(0)
        peer.process.kill()
        with pytest.raises(TransportError) as raised:
            await reading
        assert raised.type is TransportError
        del raised, reading
        await nothing_is_held(pool)
