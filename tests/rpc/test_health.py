"""Health follows readiness, and its watch stays open from the loading of the model to the end of the server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from encoder_svc.rpc.server import RpcServer
from encoder_svc.rpc.servicer import SERVICE
from encoder_svc.settings import Settings
from encoder_svc.telemetry.metrics import Metrics
from tests.conftest import StartServer
from tests.deaf_caller import deaf_call
from tests.package_path import hiding
from tests.rpc.calls import calls_to, encode
from tests.rpc.scripted_runtime import ScriptedRuntime
from tests.rpc.statuses import reason_of, retry_of
from tests.server_process import START_SECONDS, ServerProcess

WATCH = "/grpc.health.v1.Health/Watch"
SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


ENGINE_THAT_WAITS = """
import sys, time
from pathlib import Path

if "encoder_svc.engine.process" in sys.orig_argv:
    while not Path(__file__).with_name("go").exists():
        time.sleep(0.01)
"""


async def test_f08_a_watch_follows_the_server_through_its_life(start_server: StartServer, tmp_path: Path) -> None:
    # So its model is not loaded before all this was asked.
    (tmp_path / "sitecustomize.py").write_text(ENGINE_THAT_WAITS)
    prefix = ("env", *(f"{name}={value}" for name, value in hiding(tmp_path).items()))
    server = start_server(wait=False, prefix=prefix, drain_seconds=5).wait_listening()
    async with server.channel() as channel, calls_to(server) as stub:
        health: Any = HealthStub(channel)
        watches = [health.Watch(HealthCheckRequest(service=name)) for name in ("", SERVICE)]

        async def seen(status: HealthCheckResponse.ServingStatus) -> bool:
            answers = await asyncio.wait_for(asyncio.gather(*(watch.read() for watch in watches)), START_SECONDS)
            return [answer.status for answer in answers] == [status, status]

        assert await seen(NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await encode(stub)
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert reason_of(refused.value) == "NOT_READY"
        assert retry_of(refused.value) is not None
        (tmp_path / "go").touch()
        assert await seen(SERVING)
        server.engine().kill()
        assert await seen(NOT_SERVING)
        assert await seen(SERVING)
        stopping = asyncio.create_task(asyncio.to_thread(server.stop))
        assert await seen(NOT_SERVING)
        assert await stopping == 0


async def test_f08_a_watcher_that_reads_nothing_holds_nobody_up() -> None:
    server, runtime = RpcServer(Settings(model=Path("/nowhere"), listen="127.0.0.1:0"), Metrics()), ScriptedRuntime()
    await server.start(runtime)
    async with deaf_call(server.target, WATCH), grpc.aio.insecure_channel(server.target) as channel:
        health: Any = HealthStub(channel)
        watch = health.Watch(HealthCheckRequest())
        assert (await watch.read()).status == SERVING
        (tell,) = runtime.listeners
        tell(False)
        assert (await asyncio.wait_for(watch.read(), START_SECONDS)).status == NOT_SERVING
        tell(True)
        assert (await asyncio.wait_for(watch.read(), START_SECONDS)).status == SERVING
        server.stop_serving()
        tell(True)
        assert (await asyncio.wait_for(watch.read(), START_SECONDS)).status == NOT_SERVING
        await asyncio.wait_for(server.stop(grace=0), START_SECONDS)


async def test_a_watch_of_a_service_that_is_not_there_stays_open(server: ServerProcess) -> None:
    async with server.channel() as channel:
        health: Any = HealthStub(channel)
        watch = health.Watch(HealthCheckRequest(service="not.here"))
        assert (await watch.read()).status == HealthCheckResponse.SERVICE_UNKNOWN
        assert not watch.done()
        watch.cancel()
