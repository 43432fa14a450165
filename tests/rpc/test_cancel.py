"""Cancels, deadlines and callers that leave: exactly the parts that are not READY end, and nothing stays held."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from epd.encoder.v1 import encoder_service_pb2 as pb
from tests.rpc.calls import (
    SECONDS,
    calls_to,
    encode,
    encode_request,
    events_of,
    failures,
    image,
    is_idle,
    kinds,
    ready_chunks,
    release,
)
from tests.rpc.statuses import reason_of
from tests.server_process import ServerProcess
from tests.waiting import eventually


@pytest.fixture
async def stub(server: ServerProcess) -> AsyncIterator[Any]:
    await eventually(lambda: is_idle(server))
    async with calls_to(server) as stub:
        yield stub
        await release(stub, *ready_chunks(await encode(stub)))
    await eventually(lambda: is_idle(server))


async def admitted(stub: Any, **fields: Any) -> Any:
    """An Encode call of two images that was accepted, with nothing else read of it."""
    call = stub.Encode(encode_request(*map(image, range(2)), **fields), timeout=SECONDS)
    first = await call.read()
    assert kinds(first.events)[0] == "accepted"
    return call


async def test_a_live_request_id_is_refused_and_free_again_afterwards(stub: Any, server: ServerProcess) -> None:
    with server.held(server.media_worker()):
        call = await admitted(stub, request_id="twice")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await encode(stub, request_id="twice", prompt_id="another")
        assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
        assert reason_of(refused.value) == "REQUEST_ID_LIVE"
    await release(stub, *ready_chunks(await events_of(call)))
    await release(stub, *ready_chunks(await encode(stub, request_id="twice")))


async def test_a_part_that_is_being_encoded_is_refused(stub: Any, server: ServerProcess) -> None:
    with server.held(server.media_worker()):
        call = await admitted(stub, prompt_id="prompt", num_parts=3)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await encode(stub, image(1), prompt_id="prompt", num_parts=3)
        assert reason_of(refused.value) == "PART_ALREADY_SUBMITTED"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await encode(stub, image(3), prompt_id="prompt", num_parts=4)
        assert reason_of(refused.value) == "PART_ALREADY_SUBMITTED"
    await release(stub, *ready_chunks(await events_of(call)))


@pytest.mark.parametrize("place", ["media worker", "engine"])
async def test_cancel_by_request_ends_that_request_alone(stub: Any, server: ServerProcess, place: str) -> None:
    child = server.media_worker() if place == "media worker" else server.engine()
    with server.held(child):
        call = await admitted(stub, request_id="one", prompt_id="one prompt")
        other = await admitted(stub, request_id="other", prompt_id="other prompt")
        answer = await stub.Cancel(pb.CancelRequest(request_id="one"))
        assert (answer.requests, answer.parts) == (1, 2)
        events = await events_of(call)
        assert kinds(events)[-3:] == ["part_cancelled", "part_cancelled", "complete"]
        assert events[-1].complete.cancelled == 2
    chunks = ready_chunks(await events_of(other))
    assert [chunk.part_idx for chunk in chunks] == [0, 1]
    await release(stub, *chunks)


async def test_cancel_by_prompt_ends_all_its_requests(stub: Any, server: ServerProcess) -> None:
    with server.held(server.media_worker()):
        items = [encode_request(image(i), prompt_id="prompt", num_parts=2) for i in range(2)]
        calls = [stub.Encode(request, timeout=SECONDS) for request in items]
        for call in calls:
            await call.read()
        answer = await stub.Cancel(pb.CancelRequest(prompt_id="prompt"))
        assert (answer.requests, answer.parts) == (2, 2)
        for call in calls:
            assert kinds(await events_of(call)) == ["part_cancelled", "complete"]


async def test_cancel_of_what_is_not_there_is_no_error(stub: Any) -> None:
    answer = await stub.Cancel(pb.CancelRequest(request_id="never was"))
    assert (answer.requests, answer.parts) == (0, 0)


async def test_a_lease_outlives_the_cancel_of_its_request(stub: Any, server: ServerProcess) -> None:
    events = await encode(stub, request_id="done")
    assert (await stub.Cancel(pb.CancelRequest(request_id="done"))).parts == 0
    assert await release(stub, *ready_chunks(events)) == [pb.LEASE_STATE_HELD]


@pytest.mark.parametrize("place", ["media worker", "engine"])
async def test_f27_leaving_the_stream_cancels_the_request(stub: Any, server: ServerProcess, place: str) -> None:
    with server.held(server.media_worker() if place == "media worker" else server.engine()):
        call = await admitted(stub, request_id="left")
        call.cancel()

        async def no_request_is_live() -> bool:
            return (await server.info()).load.requests == 0

        await eventually(no_request_is_live)
    # The id is free again.
    await release(stub, *ready_chunks(await encode(stub, request_id="left")))


async def test_f27_a_channel_that_closes_cancels_the_request(stub: Any, server: ServerProcess) -> None:
    with server.held(server.media_worker()):
        async with calls_to(server) as other:
            await admitted(other, request_id="closed")
            assert (await server.info()).load.requests == 1

        async def no_request_is_live() -> bool:
            return (await server.info()).load.requests == 0

        await eventually(no_request_is_live)


@pytest.mark.parametrize("place", ["media worker", "engine"])
async def test_f26_a_deadline_ends_the_request(stub: Any, server: ServerProcess, place: str) -> None:
    with server.held(server.media_worker() if place == "media worker" else server.engine()):
        call = stub.Encode(encode_request(), timeout=0.5)
        # The request's own timer and gRPC's run out together: either may be first.
        try:
            events = await events_of(call)
        except grpc.aio.AioRpcError as error:
            said = error.code().name
        else:
            (said,) = map(reason_of, failures(events))
        assert said == "DEADLINE_EXCEEDED"

        async def no_request_is_live() -> bool:
            load = (await server.info()).load
            return (load.requests, sum(load.parts.values())) == (0, 0)

        await eventually(no_request_is_live)
