"""Media by address: fetched where the settings allow it, refused where they do not."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest

from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from tests.photograph import photo
from tests.rpc.calls import (
    PHOTO,
    SECONDS,
    calls_to,
    encode,
    encode_request,
    failures,
    fetch,
    image,
    is_idle,
    ready_chunks,
    release,
)
from tests.rpc.conftest import FileServer
from tests.rpc.statuses import reason_of
from tests.server_process import ServerProcess
from tests.waiting import eventually


@pytest.fixture
async def stub(small_server: ServerProcess) -> AsyncIterator[Any]:
    async with calls_to(small_server) as stub:
        yield stub
    await eventually(lambda: is_idle(small_server))


def at(uri: str, part_idx: int = 0, **fields: Any) -> MediaItem:
    return MediaItem(part_idx=part_idx, modality=Modality.MODALITY_IMAGE, uri=uri, **fields)


async def failure(stub: Any, item: MediaItem) -> pb.PartFailed:
    """Why an item fails; the one beside it does not."""
    events = await encode(stub, item, image(1))
    (failed,) = failures(events)
    assert failed.part_idx == 0
    assert len(ready_chunks(events)) == 1
    await release(stub, *ready_chunks(events))
    return failed


async def test_a_file_at_an_address_is_the_file(stub: Any, file_server: FileServer) -> None:
    uri = file_server.serve("/photo.jpg", PHOTO)
    fetched, inline = ready_chunks(await encode(stub, at(uri), image(1)))
    assert fetched.content_key == inline.content_key
    np.testing.assert_allclose(await fetch(stub, fetched), await fetch(stub, inline), atol=1e-5)
    await release(stub, fetched, inline)


async def test_a_data_address_is_the_file(server: ServerProcess) -> None:
    # It needs no setting.
    async with calls_to(server) as stub:
        uri = f"data:image/jpeg;base64,{base64.b64encode(PHOTO).decode()}"
        fetched, inline = ready_chunks(await encode(stub, at(uri), image(1)))
        assert fetched.content_key == inline.content_key
        np.testing.assert_allclose(await fetch(stub, fetched), await fetch(stub, inline), atol=1e-5)
        await release(stub, fetched, inline)


async def test_a_cached_file_is_fetched_and_not_encoded_again(stub: Any, file_server: FileServer) -> None:
    uri = file_server.serve("/cached.jpg", photo(84, 84))
    fields = {"cache_policy": pb.CACHE_POLICY_USE, "cache_salt": b"uri"}
    chunks = [chunk for _ in range(2) for chunk in ready_chunks(await encode(stub, at(uri), **fields))]
    assert [chunk.from_cache for chunk in chunks] == [False, True]
    assert file_server.asked.count("/cached.jpg") == 2
    # The address is no part of the content's name: what it holds may change.
    file_server.serve("/cached.jpg", photo(84, 112))
    (changed,) = ready_chunks(await encode(stub, at(uri), **fields))
    assert not changed.from_cache
    await release(stub, *chunks, changed)


async def test_a_digest_is_checked(stub: Any, file_server: FileServer) -> None:
    uri = file_server.serve("/photo.jpg", PHOTO)
    failed = await failure(stub, at(uri, content_sha256=hashlib.sha256(b"other").digest()))
    assert reason_of(failed) == "MEDIA_DIGEST_MISMATCH"


@pytest.mark.parametrize(
    "uri",
    [
        "http://127.0.0.1:80/x.jpg",
        "https://127.0.0.1/x.jpg",
        "file:///etc/hostname",
        "ftp://127.0.0.1/x",
    ],
)
async def test_f19_addresses_are_forbidden_unless_they_are_allowed(server: ServerProcess, uri: str) -> None:
    async with calls_to(server) as stub:
        failed = await failure(stub, at(uri))
        assert failed.status.code == grpc.StatusCode.PERMISSION_DENIED.value[0]
        assert reason_of(failed) == "URI_FORBIDDEN"
    await eventually(lambda: is_idle(server))


async def test_f19_only_what_is_allowed_is_fetched(stub: Any, file_server: FileServer) -> None:
    # Loopback and http are; another port, and other private networks, are not.
    for uri in (f"http://127.0.0.1:{file_server.server_port + 1}/x", f"http://10.0.0.1:{file_server.server_port}/x"):
        assert reason_of(await failure(stub, at(uri))) == "URI_FORBIDDEN"


async def test_f21_a_missing_file_is_told_without_its_address(stub: Any, file_server: FileServer) -> None:
    uri = file_server.serve("/there", b"") + "-is-SECRET-nothing"
    failed = await failure(stub, at(uri))
    assert reason_of(failed) == "FETCH_REFUSED"
    assert "SECRET" not in str(failed)


async def test_f20_a_file_that_is_too_large_is_refused(stub: Any, file_server: FileServer) -> None:
    uri = file_server.serve("/large", bytes(256 * 1024 + 1))
    assert reason_of(await failure(stub, at(uri))) == "FETCH_TOO_LARGE"


async def test_a_file_that_is_no_image_fails_as_if_it_were_inline(stub: Any, file_server: FileServer) -> None:
    uri = file_server.serve("/text", b"no image at all")
    assert reason_of(await failure(stub, at(uri))) == "MEDIA_UNRECOGNIZED"


async def test_a_web_server_that_is_silent_is_given_up(hasty_server: ServerProcess, file_server: FileServer) -> None:
    uri = file_server.serve("/slow", PHOTO)
    file_server.answers.clear()
    try:
        async with calls_to(hasty_server) as stub:
            failed = await failure(stub, at(uri))
    finally:
        file_server.answers.set()
    assert reason_of(failed) == "FETCH_TIMEOUT"
    assert failed.status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]


async def test_f27_leaving_ends_the_fetch(stub: Any, small_server: ServerProcess, file_server: FileServer) -> None:
    uri = file_server.serve("/left", PHOTO)
    file_server.answers.clear()
    try:
        call = stub.Encode(encode_request(at(uri)), timeout=SECONDS)
        await call.read()

        async def it_is_being_fetched() -> bool:
            return (await small_server.info()).load.parts["fetching"] == 1 and "/left" in file_server.asked

        await eventually(it_is_being_fetched)
        call.cancel()
        await eventually(lambda: is_idle(small_server))
    finally:
        file_server.answers.set()
