"""Addresses and credentials: two servers on one host, a port that is taken, TLS, and who calls."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from encoder_client import ClientSettings, Credentials, EncoderClient, EncoderError
from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.encoder_service_pb2_grpc import EncoderServiceStub
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from tests.conftest import StartServer, servers
from tests.rpc.calls import (
    PHOTO,
    SECONDS,
    calls_to,
    encode,
    encode_request,
    events_of,
    failures,
    kinds,
    ready_chunks,
    release,
)
from tests.rpc.certificates import Certificate, make_authority, make_certificate
from tests.rpc.statuses import reason_of
from tests.server_process import START_SECONDS, ServerProcess


async def test_f41_two_servers_on_one_ip_are_two(server: ServerProcess, small_server: ServerProcess) -> None:
    instances, boots = set(), set()
    async with calls_to(server) as one, calls_to(small_server) as other:
        chunks = []
        for each, stub in ((server, one), (small_server, other)):
            (chunk,) = ready_chunks(await encode(stub, prompt_id="same", request_id="same"))
            assert chunk.encoder.grpc_target == each.target
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
        assert server.process.wait(START_SECONDS) == 2
    assert server.stderr.startswith(f"encoder-svc serve: cannot listen on 127.0.0.1:{port}: the port is in use")
    assert "Traceback" not in server.stderr
    assert server.stdout == ""


def test_an_insecure_public_address_is_refused(start_server: StartServer) -> None:
    server = start_server(wait=False, listen="0.0.0.0:0")
    assert server.process.wait(START_SECONDS) == 2
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
    assert server.process.wait(START_SECONDS) == 2
    assert server.stderr == "encoder-svc serve: cannot read the TLS file /nowhere.key: No such file or directory\n"


@dataclass(frozen=True)
class Callers:
    """A server that demands certificates, and calls of two who have one."""

    server: ServerProcess
    authority: Certificate
    alice: Any
    bob: Any


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Certificate]:
    folder = tmp_path_factory.mktemp("certificates")
    return folder, make_authority(folder)


@pytest.fixture(scope="module")
def strict_server(tiny_checkpoint: Path, authority: tuple[Path, Certificate]) -> Iterator[ServerProcess]:
    """A server that demands client certificates."""
    own = make_certificate(*authority, "server")
    with servers(tiny_checkpoint) as start:
        yield start(tls_certificate=own.certificate, tls_key=own.key, tls_client_ca=authority[1].certificate)


@pytest.fixture
async def callers(strict_server: ServerProcess, authority: tuple[Path, Certificate]) -> AsyncIterator[Callers]:
    certificates = [make_certificate(*authority, name) for name in ("alice", "bob")]
    channels = [secure_channel(strict_server.target, authority[1], caller) for caller in certificates]
    alice, bob = map(EncoderServiceStub, channels)
    yield Callers(strict_server, authority[1], alice, bob)
    for channel in channels:
        await channel.close(None)


async def test_ids_are_scoped_by_the_certificate_of_the_caller(callers: Callers) -> None:
    with callers.server.held(callers.server.media_worker()):
        calls = [stub.Encode(encode_request(request_id="same")) for stub in (callers.alice, callers.bob)]
        for call in calls:
            await call.read()
        # Each has its own request of that name: the same caller could not have two.
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await encode(callers.bob, request_id="same")
        assert reason_of(refused.value) == "REQUEST_ID_LIVE"
        answer = await callers.bob.Cancel(pb.CancelRequest(request_id="same"))
        assert (answer.requests, answer.parts) == (1, 1)
        assert kinds(await events_of(calls[1]))[-2:] == ["part_cancelled", "complete"]
    assert kinds(await events_of(calls[0]))[-2:] == ["ready", "complete"]


async def test_f23_what_one_identity_caches_another_does_not_find(callers: Callers) -> None:
    fields = {"cache_policy": pb.CACHE_POLICY_USE}
    (made,) = ready_chunks(await encode(callers.alice, **fields))
    # The same media, options and salt: even the key is the same.
    with pytest.raises(grpc.aio.AioRpcError) as missing:
        await callers.bob.Acquire(pb.AcquireRequest(content_key=made.content_key))
    assert reason_of(missing.value) == "CONTENT_UNKNOWN"
    named = MediaItem(modality=Modality.MODALITY_IMAGE, content_key=made.content_key)
    assert [reason_of(failed) for failed in failures(await encode(callers.bob, named))] == ["CONTENT_UNKNOWN"]
    (other,) = ready_chunks(await encode(callers.bob, **fields))
    assert (other.from_cache, other.content_key) == (False, made.content_key)
    assert other.generation != made.generation
    (again,) = ready_chunks(await encode(callers.alice, **fields))
    assert (again.from_cache, again.generation) == (True, made.generation)
    await release(callers.alice, made, other, again)


async def test_an_upload_belongs_to_who_sent_it(callers: Callers) -> None:
    header = pb.UploadRequest(header=pb.UploadHeader(total_bytes=len(PHOTO)))
    sent = await callers.alice.Upload(iter([header, pb.UploadRequest(piece=PHOTO)]))
    item = MediaItem(modality=Modality.MODALITY_IMAGE, upload_id=sent.upload_id)
    assert [reason_of(failed) for failed in failures(await encode(callers.bob, item))] == ["UPLOAD_UNKNOWN"]
    await release(callers.alice, *ready_chunks(await encode(callers.alice, item)))


async def test_who_has_no_certificate_is_not_heard(callers: Callers) -> None:
    async with secure_channel(callers.server.target, callers.authority, None) as stranger:
        stub: Any = EncoderServiceStub(stranger)
        with pytest.raises(grpc.aio.AioRpcError) as unheard:
            await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=SECONDS)
        assert unheard.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_client_library_shows_its_certificate(
    strict_server: ServerProcess, authority: tuple[Path, Certificate]
) -> None:
    own = make_certificate(*authority, "carol")
    shown = Credentials.from_files(authority=authority[1].certificate, certificate=own.certificate, key=own.key)
    async with (
        EncoderClient(strict_server.target, ClientSettings(shown, transports=("inline",))) as client,
        client.encode([MediaItem(modality=Modality.MODALITY_IMAGE, data=PHOTO)], timeout=SECONDS) as call,
    ):
        [embedding] = await call.embeddings()
        assert embedding.numpy().size
    hidden = Credentials.from_files(authority=authority[1].certificate)
    async with EncoderClient(strict_server.target, ClientSettings(hidden)) as client:
        with pytest.raises(EncoderError, match="UNAVAILABLE"):
            await client.server_info()


def secure_channel(target: str, authority: Certificate, caller: Certificate | None) -> grpc.aio.Channel:
    """A channel that trusts the authority and shows the caller's certificate."""
    credentials = grpc.ssl_channel_credentials(
        authority.certificate.read_bytes(),
        None if caller is None else caller.key.read_bytes(),
        None if caller is None else caller.certificate.read_bytes(),
    )
    return grpc.aio.secure_channel(target, credentials)
