"""Bad input: each kind ends with its own code, reason and message, and the server goes on."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from tests.photograph import photo
from tests.rpc.calls import (
    PHOTO,
    SECONDS,
    calls_to,
    encode,
    events_of,
    failures,
    image,
    is_idle,
    kinds,
    ready_chunks,
    release,
)
from tests.rpc.statuses import fields_of, reason_of
from tests.server_process import ServerProcess
from tests.waiting import eventually


@pytest.fixture
async def stub(server: ServerProcess) -> AsyncIterator[Any]:
    """Calls of a server that must be as good after the test as before."""
    async with calls_to(server) as stub:
        yield stub
        events = await encode(stub)
        assert kinds(events) == ["accepted", "layout", "ready", "complete"]
        await release(stub, *ready_chunks(events))
    await eventually(lambda: is_idle(server))


BAD_MEDIA = {
    "not an image": (b"this is no image at all", "MEDIA_UNRECOGNIZED"),
    "empty": (b"", "MEDIA_EMPTY"),
    "truncated": (PHOTO[: len(PHOTO) // 2], "MEDIA_TRUNCATED"),
}


@pytest.mark.parametrize(("data", "reason"), BAD_MEDIA.values(), ids=BAD_MEDIA.keys())
async def test_f05_bad_media_fail_only_their_own_part(stub: Any, data: bytes, reason: str) -> None:
    for place in range(3):
        items = [image(i, data if i == place else PHOTO) for i in range(3)]
        events = await encode(stub, *items)
        (failed,) = failures(events)
        assert (failed.part_idx, reason_of(failed)) == (place, reason)
        assert failed.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        assert len(failed.status.message) > 20
        chunks = ready_chunks(events)
        assert [chunk.part_idx for chunk in chunks] == [i for i in range(3) if i != place]
        assert (events[-1].complete.ready, events[-1].complete.failed) == (2, 1)
        await release(stub, *chunks)


async def test_a_wrong_digest_fails_the_part(stub: Any) -> None:
    item = image()
    item.content_sha256 = hashlib.sha256(b"other bytes").digest()
    (failed,) = failures(await encode(stub, item))
    assert reason_of(failed) == "MEDIA_DIGEST_MISMATCH"
    item.content_sha256 = hashlib.sha256(PHOTO).digest()
    await release(stub, *ready_chunks(await encode(stub, item)))


async def test_too_many_pixels_are_refused_before_decoding(stub: Any) -> None:
    header = bytearray(photo(64, 64))
    frame = header.index(b"\xff\xc0")
    header[frame + 5 : frame + 9] = (65_500).to_bytes(2, "big") * 2
    (failed,) = failures(await encode(stub, image(data=bytes(header))))
    assert reason_of(failed) == "MEDIA_TOO_LARGE"


REFUSED = {
    "unspecified modality": (pb.EncodeRequest(items=[MediaItem(data=PHOTO)]), "items[0].modality"),
    "unknown modality": (
        pb.EncodeRequest(items=[MediaItem(data=PHOTO, modality=9)]),  # type: ignore[arg-type] # no Modality
        "items[0].modality",
    ),
    "part outside": (pb.EncodeRequest(items=[image(2)], num_parts=2), "items[0].part_idx"),
    "part twice": (pb.EncodeRequest(items=[image(), image()]), "items[1].part_idx"),
    "no items": (pb.EncodeRequest(), "items"),
    "id too long": (pb.EncodeRequest(request_id="x" * 257, items=[image()]), "request_id"),
}


@pytest.mark.parametrize(("request_", "field"), REFUSED.values(), ids=REFUSED.keys())
async def test_a_wrong_request_is_refused_as_a_whole(stub: Any, request_: pb.EncodeRequest, field: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await events_of(stub.Encode(request_, timeout=SECONDS))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(refused.value) == "REQUEST_INVALID"
    assert fields_of(refused.value) == [field]


@pytest.mark.parametrize("modality", [Modality.MODALITY_AUDIO])
async def test_a_modality_without_a_tower_is_unsupported(stub: Any, modality: Modality) -> None:
    request = pb.EncodeRequest(items=[MediaItem(data=PHOTO, modality=modality)])
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await events_of(stub.Encode(request, timeout=SECONDS))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(refused.value) == "MODALITY_UNSUPPORTED"


async def test_another_fingerprint_is_refused(stub: Any, server: ServerProcess) -> None:
    fingerprint = (await server.info()).model.compatibility_fingerprint
    other = bytes([fingerprint[0] ^ 1]) + fingerprint[1:]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await encode(stub, expected_fingerprint=other)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert reason_of(refused.value) == "FINGERPRINT_MISMATCH"
    await release(stub, *ready_chunks(await encode(stub, expected_fingerprint=fingerprint)))


async def test_a_message_above_the_limit_is_refused(stub: Any, server: ServerProcess) -> None:
    limit = (await server.info()).limits.max_message_bytes
    request = pb.EncodeRequest(items=[image(i, bytes(limit // 2)) for i in range(2)])
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await events_of(stub.Encode(request, timeout=SECONDS))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_media_above_the_inline_limit_are_told_of_upload(stub: Any, server: ServerProcess) -> None:
    limit = (await server.info()).limits.max_inline_bytes
    with pytest.raises(grpc.aio.AioRpcError, match="Upload") as refused:
        await encode(stub, image(data=bytes(limit + 1)))
    assert reason_of(refused.value) == "MEDIA_TOO_LARGE"
    assert fields_of(refused.value) == ["items[0].data"]


async def test_f21_no_answer_repeats_media_or_tells_of_our_insides(stub: Any) -> None:
    secret = b"SECRET-MEDIA-BYTES"
    for data in (secret * 100, PHOTO[:300] + secret * 50, b"\x89PNG\r\n\x1a\n" + secret * 50):
        (failed,) = failures(await encode(stub, image(data=data)))
        said = failed.SerializeToString()
        for word in (b"SECRET", b"Traceback", b"Error(", b"/work", b"encoder_svc", b"0x"):
            assert word not in said


METHODS = list(pb.DESCRIPTOR.services_by_name["EncoderService"].methods)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
async def test_a_damaged_message_is_refused_like_a_wrong_one(stub: Any, server: ServerProcess, method: Any) -> None:
    logged = len(server.stderr)
    async with server.channel() as channel:
        for damaged in (b"\xff\xff", b"\x0a\x02\xff\xfe\x0b", b"\x0b" * 10_000):
            call: Any = channel.stream_stream(f"/{method.containing_service.full_name}/{method.name}", None, None)
            with pytest.raises(grpc.aio.AioRpcError, match=r"no serialised|not a serialised") as refused:
                await call(iter([damaged]), timeout=SECONDS).read()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert reason_of(refused.value) == "REQUEST_INVALID"
    assert "Traceback" not in server.stderr[logged:]
