"""Connections to encoders: how many, kept alive how, and whom a certificate must name."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path
from random import Random

import grpc
import psutil
import pytest
import trustme
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from encoder_client import (
    ClientSettings,
    Credentials,
    EncoderClient,
    EncoderError,
    EncoderFleet,
    HealthState,
    connections,
    image,
)
from encoder_client.fleet.roster import Roster
from epd.encoder.v1.embedding_pb2 import EncoderRef
from epd.encoder.v1.encoder_service_pb2 import GetServerInfoResponse, ReadOutcome
from tests.client.unreliable_encoder import UnreliableEncoder
from tests.conftest import StartServer
from tests.photograph import photo
from tests.server_process import START_SECONDS, ServerProcess
from tests.waiting import PATIENCE_SECONDS, eventually

ITEM = image(photo(140, 112))
PINGS = 3


def connections_to(target: str) -> set[int]:
    """The ports at this end."""
    port = int(target.rpartition(":")[2])
    own = psutil.Process().net_connections("tcp")
    return {c.laddr.port for c in own if c.status == psutil.CONN_ESTABLISHED and c.raddr and c.raddr.port == port}


async def test_calls_take_turns_on_a_few_connections(server: ServerProcess) -> None:
    before = connections_to(server.target)
    async with EncoderClient(server.target, ClientSettings(transports=("inline",), channels=3)) as client:
        for _ in range(6):
            async with client.encode([ITEM]) as call:
                await call.embeddings()
        assert len(connections_to(server.target) - before) == 3


async def test_a_known_server_is_read_where_its_calls_go() -> None:
    encoder = UnreliableEncoder()
    target = await encoder.start()
    encoder.target = "198.51.100.1:1"  # what others reach it by
    async with EncoderClient(target, ClientSettings(transports=("inline",))) as client:
        async with client.encode([image(b"a")], prompt_id="p", request_id="r", num_parts=1) as call:
            await call.embeddings()
        client.forget(target)
        # The next call connects again.
        assert await client.health()
    await encoder.stop()


def test_a_server_with_two_addresses_keeps_one_of_them() -> None:
    async def main() -> None:
        known = connections.Connections("a:1", ClientSettings())
        encoder = EncoderRef(instance_id="1" * 32, grpc_target="c:1")
        known.note_encoder(encoder, "a:1")
        known.note_encoder(encoder, "b:1")
        assert known._target_of(encoder) == "a:1"
        known.forget("b:1", 0)
        assert known._target_of(encoder) == "a:1"
        known.note_encoder(EncoderRef(instance_id="2" * 32), "a:1")  # another life, at the same address
        assert known._target_of(encoder) == "c:1"
        await known.close()

    asyncio.run(main())


async def test_f28_an_idle_call_outlives_the_pings_of_the_client(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the client's own options, but for the time between two pings: the shortest that clients are told."""
    options = dict(connections._CHANNEL_OPTIONS)
    assert int(options["grpc.keepalive_time_ms"]) >= 10_000
    options["grpc.keepalive_time_ms"] = 5_200
    monkeypatch.setattr(connections, "_CHANNEL_OPTIONS", (*options.items(), ("grpc.use_local_subchannel_pool", 1)))
    loop = asyncio.get_running_loop()
    async with EncoderClient(server.target, ClientSettings(transports=("inline",))) as client:
        watch = HealthStub(client._connections._encoder(server.target).channels[0]).Watch(HealthCheckRequest())
        assert (await watch.read()).status == HealthCheckResponse.SERVING
        begin = loop.time()
        with pytest.raises(TimeoutError):  # nothing more comes, and no error either
            await asyncio.wait_for(watch.read(), PINGS * 5.2 + 1.0)
        assert loop.time() - begin > PINGS * 5.2
        assert await client.health()
        watch.cancel()


async def test_an_address_of_a_name_shows_the_certificate_of_the_name(
    start_server: StartServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = trustme.CA()
    certificate, key = tmp_path / "certificate.pem", tmp_path / "key.pem"
    issued = authority.issue_cert("encoders.example")
    issued.cert_chain_pems[0].write_to_path(certificate)
    issued.private_key_pem.write_to_path(key)
    server = start_server(tls_certificate=certificate, tls_key=key)
    port = int(server.target.rpartition(":")[2])
    name_server(monkeypatch, {"encoders.example": ["127.0.0.1"], "others.example": ["127.0.0.1"]})
    credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())

    def fleet_at(name: str) -> EncoderFleet:
        settings = ClientSettings(Credentials(credentials), transports=("inline",))
        return EncoderFleet([f"dns:{name}:{port}"], settings, poll_seconds=0.1)

    async with fleet_at("encoders.example") as fleet, fleet.encode([ITEM], timeout=START_SECONDS) as call:
        await call.embeddings()
    async with fleet_at("others.example") as fleet:
        seen: set[HealthState] = set()

        def is_ejected() -> bool:
            seen.update(fleet.states.values())
            return HealthState.EJECTED in seen

        await eventually(is_ejected)
        assert HealthState.SERVING not in seen


