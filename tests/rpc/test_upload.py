"""Upload: media above the inline limit, and every way in which a file may not come."""

from __future__ import annotations

import hashlib
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from tests.photograph import photo
from tests.rpc.calls import calls_to, encode, failures, image, is_idle, ready_chunks, release
from tests.rpc.statuses import fields_of, reason_of, retry_of
from tests.server_process import START_SECONDS, ServerProcess
from tests.waiting import eventually

LARGE = photo(512, 448, quality=98)
PIECE_BYTES = 50_000


@pytest.fixture
async def stub(small_server: ServerProcess) -> AsyncIterator[Any]:
    async with calls_to(small_server) as stub:
        yield stub
    await eventually(lambda: is_idle(small_server))


def header(total_bytes: int, sha256: bytes = b"") -> pb.UploadRequest:
    return pb.UploadRequest(header=pb.UploadHeader(total_bytes=total_bytes, sha256=sha256))


def pieces(file: bytes) -> list[pb.UploadRequest]:
    return [pb.UploadRequest(piece=file[i : i + PIECE_BYTES]) for i in range(0, len(file), PIECE_BYTES)]


async def upload(stub: Any, file: bytes, sha256: bytes = b"") -> pb.UploadResponse:
    answer: pb.UploadResponse = await stub.Upload(iter([header(len(file), sha256), *pieces(file)]))
    return answer


async def upload_fails(stub: Any, *messages: pb.UploadRequest) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await stub.Upload(iter(messages))
    return failed.value


def uploaded(upload_id: str, part_idx: int = 0) -> MediaItem:
    return MediaItem(part_idx=part_idx, modality=Modality.MODALITY_IMAGE, upload_id=upload_id)


async def test_media_above_the_inline_limit_come_by_upload(stub: Any, small_server: ServerProcess) -> None:
    assert len(LARGE) > (await small_server.info()).limits.max_inline_bytes
    digest = hashlib.sha256(LARGE).digest()
    answer = await upload(stub, LARGE, digest)
    assert answer.sha256 == digest
    # The clock of the day may be set meanwhile.
    assert 0 < answer.expiry.ToNanoseconds() / 1e9 - time.time() < START_SECONDS + 1
    # Several requests and parts may name it, whole and with options of their own.
    item = uploaded(answer.upload_id, 1)
    item.image.max_pixels = 112 * 112
    whole, reduced = ready_chunks(await encode(stub, uploaded(answer.upload_id), item))
    assert list(whole.grid_dim) == [1, 32, 36]
    assert reduced.token_count < whole.token_count
    await release(stub, whole, reduced)


async def test_an_upload_and_the_same_bytes_inline_are_one_content(stub: Any) -> None:
    file = photo(112, 84)
    answer = await upload(stub, file)
    fields = {"cache_policy": pb.CACHE_POLICY_USE, "cache_salt": b"upload"}
    (first,) = ready_chunks(await encode(stub, uploaded(answer.upload_id), **fields))
    (second,) = ready_chunks(await encode(stub, image(data=file), **fields))
    assert (first.from_cache, second.from_cache) == (False, True)
    assert second.content_key == first.content_key
    await release(stub, first, second)


async def test_an_unknown_upload_fails_its_part_alone(stub: Any) -> None:
    events = await encode(stub, uploaded("never was"), image(1))
    (failed,) = failures(events)
    assert (failed.part_idx, reason_of(failed)) == (0, "UPLOAD_UNKNOWN")
    assert failed.status.code == grpc.StatusCode.NOT_FOUND.value[0]
    await release(stub, *ready_chunks(events))


async def test_an_upload_is_forgotten_when_its_time_is_over(hasty_server: ServerProcess) -> None:
    async with calls_to(hasty_server) as stub:
        begun, answer = 0.0, pb.UploadResponse()

        async def it_has_come() -> bool:
            nonlocal begun, answer
            begun = time.monotonic()
            try:
                answer = await upload(stub, photo(112, 84))
            except grpc.aio.AioRpcError as error:
                if reason_of(error) != "UPLOAD_UNKNOWN":
                    raise
                # It has no longer to come than it is kept, which a very busy machine may take.
                return False
            return True

        async def it_is_forgotten() -> bool:
            events = await encode(stub, uploaded(answer.upload_id))
            await release(stub, *ready_chunks(events))
            return [reason_of(failed) for failed in failures(events)] == ["UPLOAD_UNKNOWN"]

        await eventually(it_has_come)
        await eventually(it_is_forgotten)
        assert time.monotonic() - begun > 0.4, "it was to be kept for half a second"


async def test_bytes_that_are_not_those_of_the_digest_are_refused(stub: Any) -> None:
    error = await upload_fails(stub, header(5, hashlib.sha256(b"other").digest()), pb.UploadRequest(piece=b"bytes"))
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "MEDIA_DIGEST_MISMATCH")


async def test_too_few_bytes_are_told(stub: Any) -> None:
    error = await upload_fails(stub, header(6), pb.UploadRequest(piece=b"bytes"))
    assert reason_of(error) == "MEDIA_TRUNCATED"
    assert "5 of the 6 bytes" in str(error.details())


async def test_more_bytes_than_announced_are_refused(stub: Any) -> None:
    error = await upload_fails(stub, header(4), pb.UploadRequest(piece=b"bytes"))
    assert (reason_of(error), fields_of(error)) == ("REQUEST_INVALID", ["piece"])


async def test_a_missing_header_is_told(stub: Any) -> None:
    for messages in ([], [pb.UploadRequest(piece=b"bytes")]):
        error = await upload_fails(stub, *messages)
        assert reason_of(error) == "REQUEST_INVALID"
        assert "header" in str(error.details())


@pytest.mark.parametrize(("total", "reason"), [(0, "MEDIA_EMPTY"), (512 * 1024 + 1, "MEDIA_TOO_LARGE")])
async def test_f20_a_size_that_cannot_be_is_refused_by_the_header(stub: Any, total: int, reason: str) -> None:
    # It is answered before a piece has come: none is ever sent.
    call = stub.Upload()
    await call.write(header(total))
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    assert reason_of(failed.value) == reason
    assert fields_of(failed.value) == ["header.total_bytes"]


async def test_f10_an_upload_that_is_abandoned_frees_its_room(stub: Any) -> None:
    # Twice as much as there is room for, and more than other tests can have left free.
    size, places = 32 * 1024, 32
    calls = [stub.Upload() for _ in range(2 * places)]
    for call in calls:
        await call.write(header(size))
    await eventually(lambda: sum(call.done() for call in calls) >= places)
    for call in calls:
        if call.done():
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert (reason_of(refused.value), retry_of(refused.value)) == ("ADMISSION_FULL", 1.0)

    async def there_is_room() -> bool:
        try:
            await upload(stub, bytes(size))
        except grpc.aio.AioRpcError:
            return False
        return True

    assert not await there_is_room()
    for call in calls:
        call.cancel()
    await eventually(there_is_room)
