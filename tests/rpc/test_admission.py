"""A server that is full says so, and when to come again."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from epd.encoder.v1 import encoder_service_pb2 as pb
from tests.rpc.calls import SECONDS, calls_to, encode, encode_request, events_of, image, is_idle, ready_chunks, release
from tests.rpc.metrics_page import metric
from tests.rpc.statuses import fields_of, reason_of, retry_of
from tests.server_process import ServerProcess
from tests.waiting import eventually

MAX_PARTS = 24
"""What the small server holds."""


async def refusal(stub: Any, parts: int) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await encode(stub, *map(image, range(parts)))
    return refused.value


async def test_f02_a_full_server_refuses_until_there_is_room(small_server: ServerProcess) -> None:
    async with calls_to(small_server) as stub:
        count = await metric(small_server, "refused_total", reason="ADMISSION_FULL")
        with small_server.held(small_server.media_worker()):
            call = stub.Encode(encode_request(*map(image, range(MAX_PARTS - 1))), timeout=SECONDS)
            await call.read()
            error = await refusal(stub, 2)
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert reason_of(error) == "ADMISSION_FULL"
            retry = retry_of(error)
            assert retry is not None
            assert 0.05 <= retry <= 30
            # What fits is let in.
            last = stub.Encode(encode_request(), timeout=SECONDS)
            await last.read()
            assert reason_of(await refusal(stub, 1)) == "ADMISSION_FULL"
            assert (await small_server.info()).load.requests == 2
        chunks = [chunk for each in (call, last) for chunk in ready_chunks(await events_of(each))]
        assert len(chunks) == MAX_PARTS
        # Leases hold memory, not places: there is room again.
        chunks += ready_chunks(await encode(stub, *map(image, range(MAX_PARTS))))
        assert await release(stub, *chunks) == [pb.LEASE_STATE_HELD] * 2 * MAX_PARTS
        assert await metric(small_server, "refused_total", reason="ADMISSION_FULL") == count + 2
    await eventually(lambda: is_idle(small_server))


async def test_f02_what_never_fits_is_refused_for_good(small_server: ServerProcess) -> None:
    async with calls_to(small_server) as stub:
        error = await refusal(stub, MAX_PARTS + 1)
    assert (error.code(), reason_of(error)) == (grpc.StatusCode.INVALID_ARGUMENT, "REQUEST_INVALID")
    assert fields_of(error) == ["items"]
    assert retry_of(error) is None
    await eventually(lambda: is_idle(small_server))
