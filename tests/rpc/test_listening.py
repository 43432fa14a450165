"""Addresses and credentials: two servers on one host, a port that is taken, TLS, and who calls."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.encoder_service_pb2_grpc import EncoderServiceStub
from tests.conftest import StartServer
from tests.rpc.calls import SECONDS, calls_to, encode, events_of, image, kinds, ready_chunks, release
from tests.rpc.certificates import Certificate, make_authority, make_certificate
from tests.rpc.statuses import reason_of


async def test_f41_two_servers_on_one_ip_are_two(start_server: StartServer) -> None:
    first, second = start_server(wait=False), start_server(wait=False)
    first.wait_ready()
    second.wait_ready()
    instances, boots = set(), set()
    async with calls_to(first) as one, calls_to(second) as other:
        chunks = []
        for server, stub in ((first, one), (second, other)):
            (chunk,) = ready_chunks(await encode(stub, prompt_id="same", request_id="same"))
            assert chunk.encoder.grpc_target == server.target
            instances.add(chunk.encoder.instance_id)
            boots.add(chunk.encoder.engine_boot_id)
            chunks.append(chunk)
        # A lease of one is nothing to the other.
        assert await release(other, chunks[0]) == [pb.LEASE_STATE_UNKNOWN]
        assert await release(one, chunks[0]) == [pb.LEASE_STATE_HELD]
        assert await release(other, chunks[1]) == [pb.LEASE_STATE_HELD]
    assert (len(instances), len(boots)) == (2, 2)


def test_a_port_that_is_taken_is_named(start_server: StartServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start_server(wait=False, listen=f"127.0.0.1:{port}")
        assert server.process.wait(60) == 2
    assert server.stderr.startswith(f"encoder-svc serve: cannot listen on 127.0.0.1:{port}: the port is in use")
    assert "Traceback" not in server.stderr
    assert server.stdout == ""


def test_an_insecure_public_address_is_refused(start_server: StartServer) -> None:
    server = start_server(wait=False, listen="0.0.0.0:0")
    assert server.process.wait(60) == 2
    assert "without TLS" in server.stderr
    assert "--allow-insecure" in server.stderr
    assert "Traceback" not in server.stderr


def test_a_public_address_is_served_when_asked_for(start_server: StartServer) -> None:
    server = start_server(wait=False, listen="0.0.0.0:0", allow_insecure=True, advertise="encoder-0:50051")
    server.wait_listening()
    with grpc.insecure_channel(f"127.0.0.1:{server.target.rpartition(':')[2]}") as channel:
        stub: Any = EncoderServiceStub(channel)
        info = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=SECONDS, wait_for_ready=True)
    assert info.encoder.grpc_target == "encoder-0:50051"


def test_a_tls_file_that_is_not_there_is_named(start_server: StartServer) -> None:
    server = start_server(wait=False, tls_certificate="/nowhere.pem", tls_key="/nowhere.key")
    assert server.process.wait(60) == 2
    assert server.stderr == "encoder-svc serve: cannot read the TLS file /nowhere.key: No such file or directory\n"


async def test_ids_are_scoped_by_the_certificate_of_the_caller(start_server: StartServer, tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    own = make_certificate(tmp_path, authority, "server")
    server = start_server(tls_certificate=own.certificate, tls_key=own.key, tls_client_ca=authority.certificate)
    callers = [make_certificate(tmp_path, authority, name) for name in ("alice", "bob")]
    channels = [secure_channel(server.target, authority, caller) for caller in callers]
    alice, bob = (EncoderServiceStub(channel) for channel in channels)
    with server.held(server.media_worker()):
        calls = [stub.Encode(pb.EncodeRequest(request_id="same", items=[image()])) for stub in (alice, bob)]
        for call in calls:
            await call.read()
        # Each has its own request of that name: the same caller could not have two.
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await encode(bob, request_id="same")
        assert reason_of(refused.value) == "REQUEST_ID_LIVE"
        answer = await bob.Cancel(pb.CancelRequest(request_id="same"))
        assert (answer.requests, answer.parts) == (1, 1)
        assert kinds(await events_of(calls[1]))[-2:] == ["part_cancelled", "complete"]
    assert kinds(await events_of(calls[0]))[-2:] == ["ready", "complete"]
    for channel in channels:
        await channel.close(None)
    # Without a certificate of that authority nobody is heard.
    async with secure_channel(server.target, authority, None) as stranger:
        stub: Any = EncoderServiceStub(stranger)
        with pytest.raises(grpc.aio.AioRpcError) as unheard:
            await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=SECONDS)
        assert unheard.value.code() is grpc.StatusCode.UNAVAILABLE


def secure_channel(target: str, authority: Certificate, caller: Certificate | None) -> grpc.aio.Channel:
    """A channel that trusts the authority and shows the caller's certificate."""
    credentials = grpc.ssl_channel_credentials(
        authority.certificate.read_bytes(),
        None if caller is None else caller.key.read_bytes(),
        None if caller is None else caller.certificate.read_bytes(),
    )
    return grpc.aio.secure_channel(target, credentials)
