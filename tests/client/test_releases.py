"""How leases are given back: at once without load, many in one call with it."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from encoder_client.releases import ReleaseBatcher
from encoder_client.stub import EncoderStub
from epd.encoder.v1.encoder_service_pb2 import (
    LEASE_STATE_HELD,
    READ_OUTCOME_OK,
    LeaseStatus,
    ReleaseRequest,
    ReleaseResponse,
)
from tests.waiting import eventually


class SlowServer:
    """Answers ``Release`` when the test says so."""

    def __init__(self) -> None:
        self.calls: list[list[bytes]] = []
        self.answers = asyncio.Semaphore(0)

    async def release(self, request: ReleaseRequest, timeout: float) -> ReleaseResponse:
        self.calls.append([lease.lease_id for lease in request.leases])
        await self.answers.acquire()
        return ReleaseResponse(leases=[LeaseStatus(lease_id=name, state=LEASE_STATE_HELD) for name in self.calls[-1]])


def batcher(server: SlowServer) -> ReleaseBatcher:
    return ReleaseBatcher(cast("EncoderStub", cast("Any", server)), timeout=5.0)


async def test_what_ends_during_a_call_goes_together_in_the_next() -> None:
    server = SlowServer()
    releases = batcher(server)
    names = [b"%d" % number for number in range(20)]
    first = asyncio.create_task(releases.release(names[0], READ_OUTCOME_OK))
    await eventually(lambda: bool(server.calls))
    assert server.calls == [names[:1]]
    others = [asyncio.create_task(releases.release(name, READ_OUTCOME_OK)) for name in names[1:]]
    await asyncio.sleep(0)
    server.answers.release()
    assert await first == LEASE_STATE_HELD
    await eventually(lambda: len(server.calls) > 1)
    server.answers.release()
    assert await asyncio.gather(*others) == [LEASE_STATE_HELD] * 19
    assert server.calls == [names[:1], names[1:]]


async def test_closing_sends_what_waits_for_a_call() -> None:
    server = SlowServer()
    releases = batcher(server)
    tasks = [asyncio.create_task(releases.release(b"a", READ_OUTCOME_OK))]
    await eventually(lambda: bool(server.calls))
    tasks.append(asyncio.create_task(releases.release(b"b", READ_OUTCOME_OK)))
    await asyncio.sleep(0)
    server.answers.release()
    server.answers.release()
    await releases.close()
    assert server.calls == [[b"a"], [b"b"]]
    assert await asyncio.gather(*tasks) == [LEASE_STATE_HELD] * 2
