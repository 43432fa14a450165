"""Who may call, and what: tokens and client certificates, each with its permissions and its identity."""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from encoder_client import (
    ClientSettings,
    Credentials,
    EncoderClient,
    EncoderClientError,
    EncoderError,
    ReadError,
    Ready,
    image,
)
from encoder_svc.cli.main import main
from encoder_svc.errors import SetupError
from encoder_svc.rpc.callers import EncoderCallers
from encoder_svc.rpc.server import RpcServer
from encoder_svc.runtime.events import Synced
from encoder_svc.settings import Settings
from encoder_svc.telemetry.metrics import Metrics
from epd.callers_file import Permission, read_callers
from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2_grpc import EncoderServiceStub
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from tests.conftest import StartServer
from tests.rpc.calls import PHOTO, SECONDS, encode_request
from tests.rpc.certificates import Certificate, make_authority, make_certificate
from tests.rpc.scripted_runtime import ScriptedRuntime
from tests.rpc.statuses import reason_of

METHODS = [method.name for method in pb.DESCRIPTOR.services_by_name["EncoderService"].methods]
NEEDS = {
    "Encode": Permission.ENCODE,
    "Upload": Permission.ENCODE,
    "Cancel": Permission.ENCODE,
    "Acquire": Permission.READ,
    "Subscribe": Permission.READ,
    "Fetch": Permission.READ,
    "Release": Permission.READ,
    "Renew": Permission.READ,
    "GetServerInfo": Permission.INFO,
}
REQUESTS: dict[str, Any] = {
    "Encode": encode_request(),
    "Upload": pb.UploadRequest(header=pb.UploadHeader(total_bytes=0)),
    "Cancel": pb.CancelRequest(request_id="r"),
    "Acquire": pb.AcquireRequest(content_key=bytes(32)),
    "Subscribe": pb.SubscribeRequest(receiver_id="lm"),
    "Fetch": pb.FetchRequest(lease_id=bytes(16)),
    "Release": pb.ReleaseRequest(),
    "Renew": pb.RenewRequest(),
    "GetServerInfo": pb.GetServerInfoRequest(),
}


def entry(identity: str, permissions: Sequence[str], token: str = "", certificate: str = "") -> str:
    """One entry of a file of callers."""
    proof = f'certificate = "{certificate}"' if certificate else f'token_sha256 = "{digest(token)}"'
    return f'[[credential]]\nidentity = "{identity}"\npermissions = {json.dumps(permissions)}\n{proof}\n'


def digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


@asynccontextmanager
async def served(file: Path, **settings: Any) -> AsyncIterator[tuple[RpcServer, ScriptedRuntime]]:
    """A served scripted runtime with a file of callers."""
    server = RpcServer(Settings(model=Path("/nowhere"), listen="127.0.0.1:0", callers=file, **settings), Metrics())
    runtime = ScriptedRuntime()
    await server.start(runtime)
    try:
        yield server, runtime
    finally:
        await server.stop(grace=0)


async def call(channel: grpc.aio.Channel, method: str, token: str | None = None, scheme: str = "Bearer") -> str:
    """How a call is answered: `OK`, or the reason of its refusal."""
    stub: Any = EncoderServiceStub(channel)
    metadata = () if token is None else (("authorization", f"{scheme} {token}"),)
    request = iter([REQUESTS[method]]) if method == "Upload" else REQUESTS[method]
    started = getattr(stub, method)(request, metadata=metadata, timeout=SECONDS)
    try:
        if method in {"Encode", "Subscribe", "Fetch"}:
            await started.read()
        else:
            await started
    except grpc.aio.AioRpcError as error:
        return reason_of(error)
    else:
        return "OK"
    finally:
        started.cancel()


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    """A token for each permission, all of one identity, and one for everything."""
    file = tmp_path / "callers.toml"
    entries = [entry("team", [permission], token=f"may-{permission}") for permission in Permission]
    file.write_text("\n".join([*entries, entry("other", list(Permission), token="may-all")]))
    return file


def test_every_call_of_the_contract_is_in_the_table() -> None:
    assert set(METHODS) == set(NEEDS)


