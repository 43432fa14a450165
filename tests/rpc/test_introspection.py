"""A server tells what it is to standard tools: a real grpcurl, reflection, health, channelz."""

from __future__ import annotations

import base64
import json
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from tests.conftest import StartServer
from tests.rpc.calls import PHOTO, SECONDS
from tests.server_process import ServerProcess

GRPCURL = Path(sysconfig.get_path("scripts")) / "grpcurl"
SERVICE = "epd.encoder.v1.EncoderService"


def grpcurl(target: str, *arguments: str, message: str = "", fails: bool = False) -> str:
    """Runs grpcurl against a server."""
    options = ["-d", "@"] if message else []
    done = subprocess.run(
        [GRPCURL, "-plaintext", "-max-time", "30", *options, target, *arguments],
        input=message,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode != 0) == fails, done.stderr
    return done.stderr if fails else done.stdout


def test_grpcurl_lists_the_services(server: ServerProcess) -> None:
    assert grpcurl(server.target, "list").split() == [
        SERVICE,
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
    ]


def test_grpcurl_describes_the_contract(server: ServerProcess) -> None:
    described = grpcurl(server.target, "describe", SERVICE)
    for method in ("Encode", "Upload", "Acquire", "Subscribe", "Fetch", "Release", "Renew", "Cancel", "GetServerInfo"):
        assert f"rpc {method} (" in described
    assert "grid_dim" in grpcurl(server.target, "describe", "epd.encoder.v1.EmbeddingChunk")


@pytest.mark.parametrize("service", ["", SERVICE])
def test_grpcurl_asks_for_health(server: ServerProcess, service: str) -> None:
    answer = grpcurl(server.target, "grpc.health.v1.Health/Check", message=json.dumps({"service": service}))
    assert json.loads(answer) == {"status": "SERVING"}


def test_grpcurl_health_of_an_unknown_service_is_not_found(server: ServerProcess) -> None:
    message = json.dumps({"service": "nobody"})
    assert "NotFound" in grpcurl(server.target, "grpc.health.v1.Health/Check", message=message, fails=True)


def test_grpcurl_gets_server_info(server: ServerProcess) -> None:
    info = json.loads(grpcurl(server.target, f"{SERVICE}/GetServerInfo"))
    assert info["encoder"]["grpc_target"] == server.target
    assert info["engines"][0]["state"] == "ENGINE_STATE_READY"
    assert "MODALITY_IMAGE" in info["model"]["modalities"]


def test_grpcurl_encodes_inline_bytes(server: ServerProcess) -> None:
    item = {"modality": "MODALITY_IMAGE", "data": base64.b64encode(PHOTO).decode()}
    printed = grpcurl(
        server.target,
        f"{SERVICE}/Encode",
        message=json.dumps({"items": [item], "lease_ttl": "1s", "cache_policy": "CACHE_POLICY_BYPASS"}),
    )
    events = [event for response in _json_stream(printed) for event in response["events"]]
    assert [next(iter(event)) for event in events] == ["accepted", "chunk", "chunk", "complete"]
    assert [event["chunk"]["state"] for event in events[1:3]] == ["CHUNK_STATE_LAYOUT", "CHUNK_STATE_READY"]
    assert events[3]["complete"]["ready"] == 1


def test_grpcurl_shows_the_details_of_an_error(server: ServerProcess) -> None:
    said = grpcurl(server.target, f"{SERVICE}/Encode", message="{}", fails=True)
    assert "InvalidArgument" in said
    assert "REQUEST_INVALID" in said
    assert "items" in said


def test_reflection_knows_the_types_of_error_details(server: ServerProcess) -> None:
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=ErrorInfo.DESCRIPTOR.full_name)
    with grpc.insecure_channel(server.target) as channel:
        stub: Any = ServerReflectionStub(channel)
        (answer,) = stub.ServerReflectionInfo(iter([request]), timeout=SECONDS)
    assert answer.WhichOneof("message_response") == "file_descriptor_response"


def test_channelz_and_reflection_are_as_set(start_server: StartServer) -> None:
    server = start_server(channelz=True, wait=False).wait_listening()
    assert "grpc.channelz.v1.Channelz" in grpcurl(server.target, "list").split()
    servers = json.loads(grpcurl(server.target, "grpc.channelz.v1.Channelz/GetServers"))
    assert len(servers["server"]) == 1
    silent = start_server(reflection=False, wait=False).wait_listening()
    assert "does not support the reflection API" in grpcurl(silent.target, "list", fails=True)


def test_channelz_is_off_unless_asked_for(server: ServerProcess) -> None:
    assert "grpc.channelz.v1.Channelz" not in grpcurl(server.target, "list").split()


def _json_stream(text: str) -> list[Any]:
    decoder = json.JSONDecoder()
    found = []
    text = text.strip()
    while text:
        value, end = decoder.raw_decode(text)
        found.append(value)
        text = text[end:].strip()
    return found