def name_server(monkeypatch: pytest.MonkeyPatch, names: dict[str, list[str]]) -> list[str]:
    """Answers for these names; the real one is not asked. Returns the questions, which grow."""
    questions: list[str] = []

    async def getaddrinfo(self: object, host: str, port: int, **options: object) -> Sequence[object]:
        questions.append(host)
        if host not in names:
            raise socket.gaierror(socket.EAI_NONAME, "there is no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in names[host]]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)
    return questions


async def test_a_name_is_looked_up_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"encoders.example": ["127.0.0.1", "127.0.0.2"]}
    questions = name_server(monkeypatch, names)
    async with EncoderClient("127.0.0.1:9", ClientSettings(transports=("inline",))) as client:
        roster = Roster(client, ["dns:encoders.example:9", "127.0.0.9:9"], 0.1, 0.01, Random(0), lambda: None)
        roster.open()
        await eventually(lambda: set(roster.members) == {"127.0.0.1:9", "127.0.0.2:9", "127.0.0.9:9"})
        names["encoders.example"] = ["127.0.0.2", "127.0.0.3"]
        await eventually(lambda: set(roster.members) == {"127.0.0.2:9", "127.0.0.3:9", "127.0.0.9:9"})
        # A name server that fails empties no fleet.
        del names["encoders.example"]
        asked = len(questions)
        await eventually(lambda: len(questions) > asked + 2)
        assert set(roster.members) == {"127.0.0.2:9", "127.0.0.3:9", "127.0.0.9:9"}
        await roster.close()


async def test_a_fleet_that_is_closed_when_a_poll_has_just_failed_polls_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    asked, failed = asyncio.Event(), loop.create_future()

    async def health(self: EncoderClient, timeout: float) -> bool:
        asked.set()
        await failed
        raise EncoderError(grpc.StatusCode.UNAVAILABLE, "as the test wants it")

    async def server_info(self: EncoderClient, timeout: float) -> GetServerInfoResponse:
        await asyncio.Event().wait()
        raise AssertionError

    monkeypatch.setattr(EncoderClient, "health", health)
    monkeypatch.setattr(EncoderClient, "server_info", server_info)
    async with EncoderClient("127.0.0.9:9", ClientSettings(transports=("inline",))) as client:
        roster = Roster(client, ["127.0.0.9:9"], 0.01, 0.01, Random(0), lambda: None)
        roster.open()
        await asked.wait()
        # In one turn of the loop: it fails, then the roster is closed.
        failed.set_result(None)
        await asyncio.wait_for(roster.close(), PATIENCE_SECONDS)


async def test_a_name_that_cannot_be_one_leaves_the_others(caplog: pytest.LogCaptureFixture) -> None:
    async with EncoderClient("127.0.0.1:9", ClientSettings(transports=("inline",))) as client:
        roster = Roster(client, ["dns:encoders..example:9", "dns:127.0.0.2:9"], 0.1, 0.01, Random(0), lambda: None)
        roster.open()
        await eventually(lambda: set(roster.members) == {"127.0.0.2:9"})
        await roster.close()
    assert "the name encoders..example cannot be resolved" in caplog.text


async def test_an_address_that_is_given_up_costs_nothing_at_another_of_the_server() -> None:
    encoder, well, lost = EncoderRef(instance_id="1" * 32), "127.0.0.1:1", "127.0.0.1:2"
    known = connections.Connections(well, ClientSettings())
    known.give_up(lost)  # nobody was asked there yet
    known.note_encoder(encoder, well)
    known.note_encoder(encoder, lost)
    confirmation = asyncio.create_task(known.releases_of(encoder).confirm(b"lease", ReadOutcome.READ_OUTCOME_OK))
    await asyncio.sleep(0)
    known.give_up(lost)
    await asyncio.sleep(0)
    assert not confirmation.done()
    known.give_up(well)
    with pytest.raises(EncoderError, match="given up"):
        await confirmation
    await known.close()


@pytest.mark.parametrize("target", ["dns:", "dns:host", "dns:host:", "dns:host:http", "dns://8.8.8.8/host:1"])
def test_a_name_that_is_none_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="dns:NAME:PORT"):
        EncoderFleet([target], ClientSettings(transports=("inline",)))
