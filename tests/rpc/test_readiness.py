"""Liveness, readiness and load are three things: what makes a server unready, and what must not."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.conftest import StartServer, servers
from tests.rpc.calls import (
    SECONDS,
    calls_to,
    encode,
    encode_request,
    events_of,
    failures,
    image,
    kinds,
    ready_chunks,
    release,
)
from tests.rpc.statuses import reason_of
from tests.server_process import START_SECONDS, ServerProcess
from tests.waiting import eventually

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING

PREPARE_SECONDS = 5.0
FORWARD_SECONDS = 8.0


@pytest.fixture(scope="module")
def impatient(tiny_checkpoint: Path) -> Iterator[ServerProcess]:
    """A server that soon suspects an engine that is idle, and soon gives up a child that hangs."""
    with servers(tiny_checkpoint) as start:
        yield start(canary_seconds=1, prepare_seconds=PREPARE_SECONDS, forward_seconds=FORWARD_SECONDS)


@pytest.fixture
async def watch(impatient: ServerProcess) -> AsyncIterator[Any]:
    """A health watch that has seen SERVING, and calls of a server that is well before and after."""
    async with impatient.channel() as channel:
        watch = HealthStub(channel).Watch(HealthCheckRequest())
        await sees(watch, SERVING)
        yield watch
        async with calls_to(impatient) as stub:

            async def it_encodes() -> bool:
                chunks = ready_chunks(await encode(stub))
                await release(stub, *chunks)
                return len(chunks) == 1

            await eventually(it_encodes, START_SECONDS)


async def sees(watch: Any, status: HealthCheckResponse.ServingStatus) -> None:
    """Reads a watch until it tells a status."""
    async with asyncio.timeout(START_SECONDS):
        while (await watch.read()).status != status:
            pass


async def check(server: ServerProcess) -> HealthCheckResponse.ServingStatus:
    """The health, which is told without a wait for any child."""
    async with server.channel() as channel:
        answer = await HealthStub(channel).Check(HealthCheckRequest(), timeout=SECONDS)
        status: HealthCheckResponse.ServingStatus = answer.status
        return status


async def test_f07_a_busy_engine_is_never_unready(start_server: StartServer) -> None:
    server = start_server(canary_seconds=1)
    async with server.channel() as channel, calls_to(server) as stub:
        watch: Any = HealthStub(channel).Watch(HealthCheckRequest())
        await sees(watch, SERVING)
        with server.held(server.engine()):
            call = stub.Encode(encode_request(*map(image, range(3))), timeout=SECONDS)
            await call.read()

            async def a_canary_waits_behind_it() -> bool:
                assert await check(server) == SERVING
                return (await server.info()).load.requests == 2

            await eventually(a_canary_waits_behind_it)
            for _ in range(20):
                assert await check(server) == SERVING
        events = await events_of(call)
        assert kinds(events).count("ready") == 3
        await release(stub, *ready_chunks(events))
        # What is told next is the end: nothing else was told meanwhile.
        server.process.send_signal(signal.SIGTERM)
        assert (await watch.read()).status == NOT_SERVING


async def test_f08_a_media_worker_that_hangs_is_noticed_without_any_request(
    impatient: ServerProcess, watch: Any
) -> None:
    restarts = (await impatient.info()).load.media_worker_restarts
    worker = impatient.media_worker()
    with impatient.held(worker):
        # The canary is not prepared in time: the worker is killed, and nothing can be encoded.
        await sees(watch, NOT_SERVING)
    await sees(watch, SERVING)
    assert (await impatient.info()).load.media_worker_restarts > restarts
    assert not worker.is_running()


async def test_f08_an_idle_engine_that_hangs_is_noticed_without_any_request(
    impatient: ServerProcess, watch: Any
) -> None:
    engine = impatient.engine()
    with impatient.held(engine):
        await sees(watch, NOT_SERVING)
    await sees(watch, SERVING)
    assert not engine.is_running()


async def test_f29_an_engine_that_hangs_is_killed_and_its_work_done_again(impatient: ServerProcess, watch: Any) -> None:
    restarts = (await impatient.info()).engines[0].restarts
    engine = impatient.engine()
    async with calls_to(impatient) as stub:
        with impatient.held(engine):
            call = stub.Encode(encode_request(*map(image, range(3))), timeout=START_SECONDS)
            events = await events_of(call)
        assert not engine.is_running()
        # Its next life has run them: each had one end, and it is a good one.
        assert [chunk.part_idx for chunk in ready_chunks(events)] == [0, 1, 2]
        await release(stub, *ready_chunks(events))
    assert (await impatient.info()).engines[0].restarts > restarts
    await sees(watch, NOT_SERVING)
    await sees(watch, SERVING)


async def test_f29_a_decode_that_hangs_fails_its_item_alone(impatient: ServerProcess, watch: Any) -> None:
    worker = impatient.media_worker()
    async with calls_to(impatient) as stub:
        with impatient.held(worker):
            call = stub.Encode(encode_request(*map(image, range(3))), timeout=START_SECONDS)
            events = await events_of(call)
        (failed,) = failures(events)
        assert (failed.part_idx, reason_of(failed)) == (0, "MEDIA_TIMEOUT")
        assert [chunk.part_idx for chunk in ready_chunks(events)] == [1, 2]
        await release(stub, *ready_chunks(events))
    assert not worker.is_running()
