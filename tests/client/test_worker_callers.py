"""Who may ask a language-only worker: TLS, client certificates, tokens; and what standard tools see of it."""

from __future__ import annotations

import asyncio
import hashlib
import json
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from encoder_client import ClientSettings, EncoderClientError
from encoder_client.errors import from_rpc_error
from encoder_client.language import LanguageOnlyModel
from encoder_client.worker import WorkerServer, WorkerSettings
from epd.encoder.v1.media_pb2 import Modality
from epd.language.v1 import language_service_pb2 as pb
from epd.language.v1.language_service_pb2_grpc import LanguageServiceStub
from epd.listening import Listening
from tests.rpc.certificates import Certificate, make_authority, make_certificate
from tests.server_process import START_SECONDS

SECONDS = START_SECONDS
"""Longer than anything here takes: a worker's process imports its libraries first."""
SERVICE = "epd.language.v1.LanguageService"
GRPCURL = Path(sysconfig.get_path("scripts")) / "grpcurl"
NOWHERE = ("127.0.0.1:1",)
"""No encoder is needed to be let in, or not."""


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> LanguageOnlyModel:
    return LanguageOnlyModel.load(tiny_checkpoint)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Certificate]:
    folder = tmp_path_factory.mktemp("certificates")
    return folder, make_authority(folder)


def entry(identity: str, permissions: Sequence[str], token: str) -> str:
    """One entry of a file of callers."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    return (
        f'[[credential]]\nidentity = "{identity}"\npermissions = {json.dumps(permissions)}\ntoken_sha256 = "{digest}"\n'
    )


@pytest.fixture
def callers(tmp_path: Path) -> Path:
    file = tmp_path / "callers.toml"
    file.write_text(entry("team", ["generate", "encode"], "may-ask") + entry("others", ["encode"], "may-not"))
    return file


@asynccontextmanager
async def worker(model: LanguageOnlyModel, listening: Listening, callers: Path | None) -> AsyncIterator[WorkerServer]:
    client = ClientSettings(receiver="lm", transports=("inline",))
    async with WorkerServer(WorkerSettings(NOWHERE, client, listening, callers), model) as server:
        yield server


def tls(authority: tuple[Path, Certificate], *, mutual: bool = False) -> Listening:
    own = make_certificate(*authority, "worker")
    return Listening("127.0.0.1:0", own.certificate, own.key, authority[1].certificate if mutual else None)


def channel_to(target: str, authority: tuple[Path, Certificate], caller: Certificate | None = None) -> grpc.aio.Channel:
    """A channel that trusts the authority, and shows the caller's certificate if it has one."""
    shown = (caller.key.read_bytes(), caller.certificate.read_bytes()) if caller else (None, None)
    credentials = grpc.ssl_channel_credentials(authority[1].certificate.read_bytes(), *shown)
    return grpc.aio.secure_channel(target, credentials)


async def ask(channel: grpc.aio.Channel, token: str = "") -> str:
    """How `Generate` begins: by its first event, or by the reason or code of a refusal."""
    content = [pb.Content(media=Modality.MODALITY_IMAGE), pb.Content(text="What is it?")]
    request = pb.GenerateRequest(prompt_id="p", messages=[pb.Message(role="user", content=content)])
    stub: Any = LanguageServiceStub(channel)
    call = stub.Generate(request, timeout=SECONDS, metadata=(("authorization", f"Bearer {token}"),) if token else ())
    try:
        return str((await call.read()).WhichOneof("event"))
    except grpc.aio.AioRpcError as error:
        told = from_rpc_error(error)
        return told.reason or told.code.name
    finally:
        call.cancel()


async def test_a_call_needs_a_credential_that_may_generate(
    model: LanguageOnlyModel, authority: tuple[Path, Certificate], callers: Path
) -> None:
    async with worker(model, tls(authority), callers) as server, channel_to(server.target, authority) as channel:
        assert await ask(channel) == "CALLER_UNKNOWN"
        assert await ask(channel, "guessed") == "CALLER_UNKNOWN"
        assert await ask(channel, "may-not") == "CALLER_FORBIDDEN"
        assert await ask(channel, "may-ask") == "accepted"
        # Whoever restarts workers needs no token.
        health = await HealthStub(channel).Check(HealthCheckRequest(service=SERVICE), timeout=SECONDS)
        assert health.status == HealthCheckResponse.SERVING
        async with grpc.aio.insecure_channel(server.target) as plain:
            assert await ask(plain, "may-ask") == "UNAVAILABLE"


async def test_a_damaged_message_is_refused_in_silence(
    model: LanguageOnlyModel, authority: tuple[Path, Certificate], caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        worker(model, Listening("127.0.0.1:0"), None) as server,
        grpc.aio.insecure_channel(server.target) as channel,
    ):
        call: Any = channel.unary_stream(f"/{SERVICE}/Generate", None, None)
        for damaged in (b"\xff\xff", b"\x0a\x02\xff\xfe\x0b", b"\x0b" * 10_000):
            with pytest.raises(grpc.aio.AioRpcError, match="no serialised message") as refused:
                await call(damaged, timeout=SECONDS).read()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert from_rpc_error(refused.value).reason == "REQUEST_INVALID"
        assert await ask(channel) == "accepted"
    assert not caplog.records


