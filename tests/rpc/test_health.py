"""Health follows readiness, and its watch stays open from the loading of the model to the end of the server."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from encoder_svc.rpc.servicer import SERVICE
from tests.conftest import StartServer
from tests.rpc.calls import calls_to, encode
from tests.rpc.statuses import reason_of, retry_of
from tests.server_process import START_SECONDS
from tests.waiting import eventually

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


async def test_f08_a_watch_follows_the_server_through_its_life(start_server: StartServer) -> None:
    server = start_server(wait=False, drain_seconds=5).wait_listening()
    async with server.channel() as channel, calls_to(server) as stub:
        health: Any = HealthStub(channel)
        watches = [health.Watch(HealthCheckRequest(service=name)) for name in ("", SERVICE)]

        async def seen(status: HealthCheckResponse.ServingStatus) -> bool:
            answers = await asyncio.wait_for(asyncio.gather(*(watch.read() for watch in watches)), START_SECONDS)
            return [answer.status for answer in answers] == [status, status]

        # Held, so that its model is not loaded before all this was asked.
        await eventually(lambda: bool(server.engines()))
        with server.held(server.engine()):
            assert await seen(NOT_SERVING)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await encode(stub)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert reason_of(refused.value) == "NOT_READY"
            assert retry_of(refused.value) is not None
        assert await seen(SERVING)
        server.engine().kill()
        assert await seen(NOT_SERVING)
        assert await seen(SERVING)
        stopping = asyncio.create_task(asyncio.to_thread(server.stop))
        assert await seen(NOT_SERVING)
        assert await stopping == 0
