"""Releases that come late, twice, in any order, on a real encoder."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random

import psutil
import pytest
import xxhash

from encoder_client import ClientSettings, EncoderClient, Ready, image
from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2 import CachePolicy, ReadOutcome
from tests.photograph import photo
from tests.rpc.calls import is_idle
from tests.server_process import ServerProcess
from tests.waiting import eventually

ITEM = image(photo(140, 112))
HELD, AGAIN, EXPIRED = (
    pb.LeaseState.LEASE_STATE_HELD,
    pb.LeaseState.LEASE_STATE_ALREADY_RELEASED,
    pb.LeaseState.LEASE_STATE_EXPIRED,
)
OUTCOMES = [
    ReadOutcome.READ_OUTCOME_OK,
    ReadOutcome.READ_OUTCOME_ABANDONED,
    ReadOutcome.READ_OUTCOME_TRANSPORT_FAILED,
]


async def ready_at(client: EncoderClient, receivers: list[str], lease_ttl: float | None) -> EmbeddingChunk:
    """A new embedding, leased to some receivers."""
    bypass = CachePolicy.CACHE_POLICY_BYPASS
    async with client.encode([ITEM], receivers=receivers, lease_ttl=lease_ttl, cache_policy=bypass) as call:
        [chunk] = [event.chunk async for event in call if isinstance(event, Ready)]
    return chunk


async def bytes_of(client: EncoderClient, lease: bytes) -> bytes:
    return b"".join(
        [pb.FetchResponse.FromString(piece).data async for piece in client.stub.fetch(pb.FetchRequest(lease_id=lease))]
    )


def some_of(chance: Random, leases: list[bytes]) -> Iterator[list[bytes]]:
    """Each lease three times, in calls of any size, in any order."""
    wishes = leases * 3
    chance.shuffle(wishes)
    while wishes:
        count = chance.randint(1, 5)
        yield wishes[:count]
        del wishes[:count]


@pytest.mark.parametrize("seed", range(3))
async def test_f11_releases_in_any_order_late_and_twice_free_each_lease_once(
    mooncake_server: ServerProcess, seed: int
) -> None:
    """What was not released stays readable and whole all the while, also in memory that is used again and again."""
    chance = Random(seed)
    async with EncoderClient(mooncake_server.target, ClientSettings(transports=("inline",))) as client:
        kept = [await ready_at(client, ["keeper", "other"], None) for _ in range(3)]
        mine = {chunk.leases[1].lease_id for chunk in kept}
        short = [await ready_at(client, ["late"], 0.3) for _ in range(3)]
        await eventually(lambda: leased(mooncake_server, 2 * len(kept)))  # nobody releases the short ones in time
        mine.update(chunk.leases[0].lease_id for chunk in short)
        for _ in range(3):  # others, in the memory that came free
            mine.add((await ready_at(client, ["another"], None)).leases[0].lease_id)

        async def release(leases: list[bytes]) -> list[tuple[bytes, pb.LeaseState]]:
            wishes = [pb.LeaseRelease(lease_id=lease, outcome=chance.choice(OUTCOMES)) for lease in leases]
            answer = await client.stub.release(pb.ReleaseRequest(leases=wishes))
            return [(status.lease_id, status.state) for status in answer.leases]

        answers = await asyncio.gather(*(release(leases) for leases in some_of(chance, sorted(mine))))
        states: dict[bytes, list[pb.LeaseState]] = {}
        for lease, state in (status for answer in answers for status in answer):
            states.setdefault(lease, []).append(state)
        late = {chunk.leases[0].lease_id for chunk in short}
        assert {lease: sorted(found) for lease, found in states.items()} == {
            lease: [EXPIRED] * 3 if lease in late else sorted([HELD, AGAIN, AGAIN]) for lease in mine
        }
        for chunk in kept:
            data = await bytes_of(client, chunk.leases[0].lease_id)
            assert xxhash.xxh3_64_intdigest(data) == chunk.checksum.value
        assert await release([chunk.leases[0].lease_id for chunk in kept]) == [
            (chunk.leases[0].lease_id, HELD) for chunk in kept
        ]
    await eventually(lambda: is_idle(mooncake_server))


async def test_a_lease_that_nobody_reads_goes_back_to_a_server_that_stood_still(
    mooncake_server: ServerProcess,
) -> None:
    """Whoever lets go of it goes on meanwhile."""
    async with EncoderClient(mooncake_server.target, ClientSettings(transports=("inline",))) as client:
        chunk = await ready_at(client, [], None)
        with mooncake_server.held(psutil.Process(mooncake_server.process.pid)):
            await client.abandon([chunk])
        await eventually(lambda: is_idle(mooncake_server))


async def leased(server: ServerProcess, count: int) -> bool:
    """So many leases live."""
    return (await server.info()).load.leases == count
