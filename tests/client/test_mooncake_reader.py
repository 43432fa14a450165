"""Reads by Mooncake from a peer that answers, that hangs, and that is gone."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from time import monotonic

import pytest

from encoder_client import EmbeddingPool
from encoder_client.checksums import RunningChecksum
from encoder_client.transports import TransferStuckError, TransportError, mooncake
from encoder_client.transports.mooncake import MooncakeReader
from epd.encoder.v1.embedding_pb2 import Checksum, EmbeddingChunk, LeaseGrant, Locator, MooncakeLocator
from tests.waiting import eventually

SLOT_BYTES = 1 << 16
SLOTS = 16
PEER = f"""
import sys
from encoder_svc.shared_memory import SharedMemory
from encoder_svc.transports.mooncake import serve_by_mooncake
arena = SharedMemory.create("arena", {SLOTS * SLOT_BYTES})
for index in range({SLOTS}):
    arena.view[index * {SLOT_BYTES} : (index + 1) * {SLOT_BYTES}] = bytes([index]) * {SLOT_BYTES}
server = serve_by_mooncake(arena, "127.0.0.1", "tcp", "")
print(server.session, server.address, flush=True)
sys.stdin.read()
"""


class Peer:
    """An arena whose slots hold their numbers, served by a process."""

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


async def read(reader: MooncakeReader, pool: EmbeddingPool, locator: Locator, timeout: float = 60.0) -> bytes:
    """Reads one slot and lets go of its memory."""
    slot = (await pool.reserve("prompt", [SLOT_BYTES])).take(0)
    await reader.read(
        EmbeddingChunk(nbytes=SLOT_BYTES), locator, LeaseGrant(), slot, RunningChecksum(Checksum()), timeout
    )
    return hashlib.sha256(slot.view).digest()


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


async def test_reads_at_the_same_time_do_not_mix(peer: Peer) -> None:
    pool = EmbeddingPool(4 * SLOTS * SLOT_BYTES)
    reader = MooncakeReader(pool)
    try:
        digests = await asyncio.gather(*(read(reader, pool, peer.locator(index % SLOTS)) for index in range(64)))
        assert digests == [hashlib.sha256(bytes([index % SLOTS]) * SLOT_BYTES).digest() for index in range(64)]
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
            assert await read(reader, pool, peer.locator(index)) == hashlib.sha256(bytes([index]) * SLOT_BYTES).digest()
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
        assert await slow == hashlib.sha256(bytes([1]) * SLOT_BYTES).digest()


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
        # The thread that read may be the last to let go of the slot.
        await eventually(lambda: gc.collect() >= 0 and pool.statistics.used == 0)
    finally:
        reader.close()
