"""Leases as their holders see them: read, release, renew, expire."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from tests.rpc.calls import calls_to, encode, fetch, is_idle, ready_chunks, release
from tests.rpc.statuses import reason_of
from tests.server_process import ServerProcess
from tests.waiting import eventually


@pytest.fixture
async def stub(server: ServerProcess) -> AsyncIterator[Any]:
    await eventually(lambda: is_idle(server))
    async with calls_to(server) as stub:
        yield stub
    await eventually(lambda: is_idle(server))


async def one_chunk(stub: Any, **fields: Any) -> EmbeddingChunk:
    (chunk,) = ready_chunks(await encode(stub, **fields))
    return chunk


async def fetch_fails(stub: Any, lease: bytes, **fields: int) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await stub.Fetch(pb.FetchRequest(lease_id=lease, **fields)).read()
    return failed.value


async def test_a_leased_embedding_is_read_and_given_back(stub: Any, server: ServerProcess) -> None:
    chunk = await one_chunk(stub)
    rows = await fetch(stub, chunk)
    assert rows.shape == (chunk.token_count, (await server.info()).model.hidden_size)
    assert np.isfinite(rows).all()
    assert rows.std() > 0
    assert (await server.info()).engines[0].leased_bytes >= chunk.nbytes
    assert await release(stub, chunk) == [pb.LEASE_STATE_HELD]


async def test_f11_releasing_again_changes_nothing(stub: Any) -> None:
    first, second = await one_chunk(stub), await one_chunk(stub)
    assert await release(stub, first) == [pb.LEASE_STATE_HELD]
    assert await release(stub, first) == [pb.LEASE_STATE_ALREADY_RELEASED]
    assert await release(stub, first, second) == [pb.LEASE_STATE_ALREADY_RELEASED, pb.LEASE_STATE_HELD]
    error = await fetch_fails(stub, first.leases[0].lease_id)
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "LEASE_RELEASED")


@pytest.mark.parametrize("lease", [b"", b"short", bytes(16)])
async def test_an_unknown_lease_reads_nothing(stub: Any, lease: bytes) -> None:
    error = await fetch_fails(stub, lease)
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.NOT_FOUND, "LEASE_UNKNOWN")
    released = await stub.Release(pb.ReleaseRequest(leases=[pb.LeaseRelease(lease_id=lease)]))
    renewed = await stub.Renew(pb.RenewRequest(lease_ids=[lease]))
    assert [answer.leases[0].state for answer in (released, renewed)] == [pb.LEASE_STATE_UNKNOWN] * 2


async def test_an_expired_lease_reads_nothing_and_frees_its_bytes(stub: Any, server: ServerProcess) -> None:
    chunk = await one_chunk(stub, lease_ttl={"nanos": 200_000_000})
    assert chunk.leases[0].ttl.ToMilliseconds() <= 200

    async def nothing_is_leased() -> bool:
        return (await server.info()).load.leases == 0

    await eventually(nothing_is_leased)
    error = await fetch_fails(stub, chunk.leases[0].lease_id)
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "LEASE_EXPIRED")
    assert await release(stub, chunk) == [pb.LEASE_STATE_EXPIRED]


async def test_a_renewed_lease_outlives_one_that_is_not(stub: Any, server: ServerProcess) -> None:
    renewed = await one_chunk(stub, lease_ttl={"seconds": 200})
    request = pb.RenewRequest(lease_ids=[renewed.leases[0].lease_id], ttl={"seconds": 500})
    answer = (await stub.Renew(request)).leases[0]
    assert answer.state == pb.LEASE_STATE_HELD
    assert 200_000 < answer.ttl.ToMilliseconds() <= 500_000
    left = await one_chunk(stub, lease_ttl={"nanos": 200_000_000})

    async def the_other_expired() -> bool:
        answer = await stub.Renew(pb.RenewRequest(lease_ids=[right.lease_id for right in renewed.leases]))
        assert answer.leases[0].state == pb.LEASE_STATE_HELD
        return (await server.info()).load.leases == 1

    await eventually(the_other_expired)
    assert await release(stub, renewed, left) == [pb.LEASE_STATE_HELD, pb.LEASE_STATE_EXPIRED]


async def test_a_lease_lives_no_longer_than_the_server_allows(stub: Any, server: ServerProcess) -> None:
    limit = (await server.info()).limits.max_lease_ttl.ToMilliseconds()
    chunk = await one_chunk(stub, lease_ttl={"seconds": 10**6})
    assert chunk.leases[0].ttl.ToMilliseconds() <= limit
    renewed = await stub.Renew(pb.RenewRequest(lease_ids=[chunk.leases[0].lease_id], ttl={"seconds": 10**6}))
    assert renewed.leases[0].ttl.ToMilliseconds() <= limit
    await release(stub, chunk)


async def test_each_named_receiver_gets_its_own_lease(stub: Any, server: ServerProcess) -> None:
    chunk = await one_chunk(stub, delivery=pb.DELIVERY_RECEIVERS, receivers=["lm-3/tp0", "lm-3/tp1"])
    assert [grant.receiver_id for grant in chunk.leases] == ["lm-3/tp0", "lm-3/tp1"]
    first, second = (pb.LeaseRelease(lease_id=grant.lease_id) for grant in chunk.leases)
    assert first.lease_id != second.lease_id
    await stub.Release(pb.ReleaseRequest(leases=[first]))
    assert (await server.info()).engines[0].leased_bytes >= chunk.nbytes
    piece = await stub.Fetch(pb.FetchRequest(lease_id=second.lease_id, offset=4, length=8)).read()
    assert len(piece.data) == 8
    await stub.Release(pb.ReleaseRequest(leases=[second]))


async def test_bytes_outside_the_slot_are_refused(stub: Any) -> None:
    chunk = await one_chunk(stub)
    lease = chunk.leases[0].lease_id
    for fields in ({"offset": chunk.nbytes + 1}, {"offset": chunk.nbytes, "length": 1}, {"length": 2**63}):
        error = await fetch_fails(stub, lease, **fields)
        assert (error.code(), reason_of(error)) == (grpc.StatusCode.OUT_OF_RANGE, "RANGE_INVALID")
    await release(stub, chunk)


async def test_a_report_of_corruption_of_a_good_slot_loses_nothing(stub: Any) -> None:
    chunk = await one_chunk(stub, delivery=pb.DELIVERY_RECEIVERS, receivers=["a", "b"])
    first, second = chunk.leases
    corrupt = pb.LeaseRelease(lease_id=first.lease_id, outcome=pb.READ_OUTCOME_CORRUPT)
    answer = await stub.Release(pb.ReleaseRequest(leases=[corrupt]))
    assert answer.leases[0].state == pb.LEASE_STATE_HELD
    pieces = [piece async for piece in stub.Fetch(pb.FetchRequest(lease_id=second.lease_id))]
    assert sum(len(piece.data) for piece in pieces) == chunk.nbytes
    answer = await stub.Release(pb.ReleaseRequest(leases=[pb.LeaseRelease(lease_id=second.lease_id)]))
    assert answer.leases[0].state == pb.LEASE_STATE_HELD