@pytest.mark.parametrize("method", METHODS)
async def test_every_call_needs_a_credential_with_its_permission(tokens: Path, method: str) -> None:
    async with served(tokens) as (server, runtime), grpc.aio.insecure_channel(server.target) as channel:
        assert await call(channel, method) == "CALLER_UNKNOWN"
        assert await call(channel, method, "guessed") == "CALLER_UNKNOWN"
        assert await call(channel, method, f"may-{NEEDS[method]}", scheme="Basic") == "CALLER_UNKNOWN"
        for permission in Permission:
            if permission is not NEEDS[method]:
                assert await call(channel, method, f"may-{permission}") == "CALLER_FORBIDDEN"
        assert (runtime.commands, runtime.cancels, runtime.acquired, runtime.subscribed) == ([], [], [], [])
        assert (runtime.uploads, runtime.reads) == ([], [])
        runtime.subscription.tell(Synced(0))
        assert await call(channel, method, f"may-{NEEDS[method]}", scheme="bearer") not in {
            "CALLER_UNKNOWN",
            "CALLER_FORBIDDEN",
        }


async def test_the_codes_are_grpcs_own(tokens: Path) -> None:
    async with served(tokens) as (server, _), grpc.aio.insecure_channel(server.target) as channel:
        stub: Any = EncoderServiceStub(channel)
        for metadata, code in (
            ((), grpc.StatusCode.UNAUTHENTICATED),
            ((("authorization", "Bearer may-read"),), grpc.StatusCode.PERMISSION_DENIED),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=metadata)
            assert refused.value.code() is code


async def test_the_identity_of_the_credential_reaches_the_runtime(tokens: Path) -> None:
    async with served(tokens) as (server, runtime), grpc.aio.insecure_channel(server.target) as channel:
        await call(channel, "Encode", "may-encode")
        await call(channel, "Encode", "may-all")
        await call(channel, "Cancel", "may-encode")
        await call(channel, "Acquire", "may-read")
        assert [command.identity for command in runtime.commands] == ["team", "other"]
        assert [command.identity for command in runtime.cancels] == ["team"]
        assert [command.identity for command in runtime.acquired] == ["team"]


async def test_health_needs_no_credential(tokens: Path) -> None:
    async with served(tokens) as (server, _), EncoderClient(server.target) as client:
        await client.health()


async def test_client_certificates_have_permissions_too(tmp_path: Path) -> None:
    authority = make_authority(tmp_path)
    own = make_certificate(tmp_path, authority, "server")
    file = tmp_path / "callers.toml"
    file.write_text(
        entry("team", ["encode", "info"], certificate="alice") + entry("team", ["read"], token="her-other-one")
    )
    tls = {"tls_certificate": own.certificate, "tls_key": own.key, "tls_client_ca": authority.certificate}
    async with served(file, **tls) as (server, runtime):
        async with channel_of(server, authority, make_certificate(tmp_path, authority, "alice")) as alice:
            assert await call(alice, "GetServerInfo") == "OK"
            assert await call(alice, "Encode") == "OK"
            assert await call(alice, "Release") == "CALLER_FORBIDDEN"
            assert await call(alice, "Release", "her-other-one") == "OK", "a token that is sent decides"
            assert await call(alice, "GetServerInfo", "guessed") == "CALLER_UNKNOWN"
        async with channel_of(server, authority, make_certificate(tmp_path, authority, "mallory")) as mallory:
            assert await call(mallory, "GetServerInfo") == "CALLER_UNKNOWN"
    assert [command.identity for command in runtime.commands] == ["team"]


