"""Embeddings that the encoder holds: who shares them, who does not, and that nothing is computed for those who do."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest

from epd.content_key import item_content_key
from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from tests.photograph import photo
from tests.rpc.calls import (
    END_OF_STREAM,
    SECONDS,
    calls_to,
    encode,
    encode_request,
    events_of,
    failures,
    fetch,
    image,
    is_idle,
    kinds,
    ready_chunks,
    release,
)
from tests.rpc.metrics_page import batches, metric
from tests.rpc.statuses import fields_of, reason_of
from tests.server_process import ServerProcess
from tests.waiting import eventually

PHOTO = photo(168, 112)
USE, REFRESH, BYPASS = pb.CACHE_POLICY_USE, pb.CACHE_POLICY_REFRESH, pb.CACHE_POLICY_BYPASS


@pytest.fixture
async def stub(server: ServerProcess) -> AsyncIterator[Any]:
    await eventually(lambda: is_idle(server))
    async with calls_to(server) as stub:
        yield stub
    await eventually(lambda: is_idle(server))


@pytest.fixture
def salt() -> bytes:
    """A cache of the test's own."""
    return secrets.token_bytes(16)


async def one(stub: Any, salt: bytes, *items: MediaItem, **fields: Any) -> EmbeddingChunk:
    """The one READY chunk of a request, whose lease is given back."""
    items = items or (image(data=PHOTO),)
    (chunk,) = ready_chunks(await encode(stub, *items, **{"cache_policy": USE, "cache_salt": salt, **fields}))
    await release(stub, chunk)
    return chunk


async def test_a_cached_request_is_one_message_without_layout(stub: Any, server: ServerProcess, salt: bytes) -> None:
    made = ready_chunks(await encode(stub, image(data=PHOTO), cache_policy=USE, cache_salt=salt))
    rows = await fetch(stub, made[0])
    before, hits = await batches(server), await metric(server, "cache_lookups_total", result="hit")
    request = encode_request(image(data=PHOTO), cache_policy=USE, cache_salt=salt)
    call = stub.Encode(request, timeout=SECONDS)
    events = list((await call.read()).events)
    assert await call.read() is END_OF_STREAM
    assert kinds(events) == ["accepted", "ready", "complete"]
    assert (events[-1].complete.ready, events[-1].complete.from_cache) == (1, 1)
    (chunk,) = ready_chunks(events)
    assert chunk.from_cache
    assert not made[0].from_cache
    # The same bytes of the same slot, by a lease of its own.
    same = ("content_key", "generation", "slot_key", "checksum", "nbytes", "grid_dim", "token_count", "tensors")
    assert all(getattr(chunk, name) == getattr(made[0], name) for name in same)
    assert chunk.leases[0].lease_id != made[0].leases[0].lease_id
    assert (await fetch(stub, chunk)).tobytes() == rows.tobytes()
    assert await batches(server) == before
    assert await metric(server, "cache_lookups_total", result="hit") == hits + 1
    assert await release(stub, chunk, *made) == [pb.LEASE_STATE_HELD] * 2


async def test_a_cached_part_is_ready_beside_one_that_is_computed(stub: Any, salt: bytes) -> None:
    await one(stub, salt)
    events = await encode(stub, image(0, photo(56, 84)), image(1, PHOTO), cache_policy=USE, cache_salt=salt)
    assert [chunk.from_cache for chunk in ready_chunks(events)] == [False, True]
    assert events[-1].complete.from_cache == 1
    await release(stub, *ready_chunks(events))


async def test_same_content_at_once_is_computed_once(stub: Any, server: ServerProcess, salt: bytes) -> None:
    before = await batches(server)
    with server.held(server.media_worker()):
        request = encode_request(image(data=PHOTO), cache_policy=USE, cache_salt=salt)
        calls = [stub.Encode(request, timeout=SECONDS) for _ in range(12)]
        for call in calls:
            await call.read()
    chunks = [chunk for events in await asyncio.gather(*map(events_of, calls)) for chunk in ready_chunks(events)]
    assert len(chunks) == 12
    assert len({(chunk.generation, chunk.checksum.value) for chunk in chunks}) == 1
    assert len({lease.lease_id for chunk in chunks for lease in chunk.leases}) == 12
    count, items = await batches(server)
    assert (count - before[0], items - before[1]) == (1, 1)
    assert await release(stub, *chunks) == [pb.LEASE_STATE_HELD] * 12


async def test_f24_the_first_callers_cancel_does_not_hurt_the_others(
    stub: Any, server: ServerProcess, salt: bytes
) -> None:
    before = await batches(server)
    with server.held(server.engine()):
        request = encode_request(image(data=PHOTO), cache_policy=USE, cache_salt=salt)
        first, second, third = (stub.Encode(request, timeout=SECONDS) for _ in range(3))
        for call in (first, second, third):
            await call.read()
        first.cancel()

        async def first_is_gone() -> bool:
            return (await server.info()).load.requests == 2

        await eventually(first_is_gone)
    for call in (second, third):
        chunks = ready_chunks(await events_of(call))
        assert len(chunks) == 1
        await release(stub, *chunks)
    assert (await batches(server))[1] - before[1] == 1


