"""Embeddings that stay in the encoder's memory: what keeps them, what ends them, and how that is seen."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from encoder_client import ClientSettings, EncoderClient, ReadError, Ready, image
from encoder_client.in_place import InPlaceEmbedding
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from tests.conftest import StartServer, servers
from tests.photograph import photo
from tests.rpc.calls import is_idle
from tests.server_process import ServerProcess
from tests.waiting import eventually

PHOTO = photo(252, 196)
LEASE_SECONDS = 9.0
"""So long that a busy machine renews in time, and so short that a test can wait for its end."""


@pytest.fixture(scope="module")
def own_server(tiny_checkpoint: Path) -> Iterator[ServerProcess]:
    """A server on which nobody else has leases."""
    with servers(tiny_checkpoint) as start:
        yield start()


@pytest.fixture
async def target(own_server: ServerProcess) -> AsyncIterator[str]:
    """Its address, for a test that leaves no lease."""
    yield own_server.target
    await eventually(lambda: is_idle(own_server))


async def ready(client: EncoderClient, lease_ttl: float | None = None, content: bytes = PHOTO) -> EmbeddingChunk:
    async with client.encode([image(content)], lease_ttl=lease_ttl) as call:
        [chunk] = [event.chunk async for event in call if isinstance(event, Ready)]
    return chunk


async def leases(client: EncoderClient) -> int:
    return (await client.server_info()).load.leases


async def test_it_is_read_without_a_copy_and_held_until_the_last_view_is_gone(target: str) -> None:
    async with EncoderClient(target) as client:
        copied = await client.read(await ready(client))
        embedding = await client.read_in_place(await ready(client))
        assert isinstance(embedding, InPlaceEmbedding)
        assert (embedding.transport, embedding.intact) == ("shared_memory", True)
        # Only the copy takes the pool's memory.
        assert client.pool.statistics.slots == 1
        rows = embedding.numpy()
        np.testing.assert_array_equal(rows, copied.numpy())
        assert await leases(client) == 1
        embedding.release()
        del embedding
        gc.collect()
        assert await leases(client) == 1, "a view is still there"
        np.testing.assert_array_equal(rows, copied.numpy())
        del rows
        gc.collect()

        async def none_is_left() -> bool:
            return await leases(client) == 0

        await eventually(none_is_left)


async def test_what_is_written_to_a_view_is_seen_by_nobody_else(target: str) -> None:
    async with EncoderClient(target) as client:
        first = await client.read_in_place(await ready(client))
        second = await client.read_in_place(await ready(client))
        original = second.numpy().copy()
        first.torch().zero_()
        assert not first.numpy().any()
        np.testing.assert_array_equal(second.numpy(), original)
        third = await client.read(await ready(client))
        np.testing.assert_array_equal(third.numpy(), original)
        first.release()
        again = await client.read_in_place(await ready(client))
        np.testing.assert_array_equal(again.numpy(), original)


async def test_its_lease_is_renewed_for_as_long_as_it_is_held(target: str) -> None:
    async with EncoderClient(target) as client:
        # One that is renewed much later is there first.
        longer = await client.read_in_place(await ready(client))
        held = await client.read_in_place(await ready(client, LEASE_SECONDS))
        # Another lease, which nobody renews, is granted later and ends by time: so the one before has outlived its own.
        forgotten = await ready(client, LEASE_SECONDS, content=photo(140, 112))

        async def two_are_left() -> bool:
            return await leases(client) == 2

        await eventually(two_are_left)
        with pytest.raises(ReadError):
            await client.renew([forgotten])
        assert held.intact
        assert longer.intact


async def in_a_task(views: list[Any]) -> None:
    views.clear()


async def in_a_callback(views: list[Any]) -> None:
    asyncio.get_running_loop().call_soon(views.clear)


async def in_a_thread(views: list[Any]) -> None:
    await asyncio.to_thread(views.clear)


async def in_a_collection(views: list[Any]) -> None:
    ring: list[Any] = [*views]
    ring.append(ring)
    views.clear()
    del ring
    await asyncio.to_thread(gc.collect)


@pytest.mark.parametrize("end", [in_a_task, in_a_callback, in_a_thread, in_a_collection])
async def test_wherever_the_last_views_die_their_leases_are_given_back(
    target: str, end: Callable[[list[Any]], Awaitable[None]]
) -> None:
    async with EncoderClient(target) as client:
        for _ in range(2):
            views = [(await client.read_in_place(await ready(client))).numpy() for _ in range(3)]
            assert await leases(client) == 3
            await end(views)

            async def none_is_left() -> bool:
                return await leases(client) == 0

            await eventually(none_is_left)


async def test_f12_an_engine_that_dies_ends_it_and_that_is_seen(start_server: StartServer) -> None:
    server = start_server()
    async with EncoderClient(server.target) as client:
        chunk, later = await ready(client), await ready(client)
        embedding = await client.read_in_place(chunk)
        rows = embedding.numpy().copy()
        server.engine().kill()
        await eventually(lambda: not embedding.intact)
        # Nobody has written there yet; nothing is read that is not mapped.
        assert embedding.numpy().shape == rows.shape
        with pytest.raises(ReadError):
            await client.read_in_place(later)


async def test_beyond_the_limit_it_is_copied(server: ServerProcess) -> None:
    async with EncoderClient(server.target, ClientSettings(in_place_bytes=1)) as client:
        embedding = await client.read_in_place(await ready(client))
        assert not isinstance(embedding, InPlaceEmbedding)
        assert embedding.intact
        assert client.pool.statistics.slots == 1
    async with EncoderClient(server.target, ClientSettings(transports=("inline",))) as client:
        embedding = await client.read_in_place(await ready(client))
        assert embedding.transport == "inline"


async def test_a_dead_receivers_leases_end_by_time(target: str) -> None:
    async with EncoderClient(target) as other:
        gone = EncoderClient(target)
        embedding = await gone.read_in_place(await ready(gone, LEASE_SECONDS))
        # As if its process had died: nothing is renewed or given back any more.
        in_place = gone._in_place
        assert in_place is not None
        assert in_place._timer is not None
        in_place._timer.cancel()

        async def none_is_left() -> bool:
            return await leases(other) == 0

        await eventually(none_is_left)
        await asyncio.sleep(0)
        del embedding
        await gone.__aexit__(None, None, None)