def channel_of(server: RpcServer, authority: Certificate, caller: Certificate) -> grpc.aio.Channel:
    """A channel that shows a certificate."""
    credentials = grpc.ssl_channel_credentials(
        authority.certificate.read_bytes(), caller.key.read_bytes(), caller.certificate.read_bytes()
    )
    return grpc.aio.secure_channel(server.target, credentials)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "credential: there must be an entry"),
        ("credential = 3", "credential"),
        ("[[credential]", "is not TOML"),
        (entry("", ["read"], token="t"), "credential[0].identity"),
        (entry("team", [], token="t"), "credential[0].permissions"),
        (entry("team", ["write"], token="t"), "credential[0].permissions[0]"),
        (entry("team", ["read"], token="t").replace(digest("t"), "the token itself"), "credential[0].token_sha256"),
        ('[[credential]]\nidentity = "team"\npermissions = ["read"]\n', "needs either token_sha256 or certificate"),
        (entry("team", ["read"], token="t") + 'name = "x"\n', "credential[0].name"),
        (entry("a", ["read"], token="t") + entry("b", ["read"], token="t"), "the same token or certificate"),
        (entry("team", ["read"], certificate="alice"), "give --tls-client-ca"),
    ],
    ids=[
        "empty", "no table", "no toml", "no identity", "no permissions", "unknown permission", "plain token",
        "no proof", "unknown key", "twice", "certificate without mutual TLS",
    ],
)  # fmt: skip
def test_a_file_that_says_what_cannot_be_is_refused_by_name(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "callers.toml"
    file.write_text(text)
    with pytest.raises(SetupError) as refused:
        EncoderCallers(Settings(model=Path("/nowhere"), callers=file))
    assert words in str(refused.value)
    assert str(file) in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="cannot read the file of callers"):
        EncoderCallers(Settings(model=Path("/nowhere"), callers=tmp_path / "missing.toml"))


def test_the_command_makes_a_token_and_its_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token", 'the "team"', "--permissions", "read,info"]) == 0
    said = capsys.readouterr()
    file = tmp_path / "callers.toml"
    file.write_text(said.out)
    (credential,) = read_callers(file)
    assert credential.identity == 'the "team"'
    assert credential.permissions == {Permission.READ, Permission.INFO}
    token = said.err.strip()
    assert len(token) >= 43
    assert credential.token_sha256 == digest(token)
    assert token not in said.out
    assert main(["token", "team", "--permissions", "write"]) == 2


async def test_a_router_and_a_receiver_of_one_identity_meet_and_no_other_sees_them(
    start_server: StartServer, tmp_path: Path
) -> None:
    """A real server, logging all it can: no token, lease or slot key is in its log."""
    file = tmp_path / "callers.toml"
    file.write_text(
        entry("team", ["encode"], token="secret-of-the-router")
        + entry("team", ["read", "info"], token="secret-of-the-receiver")
        + entry("them", list(Permission), token="secret-of-others")
    )
    server = start_server(callers=file, log_level="debug", metrics_listen="")
    secrets: list[bytes] = []
    async with (
        EncoderClient(
            server.target, ClientSettings(Credentials(token="secret-of-the-router"), transports=("inline",))
        ) as router,
        EncoderClient(
            server.target,
            ClientSettings(Credentials(token="secret-of-the-receiver"), receiver="lm", transports=("inline",)),
        ) as mine,
        EncoderClient(
            server.target, ClientSettings(Credentials(token="secret-of-others"), receiver="lm", transports=("inline",))
        ) as theirs,
        mine.subscribe() as subscription,
        theirs.subscribe() as others,
    ):
        for events in (aiter(subscription), aiter(others)):
            await anext(events)
        async with router.encode([image(PHOTO)], request_id="same", prompt_id="p", receivers=["lm"]) as encoding:
            seen = [event async for event in encoding]
        (ready,) = (event for event in seen if isinstance(event, Ready))
        while not isinstance(event := await anext(aiter(subscription)), Ready):
            pass
        secrets += [event.chunk.leases[0].lease_id, event.chunk.slot_key]
        assert (await mine.read(event.chunk)).numpy().size
        with pytest.raises(EncoderError) as forbidden:
            async with mine.encode([image(PHOTO)]) as encoding:
                await encoding.embeddings()
        assert forbidden.value.reason == "CALLER_FORBIDDEN"
        # What they are told next is their own.
        assert (await theirs.cancel(prompt_id="p")).requests == 0
        named = MediaItem(modality=Modality.MODALITY_IMAGE, content_key=ready.chunk.content_key)
        async with theirs.encode([named], prompt_id="theirs", receivers=["lm"]) as encoding:
            seen = [event async for event in encoding]
        told = await anext(aiter(others))
        assert getattr(told, "prompt_id", "") == "theirs"
        secrets.append(await a_lease_is_good_for_whoever_has_it(router, mine, theirs))
        # What fails is logged, too.
        stub = mine.stub
        await stub.release(pb.ReleaseRequest(leases=[pb.LeaseRelease(lease_id=secrets[0])]))
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.fetch(pb.FetchRequest(lease_id=secrets[0])).read()
    assert await encode_by_command(server.target, tmp_path, "") == 1
    assert await encode_by_command(server.target, tmp_path, "secret-of-others") == 0
    server.stop()
    log = server.stderr + server.stdout
    assert "engine 0" in log
    for secret in secrets:
        for shown in (secret.hex(), repr(secret)[2:-1], str(list(secret))):
            assert shown not in log
    assert "secret-of" not in log