async def test_who_has_no_certificate_is_not_heard(
    model: LanguageOnlyModel, authority: tuple[Path, Certificate]
) -> None:
    async with worker(model, tls(authority, mutual=True), None) as server:
        async with channel_to(server.target, authority) as stranger:
            assert await ask(stranger) == "UNAVAILABLE"
        router = make_certificate(*authority, "router")
        async with channel_to(server.target, authority, router) as channel:
            assert await ask(channel) == "accepted"


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (entry("team", ["encode"], "a"), "given to nobody"),
        (entry("team", ["generate"], "a") + entry("others", ["generate"], "b"), "given to others, team"),
        ("credential = 3", "there must be an entry"),
    ],
    ids=["nobody", "two identities", "no table"],
)
def test_callers_who_cannot_be_are_refused(model: LanguageOnlyModel, tmp_path: Path, entries: str, words: str) -> None:
    file = tmp_path / "callers.toml"
    file.write_text(entries)

    async def start() -> None:
        async with worker(model, Listening("127.0.0.1:0"), file):
            pass

    with pytest.raises(EncoderClientError, match=words) as refused:
        asyncio.run(start())
    assert str(file) in str(refused.value)


def test_other_hosts_are_served_by_tls_or_when_asked_for(authority: tuple[Path, Certificate]) -> None:
    with pytest.raises(ValueError, match="without TLS; give --tls-certificate"):
        Listening("0.0.0.0:0")
    assert not Listening("0.0.0.0:0", allow_insecure=True).is_loopback
    own = authority[1]
    assert not Listening("[::]:0", own.certificate, own.key).is_loopback
    assert Listening("[::1]:0").is_loopback


def test_files_that_are_no_pem_are_told(model: LanguageOnlyModel, tmp_path: Path) -> None:
    file = tmp_path / "no.pem"
    file.write_text("no PEM")

    async def start() -> None:
        async with worker(model, Listening("127.0.0.1:0", file, file), None):
            pass

    with pytest.raises(EncoderClientError, match="no PEM of a certificate and its own key"):
        asyncio.run(start())


async def test_the_command_tells_what_it_will_not_do() -> None:
    """A process, with options that are checked before the model is loaded."""
    command = [
        sys.executable, "-m", "encoder_client", "worker", "--model", "/nowhere", "--encoders", NOWHERE[0],
        "--receiver", "lm",
    ]  # fmt: skip
    for options, words in (
        (["--listen", "0.0.0.0:0"], "would serve other hosts without TLS"),
        (["--tls-key", "/nowhere"], "tls_certificate and tls_key go together"),
        (["--tls-client-ca", "/nowhere"], "needs tls_certificate"),
        (["--listen", "here"], "'here' is not HOST:PORT"),
        (["--client-key", "/nowhere"], "a client certificate and its key go together"),
    ):
        process = await asyncio.create_subprocess_exec(*command, *options, stderr=subprocess.PIPE)
        _, said = await asyncio.wait_for(process.communicate(), SECONDS)
        assert process.returncode == 1
        assert said.decode().startswith("encoder-client: ")
        assert words in said.decode()


async def test_the_command_serves_by_tls_and_tells_grpcurl_what_it_is(
    tiny_checkpoint: Path, authority: tuple[Path, Certificate], callers: Path
) -> None:
    own = make_certificate(*authority, "worker")
    command = [
        sys.executable, "-m", "encoder_client", "worker", "--model", str(tiny_checkpoint), "--encoders", NOWHERE[0],
        "--receiver", "lm", "--transports", "inline", "--tls-certificate", str(own.certificate), "--tls-key",
        str(own.key), "--callers", str(callers),
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), SECONDS)).decode()
        target = line.split("target=")[1].split()[0]
        listed = await grpcurl(authority, target, "list")
        assert listed.split() == [SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"]
        assert "rpc Generate (" in await grpcurl(authority, target, "describe", SERVICE)
        assert json.loads(await grpcurl(authority, target, "grpc.health.v1.Health/Check")) == {"status": "SERVING"}
        async with channel_to(target, authority) as channel:
            assert await ask(channel, "may-not") == "CALLER_FORBIDDEN"
            assert await ask(channel, "may-ask") == "accepted"
    finally:
        process.terminate()
        _, log = await asyncio.wait_for(process.communicate(), SECONDS)
    assert process.returncode == 0
    assert b"may-ask" not in log


async def grpcurl(authority: tuple[Path, Certificate], target: str, *arguments: str) -> str:
    """What grpcurl says of a worker."""
    process = await asyncio.create_subprocess_exec(
        GRPCURL, "-cacert", str(authority[1].certificate), "-max-time", "30", target, *arguments,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    said, _ = await asyncio.wait_for(process.communicate(), SECONDS)
    assert process.returncode == 0
    return said.decode()
