"""SIGTERM: what is admitted ends, what is leased can be read, and nothing new comes in."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import grpc
import grpc.aio
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from tests.conftest import StartServer
from tests.ports import free_port
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
from tests.server_process import START_SECONDS
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


@pytest.mark.parametrize("streams", [">/dev/full", "<&- >&- 2>&-"], ids=["full disk", "all closed"])
async def test_f40_a_stdout_that_takes_nothing_stops_nothing(start_server: StartServer, streams: str) -> None:
    target = f"127.0.0.1:{free_port()}"
    prefix = ("sh", "-c", f'exec "$@" {streams}', "sh")
    server = start_server(wait=False, prefix=prefix, listen=target, drain_seconds=60)
    server.target = target
    async with calls_to(server) as stub:

        async def serves() -> bool:
            try:
                return bool(await release(stub, *ready_chunks(await encode(stub))))
            except grpc.aio.AioRpcError:
                return False

        await eventually(serves, START_SECONDS)
        with server.held(server.engine()):
            call = stub.Encode(encode_request(), timeout=SECONDS)
            assert kinds((await call.read()).events)[0] == "accepted"
            server.process.send_signal(signal.SIGTERM)

            async def refuses() -> bool:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await stub.Acquire(pb.AcquireRequest(content_key=bytes(32)), timeout=SECONDS)
                return reason_of(refused.value) == "SHUTTING_DOWN"

            await eventually(refuses)
        events = await events_of(call)
        assert kinds(events)[-2:] == ["ready", "complete"]
        await release(stub, *ready_chunks(events))
    assert server.process.wait(SECONDS) == 0
    assert "Traceback" not in server.stderr


SILENT_NAME_SERVER = """
import socket, threading

look_up = socket.getaddrinfo

def wait_for_an_answer(host, *arguments, **options):
    if host == "silent.example":
        threading.Event().wait()
    return look_up(host, *arguments, **options)

socket.getaddrinfo = wait_for_an_answer
"""


async def test_f40_a_name_server_that_never_answers_holds_up_no_stop(start_server: StartServer, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(SILENT_NAME_SERVER)
    path = os.pathsep.join([str(tmp_path), *os.environ.get("PYTHONPATH", "").split(os.pathsep)])
    server = start_server(prefix=("env", f"PYTHONPATH={path}"), fetch_schemes="https", fetch_seconds=0.5)
    async with calls_to(server) as stub:
        item = MediaItem(modality=Modality.MODALITY_IMAGE, uri="https://silent.example/photo.jpg")
        (failed,) = failures(await encode(stub, item))
        assert reason_of(failed) == "FETCH_TIMEOUT"
    assert server.stop() == 0
