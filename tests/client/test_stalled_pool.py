"""A pool that waits for an encoder, and an encoder that waits for the pool: leases go back, and are asked for again.

Limits of time are so long here that what needs one fails.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from encoder_client import ChunkError, ClientSettings, EmbeddingPool, EncoderClient, PoolError, ReadError, Ready, image
from encoder_client.pool.embedding_pool import Reservation
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from tests.client.chunks import layout, ready, rows
from tests.client.scripted_encoder import ScriptedEncoder
from tests.photograph import photo
from tests.server_process import ServerProcess
from tests.waiting import PATIENCE_SECONDS, eventually

LONG = 600.0
DATA = rows(40, 8)

FIRST, SECOND, THIRD = image(photo(560, 700)), image(photo(560, 672)), image(photo(532, 700))
"""Embeddings of about 500 000 bytes each: the arena has room for two."""


@pytest.fixture(scope="module")
def small_server(tiny_checkpoint: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(
        tiny_checkpoint, arena_bytes="1MiB", prompt_arena_share=1.0, space_seconds=LONG, lease_seconds=LONG
    )
    try:
        yield server.wait_ready()
    finally:
        server.close()


async def test_f38_a_circle_of_pool_and_arena_ends_without_a_limit_of_time(small_server: ServerProcess) -> None:
    """One prompt has the slots and waits for the pool; another has the pool and waits for a slot."""
    async with (
        EncoderClient(small_server.target) as client,
        client.encode([FIRST, SECOND], cache_salt=b"another") as call,
    ):
        expected = await call.embeddings()
    pool = EmbeddingPool(sum(embedding.nbytes for embedding in expected), patience=0.05)
    async with (
        asyncio.timeout(LONG / 5),
        EncoderClient(small_server.target, ClientSettings(read_timeout=LONG), pool=pool) as client,
        client.encode([FIRST, SECOND], prompt_id="leases") as leases,
    ):
        assert len([event async for event in leases if isinstance(event, Ready)]) == 2
        async with client.encode([THIRD], prompt_id="space") as space:
            third = asyncio.create_task(space.embeddings())
            await eventually(lambda: pool.statistics.slots == 1)
            both = asyncio.create_task(leases.embeddings())
            [embedding] = await third
        assert embedding.numpy().shape[0] == 19 * 25
        assert not both.done()
        embedding.release()
        del third
        first, second = await both
        assert pool.statistics.stalled == 1
        # The third took the slot of one of them. The other was still there.
        assert sorted([first.chunk.from_cache, second.chunk.from_cache]) == [False, True]
        for read, known in zip((first, second), expected, strict=True):
            np.testing.assert_allclose(read.numpy(), known.numpy(), atol=1e-5)
        info = await client.server_info()
        assert info.load.leases == 0


@asynccontextmanager
async def stalled(encoder: ScriptedEncoder) -> AsyncIterator[tuple[EncoderClient, Reservation]]:
    """A client whose pool is reserved for somebody who waits for an encoder."""
    pool = EmbeddingPool(DATA.nbytes, patience=0.01)
    async with (
        encoder.serve() as target,
        EncoderClient(target, ClientSettings(transports=("inline",)), pool=pool) as client,
        await pool.reserve("somebody", [DATA.nbytes]) as reservation,
    ):
        yield client, reservation


def chunk_at(encoder: ScriptedEncoder, lease: bytes = bytes(16)) -> EmbeddingChunk:
    chunk = ready(DATA)
    chunk.encoder.grpc_target = encoder.target
    chunk.content_key = bytes(32)
    chunk.leases[0].lease_id = lease
    return chunk


async def test_a_reservation_that_is_granted_at_once_costs_no_message() -> None:
    encoder = ScriptedEncoder([layout(40, 8), ready(DATA)], payload=DATA.tobytes)
    async with encoder.serve() as target, EncoderClient(target, ClientSettings(transports=("inline",))) as client:
        async with client.encode([image(b"file")]) as call:
            await call.embeddings()
        await client.read(chunk_at(encoder))
    assert (len(encoder.encodes), encoder.acquires, encoder.outcomes) == (1, [], ["OK", "OK"])


async def test_a_pool_whose_owners_have_all_they_wait_for_costs_no_message() -> None:
    encoder = ScriptedEncoder(payload=DATA.tobytes)
    async with stalled(encoder) as (client, reservation):
        slot = reservation.take(0)
        reading = asyncio.create_task(client.read(chunk_at(encoder)))
        await asyncio.wait([reading], timeout=0.1)  # much longer than its patience
        del slot
        gc.collect()
        await reading
        assert client.pool.statistics.stalled == 0
    assert (encoder.acquires, encoder.outcomes) == ([], ["OK"])


async def test_what_was_given_back_is_leased_again() -> None:
    encoder = ScriptedEncoder(payload=DATA.tobytes)
    async with stalled(encoder) as (client, reservation):
        reading = asyncio.create_task(client.read(chunk_at(encoder)))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await encoder.released.wait()
        encoder.cached = chunk_at(encoder, bytes([1] * 16))
        reservation.close()
        embedding = await reading
    np.testing.assert_array_equal(embedding.numpy(), DATA)
    assert [request.content_key for request in encoder.acquires] == [bytes(32)]
    assert encoder.outcomes == ["ABANDONED", "OK"]


async def test_what_is_gone_by_then_is_asked_for_by_its_media_and_else_told() -> None:
    encoder = ScriptedEncoder([layout(40, 8), ready(DATA)], payload=DATA.tobytes)
    async with stalled(encoder) as (client, reservation), client.encode([image(b"file")]) as call:
        ticket = asyncio.create_task(client.read(chunk_at(encoder)))
        reading = asyncio.create_task(call.embeddings())
        await eventually(lambda: len(encoder.outcomes) == 2)
        reservation.close()
        with pytest.raises(ReadError, match="part 0 is gone"):
            await ticket
        [embedding] = await reading
    np.testing.assert_array_equal(embedding.numpy(), DATA)
    assert [item.data for request in encoder.encodes for item in request.items] == [b"file", b"file"]
    assert encoder.outcomes == ["ABANDONED", "ABANDONED", "OK"]


async def test_an_encoder_that_is_full_is_asked_again() -> None:
    encoder = ScriptedEncoder([layout(40, 8), ready(DATA)], payload=DATA.tobytes)
    async with stalled(encoder) as (client, reservation), client.encode([image(b"file")], timeout=LONG) as call:
        reading = asyncio.create_task(call.embeddings())
        await eventually(lambda: len(encoder.outcomes) == 1)
        encoder.refusals = 2
        reservation.close()
        await reading
    assert len(encoder.encodes) == 1 + 3


async def test_another_embedding_by_the_same_name_is_refused() -> None:
    encoder = ScriptedEncoder(payload=DATA.tobytes)
    async with stalled(encoder) as (client, reservation):
        reading = asyncio.create_task(client.read(chunk_at(encoder)))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await encoder.released.wait()
        encoder.cached = chunk_at(encoder)
        encoder.cached.compatibility_fingerprint = bytes(32)
        reservation.close()
        with pytest.raises(ChunkError, match="compatibility_fingerprint"):
            await reading
    assert encoder.outcomes == ["ABANDONED", "ABANDONED"]


async def test_who_leaves_while_the_pool_is_stalled_leaves_nothing() -> None:
    encoder = ScriptedEncoder([layout(40, 8), ready(DATA)], payload=DATA.tobytes)
    encoder.hang = True
    async with stalled(encoder) as (client, reservation):
        async with client.encode([image(b"file")]) as call:
            reading = asyncio.create_task(call.embeddings())
            await eventually(lambda: encoder.outcomes == ["ABANDONED"])
            reading.cancel()
            await asyncio.wait([reading])
        async with asyncio.timeout(PATIENCE_SECONDS):
            await encoder.ended.wait()
        assert client.pool.statistics.waiting == 0
        reservation.close()
        assert client.pool.statistics.slots == 0
    assert (encoder.outcomes, encoder.acquires) == (["ABANDONED"], [])


async def test_f10_who_leaves_while_an_embedding_is_leased_again_gives_that_lease_back() -> None:
    encoder = ScriptedEncoder(payload=DATA.tobytes)
    encoder.acquires_go_on.clear()
    async with stalled(encoder) as (client, reservation):
        reading = asyncio.create_task(client.read(chunk_at(encoder)))
        async with asyncio.timeout(PATIENCE_SECONDS):
            await encoder.released.wait()
        again = bytes([1] * 16)
        encoder.cached = chunk_at(encoder, again)
        reservation.close()
        await eventually(lambda: len(encoder.acquires) == 1)
        reading.cancel()
        await asyncio.wait([reading])
        encoder.acquires_go_on.set()
        await eventually(lambda: again in encoder.given_back)


async def test_a_wait_for_space_that_is_too_long_ends_and_gives_all_leases_back() -> None:
    encoder = ScriptedEncoder([layout(40, 8), ready(DATA)], payload=DATA.tobytes)
    encoder.hang = True
    pool = EmbeddingPool(DATA.nbytes)
    async with (
        encoder.serve() as target,
        EncoderClient(target, ClientSettings(transports=("inline",), read_timeout=0.2), pool=pool) as client,
        await pool.reserve("somebody", [DATA.nbytes]),
        client.encode([image(b"file")]) as call,
    ):
        with pytest.raises(PoolError, match=r"came free in 0\.2 s"):
            await call.embeddings()
        # A release whose answer is late is asked for again.
        await eventually(lambda: set(encoder.outcomes) == {"ABANDONED"})
