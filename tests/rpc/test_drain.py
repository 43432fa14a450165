"""SIGTERM: what is admitted ends, what is leased can be read, and nothing new comes in."""

from __future__ import annotations

import signal

import grpc
import grpc.aio
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from epd.encoder.v1 import encoder_service_pb2 as pb
from tests.conftest import StartServer
from tests.rpc.calls import (
    SECONDS,
    calls_to,
    encode,
    encode_request,
    events_of,
    failures,
    fetch,
    kinds,
    ready_chunks,
    release,
)
from tests.rpc.statuses import reason_of, retry_of
from tests.waiting import eventually


async def test_f40_admitted_work_ends_and_leases_live_until_they_are_read(start_server: StartServer) -> None:
    server = start_server(drain_seconds=60)
    async with server.channel() as channel, calls_to(server) as stub:
        leased = ready_chunks(await encode(stub))
        with server.held(server.engine()):
            call = stub.Encode(encode_request(), timeout=SECONDS)
            assert kinds((await call.read()).events)[0] == "accepted"
            server.process.send_signal(signal.SIGTERM)
            await eventually(lambda: "stopping:" in server.stdout)
            health = await HealthStub(channel).Check(HealthCheckRequest())
            assert health.status == HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await encode(stub)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert reason_of(refused.value) == "SHUTTING_DOWN"
            assert retry_of(refused.value) is not None
        events = await events_of(call)
        assert kinds(events)[-2:] == ["ready", "complete"]
        # Nothing runs any more; it waits for those who have not read.
        for chunk in (*leased, *ready_chunks(events)):
            assert (await fetch(stub, chunk)).size
            assert server.process.poll() is None
            assert await release(stub, chunk) == [pb.LEASE_STATE_HELD]
    assert server.process.wait(SECONDS) == 0
    assert server.stop() == 0


async def test_f40_what_has_not_ended_in_time_is_told(start_server: StartServer) -> None:
    server = start_server(drain_seconds=1)
    async with calls_to(server) as stub:
        leased = ready_chunks(await encode(stub))
        with server.held(server.engine()):
            call = stub.Encode(encode_request(), timeout=SECONDS)
            await call.read()
            # The other signal that asks to stop.
            server.process.send_signal(signal.SIGINT)
            events = await events_of(call)
            (failed,) = failures(events)
            assert reason_of(failed) == "SHUTTING_DOWN"
            assert retry_of(failed) is not None
            assert events[-1].complete.failed == 1
            assert server.stop() == 0
        with pytest.raises(grpc.aio.AioRpcError) as gone:
            await release(stub, *leased)
        assert gone.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_second_signal_stops_at_once(start_server: StartServer) -> None:
    server = start_server(drain_seconds=600)
    async with calls_to(server) as stub:
        with server.held(server.engine()):
            call = stub.Encode(encode_request(), timeout=SECONDS)
            await call.read()
            server.process.send_signal(signal.SIGTERM)
            await eventually(lambda: "stopping:" in server.stdout)
            assert server.stop(signal.SIGINT) == 1


def test_it_stops_while_it_is_loading(start_server: StartServer) -> None:
    server = start_server(wait=False).wait_listening()
    assert server.stop() == 0