async def test_f24_when_all_have_left_nothing_is_computed(stub: Any, server: ServerProcess, salt: bytes) -> None:
    with server.held(server.media_worker()):
        request = encode_request(image(data=PHOTO), cache_policy=USE, cache_salt=salt)
        calls = [stub.Encode(request, timeout=SECONDS) for _ in range(3)]
        for call in calls:
            await call.read()
            call.cancel()

        async def all_are_gone() -> bool:
            return (await server.info()).load.requests == 0

        await eventually(all_are_gone)
    await eventually(lambda: is_idle(server))
    assert not (await one(stub, salt)).from_cache


@pytest.mark.parametrize(
    "item",
    [
        image(data=photo(168, 140)),
        MediaItem(modality=Modality.MODALITY_IMAGE, data=PHOTO, image={"max_pixels": 112 * 84}),
    ],
    ids=["media", "options"],
)
async def test_f23_another_content_is_another_embedding(stub: Any, salt: bytes, item: MediaItem) -> None:
    first, other = await one(stub, salt), await one(stub, salt, item)
    assert not other.from_cache
    assert other.content_key != first.content_key
    assert list(other.grid_dim) != list(first.grid_dim)
    # Both are kept.
    assert (await one(stub, salt)).checksum == first.checksum
    assert (await one(stub, salt, item)).checksum == other.checksum


async def test_f23_a_salt_separates(stub: Any, salt: bytes) -> None:
    first = await one(stub, salt)
    other = await one(stub, salt + b"x")
    assert not other.from_cache
    assert other.content_key != first.content_key
    assert (await one(stub, salt)).from_cache


async def test_f23_options_at_their_defaults_are_no_options(stub: Any, salt: bytes) -> None:
    first = await one(stub, salt)
    item = MediaItem(modality=Modality.MODALITY_IMAGE, data=PHOTO, image={}, mime_type="image/jpeg")
    again = await one(stub, salt, item)
    assert (again.from_cache, again.content_key) == (True, first.content_key)


async def test_refresh_computes_again_and_replaces(stub: Any, salt: bytes) -> None:
    first = await one(stub, salt)
    fresh = await one(stub, salt, cache_policy=REFRESH)
    assert not fresh.from_cache
    assert fresh.generation != first.generation
    later = await one(stub, salt)
    assert (later.from_cache, later.generation) == (True, fresh.generation)


async def test_bypass_neither_looks_nor_keeps(stub: Any, server: ServerProcess, salt: bytes) -> None:
    assert not (await one(stub, salt, cache_policy=BYPASS)).from_cache
    first = await one(stub, salt)
    assert not first.from_cache
    assert not (await one(stub, salt, cache_policy=BYPASS)).from_cache
    assert (await one(stub, salt)).generation == first.generation


async def test_cache_only_leases_nothing_and_the_next_request_hits(
    stub: Any, server: ServerProcess, salt: bytes
) -> None:
    fields = {"cache_policy": USE, "cache_salt": salt, "delivery": pb.DELIVERY_CACHE_ONLY}
    events = await encode(stub, image(0, PHOTO), image(1, photo(84, 84)), **fields)
    chunks = ready_chunks(events)
    assert [list(chunk.leases) for chunk in chunks] == [[], []]
    assert events[-1].complete.ready == 2
    info = await server.info()
    assert (info.load.leases, info.engines[0].leased_bytes) == (0, 0)
    assert info.engines[0].cached_bytes >= sum(chunk.nbytes for chunk in chunks)
    before = await batches(server)
    hit = await one(stub, salt)
    assert (hit.from_cache, hit.content_key) == (True, chunks[0].content_key)
    assert await batches(server) == before


async def test_cache_only_without_a_cache_is_refused(stub: Any) -> None:
    with pytest.raises(Exception, match="BYPASS keeps nothing") as refused:
        await encode(stub, delivery=pb.DELIVERY_CACHE_ONLY)
    assert fields_of(refused.value) == ["cache_policy"]  # type: ignore[arg-type] # an AioRpcError, or it fails here


async def test_f23_the_content_key_is_the_published_one(stub: Any, server: ServerProcess, salt: bytes) -> None:
    item = MediaItem(modality=Modality.MODALITY_IMAGE, data=PHOTO, image={"max_pixels": 112 * 84})
    namespace = (await server.info()).model.cache_namespace
    assert (await one(stub, salt, item)).content_key == item_content_key(namespace, salt, item)


async def test_a_content_key_is_a_source(stub: Any, server: ServerProcess, salt: bytes) -> None:
    made = await one(stub, salt)
    before = await batches(server)
    item = MediaItem(modality=Modality.MODALITY_IMAGE, content_key=made.content_key)
    named = await one(stub, salt, item)
    assert (named.from_cache, named.generation) == (True, made.generation)
    assert await batches(server) == before


async def test_a_content_key_that_is_not_here_fails_its_part(stub: Any, salt: bytes) -> None:
    items = [MediaItem(modality=Modality.MODALITY_IMAGE, content_key=bytes(32)), image(1, PHOTO)]
    events = await encode(stub, *items, cache_policy=USE, cache_salt=salt)
    (failed,) = failures(events)
    assert (failed.part_idx, reason_of(failed)) == (0, "CONTENT_UNKNOWN")
    await release(stub, *ready_chunks(events))


async def test_f37_f16_a_failure_is_not_cached(stub: Any, salt: bytes) -> None:
    for _ in range(2):
        (failed,) = failures(await encode(stub, image(data=PHOTO[:900]), cache_policy=USE, cache_salt=salt))
        assert reason_of(failed) == "MEDIA_TRUNCATED"
