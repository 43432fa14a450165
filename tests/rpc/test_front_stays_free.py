"""The RPC loop is free while a decode or a forward is blocked: they are held by an event, not by the clock."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from epd.encoder.v1 import encoder_service_pb2 as pb
from tests.photograph import photo
from tests.rpc.calls import (
    SECONDS,
    calls_to,
    encode,
    encode_request,
    events_of,
    failures,
    image,
    is_idle,
    kinds,
    ready_chunks,
    release,
)
from tests.rpc.statuses import reason_of
from tests.server_process import ServerProcess
from tests.waiting import eventually

SMALL = photo(56, 56)


@pytest.mark.parametrize(("place", "state"), [("media worker", "preparing"), ("engine", "encoding")])
async def test_f07_calls_are_answered_while_work_is_blocked(server: ServerProcess, place: str, state: str) -> None:
    child = server.media_worker() if place == "media worker" else server.engine()
    await eventually(lambda: is_idle(server))
    async with server.channel() as channel, calls_to(server) as stub:
        health: Any = HealthStub(channel)
        leased = ready_chunks(await encode(stub))
        with server.held(child):
            call = stub.Encode(encode_request(*map(image, range(4))), timeout=SECONDS)
            await call.read()

            async def one_is_blocked() -> bool:
                return (await server.info()).load.parts[state] > 0

            await eventually(one_is_blocked)
            for _ in range(20):
                info = await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=SECONDS)
                assert info.load.requests == 1
                answer = await health.Check(HealthCheckRequest(), timeout=SECONDS)
                assert answer.status == HealthCheckResponse.SERVING
            # What needs neither a worker nor an engine goes on too.
            assert await release(stub, *leased) == [pb.LEASE_STATE_HELD]
            assert (await stub.Cancel(pb.CancelRequest(request_id="none"))).requests == 0
            if place == "engine":
                (failed,) = failures(await encode(stub, image(data=b"no image")))
                assert reason_of(failed) == "MEDIA_UNRECOGNIZED"
        events = await events_of(call)
        assert kinds(events).count("ready") == 4
        await release(stub, *ready_chunks(events))


async def test_f01_two_hundred_requests_at_once_all_end_once(server: ServerProcess) -> None:
    requests = 200
    await eventually(lambda: is_idle(server))
    async with calls_to(server) as stub:
        with server.held(server.engine()):
            calls = [
                stub.Encode(encode_request(image(data=SMALL), image(1, SMALL)), timeout=SECONDS)
                for _ in range(requests)
            ]
            for call in calls:
                assert kinds((await call.read()).events)[0] == "accepted"
            # They wait behind one forward, and the front answers.
            assert (await server.info()).load.requests == requests
        everything = await asyncio.gather(*map(events_of, calls))
        for events in everything:
            assert [chunk.part_idx for chunk in ready_chunks(events)] == [0, 1]
            assert kinds(events).count("complete") == 1
        chunks = [chunk for events in everything for chunk in ready_chunks(events)]
        assert set(await release(stub, *chunks)) == {pb.LEASE_STATE_HELD}
    await eventually(lambda: is_idle(server))


async def test_f39_a_caller_who_does_not_read_holds_up_nobody(server: ServerProcess) -> None:
    await eventually(lambda: is_idle(server))
    async with calls_to(server) as silent, calls_to(server) as other:
        call = silent.Encode(encode_request(*map(image, range(64))), timeout=SECONDS)

        async def all_have_ended() -> bool:
            load = (await server.info()).load
            return (load.requests, load.leases) == (0, 64)

        await eventually(all_have_ended)
        await release(other, *ready_chunks(await encode(other)))
        # What was said meanwhile waited: at most three events for each part.
        events = await events_of(call)
        assert [chunk.part_idx for chunk in ready_chunks(events)] == list(range(64))
        await release(silent, *ready_chunks(events))
    await eventually(lambda: is_idle(server))


async def test_loop_lag_shows_that_the_loop_was_held(server: ServerProcess) -> None:
    async def lag() -> float:
        return (await server.info()).load.loop_lag.ToNanoseconds() / 1e9

    begun = time.monotonic()
    before = await lag()
    server.process.suspend()
    try:
        # The first thing that it is asked afterwards, while it still looks back on the hold.
        asked = asyncio.create_task(lag())
        # Not a wait for something to happen: the length of the hold is what is measured.
        await asyncio.sleep(before + 0.5)
    finally:
        server.process.resume()
    after = await asked
    assert before + 0.3 < after < before + time.monotonic() - begun