async def a_lease_is_good_for_whoever_has_it(
    router: EncoderClient, mine: EncoderClient, theirs: EncoderClient
) -> bytes:
    """The router, which may not read, hands its chunk to another identity on purpose. Returns the lease."""
    async with router.encode([image(PHOTO)], prompt_id="handed on", receivers=["lm"]) as encoding:
        (ready,) = [event async for event in encoding if isinstance(event, Ready)]
    chunk = EmbeddingChunk.FromString(ready.chunk.SerializeToString())
    lease = chunk.leases[0].lease_id
    for attempt in (
        router.stub.renew(pb.RenewRequest(lease_ids=[lease])),
        router.stub.release(pb.ReleaseRequest(leases=[pb.LeaseRelease(lease_id=lease)])),
        router.stub.fetch(pb.FetchRequest(lease_id=lease)).read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as forbidden:
            await attempt
        assert reason_of(forbidden.value) == "CALLER_FORBIDDEN"
    assert await theirs.renew([chunk]) > [0.0]
    assert (await theirs.read(chunk)).numpy().size
    # It was one lease: there is nothing left of it for anybody.
    with pytest.raises(ReadError):
        await mine.read(chunk)
    # Nobody finds one by trying.
    guessed = await theirs.stub.renew(pb.RenewRequest(lease_ids=[bytes(16), lease[:15] + b"?"]))
    assert {answer.state for answer in guessed.leases} == {pb.LEASE_STATE_UNKNOWN}
    return lease


async def encode_by_command(target: str, folder: Path, token: str) -> int:
    """The exit code of ``encoder-svc encode``."""
    (folder / "photo.jpg").write_bytes(PHOTO)
    (folder / "token").write_text(f"{token}\n")
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "encoder_svc.cli.main", "encode", "--target", target, "--token-file",
        str(folder / "token"), str(folder / "photo.jpg"),
    )  # fmt: skip
    return await process.wait()


async def test_a_token_goes_to_no_other_host_in_plain_text() -> None:
    for target in ("encoder-a:50051", "10.0.0.7:50051", "dns:///encoder"):
        with pytest.raises(EncoderClientError, match="plain text") as refused:
            EncoderClient(target, ClientSettings(Credentials(token="secret")))
        assert "secret" not in str(refused.value)
    for target in ("127.0.0.1:50051", "localhost:50051", "[::1]:50051", "unix:/run/encoder.sock"):
        async with EncoderClient(target, ClientSettings(Credentials(token="secret"))):
            pass
    async with EncoderClient("encoder-a:50051", ClientSettings(Credentials(token="secret", token_in_plain_text=True))):
        pass
    async with EncoderClient("encoder-a:50051", ClientSettings(Credentials(grpc.ssl_channel_credentials(), "secret"))):
        pass


async def test_a_token_goes_by_tls(tmp_path: Path, tokens: Path) -> None:
    authority = make_authority(tmp_path)
    own = make_certificate(tmp_path, authority, "server")
    credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    async with (
        served(tokens, tls_certificate=own.certificate, tls_key=own.key) as (server, _),
        EncoderClient(server.target, ClientSettings(Credentials(credentials, "may-info"))) as client,
        EncoderClient(server.target, ClientSettings(Credentials(credentials))) as stranger,
    ):
        assert (await client.server_info()).encoder.instance_id == "me"
        with pytest.raises(EncoderError) as refused:
            await stranger.server_info()
        assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.UNAUTHENTICATED, "CALLER_UNKNOWN")
