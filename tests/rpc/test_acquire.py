"""Acquire: an embedding by its content key alone, or a look at it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from encoder_svc.rpc.servicer import SERVICE
from epd.content_key import item_content_key
from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.embedding_pb2 import ChunkState, EmbeddingChunk
from tests.deaf_caller import deaf_call
from tests.rpc.calls import calls_to, encode, fetch, image, is_idle, ready_chunks, release
from tests.rpc.metrics_page import batches
from tests.rpc.statuses import fields_of, reason_of
from tests.server_process import ServerProcess
from tests.waiting import eventually


@pytest.fixture
async def stub(server: ServerProcess) -> AsyncIterator[Any]:
    await eventually(lambda: is_idle(server))
    async with calls_to(server) as stub:
        yield stub
    await eventually(lambda: is_idle(server))


@pytest.fixture
async def held(stub: Any) -> EmbeddingChunk:
    """An embedding that the encoder holds and nobody leases."""
    fields = {"cache_policy": pb.CACHE_POLICY_USE, "delivery": pb.DELIVERY_CACHE_ONLY}
    (chunk,) = ready_chunks(await encode(stub, image(), cache_salt=secrets.token_bytes(16), **fields))
    return chunk


async def test_who_computes_the_key_needs_no_media(stub: Any, server: ServerProcess) -> None:
    salt = secrets.token_bytes(16)
    made = await encode(stub, image(), cache_policy=pb.CACHE_POLICY_USE, cache_salt=salt)
    rows = await fetch(stub, ready_chunks(made)[0])
    await release(stub, *ready_chunks(made))
    before = await batches(server)
    key = item_content_key((await server.info()).model.cache_namespace, salt, image())
    request = pb.AcquireRequest(content_key=key, receivers=["", "lm-1"], prompt_id="p", part_idx=3, num_parts=5)
    chunk = (await stub.Acquire(request)).chunk
    assert (chunk.state, chunk.from_cache) == (ChunkState.CHUNK_STATE_READY, True)
    assert (chunk.prompt_id, chunk.part_idx, chunk.num_parts) == ("p", 3, 5)
    assert [grant.receiver_id for grant in chunk.leases] == ["", "lm-1"]
    assert (await fetch(stub, chunk)).tobytes() == rows.tobytes()
    assert await batches(server) == before
    assert await release(stub, chunk) == [pb.LEASE_STATE_HELD] * 2


async def test_a_look_leases_nothing(stub: Any, server: ServerProcess, held: EmbeddingChunk) -> None:
    chunk = (await stub.Acquire(pb.AcquireRequest(content_key=held.content_key))).chunk
    assert (chunk.content_key, chunk.token_count) == (held.content_key, held.token_count)
    # Without a lease there is nothing to read by.
    assert (list(chunk.leases), list(chunk.locators), chunk.slot_key) == ([], [], b"")
    assert (chunk.part_idx, chunk.num_parts) == (0, 1)
    assert (await server.info()).load.leases == 0


async def test_an_acquired_lease_has_the_life_that_was_asked_for(stub: Any, held: EmbeddingChunk) -> None:
    request = pb.AcquireRequest(content_key=held.content_key, receivers=[""], lease_ttl={"seconds": 7})
    chunk = (await stub.Acquire(request)).chunk
    assert 0 < chunk.leases[0].ttl.ToMilliseconds() <= 7000, "and not the server's own, which is longer"
    await release(stub, chunk)


async def test_f10_a_lease_whose_caller_left_before_the_answer_ends_with_the_call(
    stub: Any, server: ServerProcess, held: EmbeddingChunk
) -> None:
    """That of a named receiver lives on: the receiver is told of it by its own subscription."""
    name = f"/{SERVICE}/Acquire"
    request = pb.AcquireRequest(content_key=held.content_key, receivers=["", "lm-1"], lease_ttl={"seconds": 300})
    async with deaf_call(server.target, name, request.SerializeToString()):
        assert (await server.info()).load.leases == 2

    async def one_is_left() -> bool:
        return (await server.info()).load.leases == 1

    await eventually(one_is_left)
    subscription = stub.Subscribe(pb.SubscribeRequest(receiver_id="lm-1"))
    assert await release(stub, (await subscription.read()).chunk) == [pb.LEASE_STATE_HELD]
    subscription.cancel()


async def test_what_is_not_here_is_not_found(stub: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await stub.Acquire(pb.AcquireRequest(content_key=secrets.token_bytes(32)))
    assert failed.value.code() is grpc.StatusCode.NOT_FOUND
    assert reason_of(failed.value) == "CONTENT_UNKNOWN"


WRONG = {
    "content_key": pb.AcquireRequest(content_key=bytes(31)),
    "part_idx": pb.AcquireRequest(content_key=bytes(32), part_idx=1),
    "receivers[1]": pb.AcquireRequest(content_key=bytes(32), receivers=["a", "a"]),
    "lease_ttl": pb.AcquireRequest(content_key=bytes(32), lease_ttl={"seconds": -1}),
}


@pytest.mark.parametrize("field", WRONG)
async def test_a_wrong_field_is_refused_by_its_path(stub: Any, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await stub.Acquire(WRONG[field])
    assert reason_of(failed.value) == "REQUEST_INVALID"
    assert fields_of(failed.value) == [field]
