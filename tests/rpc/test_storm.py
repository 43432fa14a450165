"""Hundreds of bad, abandoned, cancelled and late requests among good ones: nothing is left of them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import grpc
import grpc.aio

from epd.encoder.v1 import encoder_service_pb2 as pb
from tests.rpc.calls import (
    PHOTO,
    SECONDS,
    calls_to,
    encode,
    encode_request,
    events_of,
    failures,
    image,
    is_idle,
    ready_chunks,
    release,
)
from tests.server_process import ServerProcess
from tests.waiting import eventually

REQUESTS = 600
AT_ONCE = 24


async def good(stub: Any, name: str) -> None:
    chunks = ready_chunks(await encode(stub, image(0), image(1), request_id=name))
    assert len(chunks) == 2
    assert set(await release(stub, *chunks)) == {pb.LEASE_STATE_HELD}


async def bad_media(stub: Any, name: str) -> None:
    events = await encode(stub, image(0, b"no image"), image(1, PHOTO[:500]), request_id=name)
    assert len(failures(events)) == 2


async def refused(stub: Any, name: str) -> None:
    try:
        await encode(stub, image(0), image(0), request_id=name)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
            return
    raise AssertionError("a request with one part twice was admitted")


async def left_at_once(stub: Any, name: str) -> None:
    call = stub.Encode(encode_request(request_id=name, lease_ttl={"seconds": 1}))
    await asyncio.sleep(0)
    call.cancel()


async def left_after_acceptance(stub: Any, name: str) -> None:
    call = stub.Encode(encode_request(*map(image, range(4)), request_id=name, lease_ttl={"seconds": 1}))
    await call.read()
    call.cancel()


async def cancelled(stub: Any, name: str) -> None:
    call = stub.Encode(encode_request(*map(image, range(4)), request_id=name), timeout=SECONDS)
    await call.read()
    await stub.Cancel(pb.CancelRequest(request_id=name))
    events = await events_of(call)
    complete = events[-1].complete
    assert complete.ready + complete.cancelled == 4
    if complete.ready:
        await release(stub, *ready_chunks(events))


async def late(stub: Any, name: str) -> None:
    call = stub.Encode(encode_request(request_id=name, lease_ttl={"seconds": 1}), timeout=0.005)
    try:
        await events_of(call)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise


async def test_f10_f27_a_storm_leaves_nothing(server: ServerProcess) -> None:
    restarts, logged = (await server.info()).engines[0].restarts, len(server.stderr)
    kinds = [good, bad_media, refused, left_at_once, left_after_acceptance, cancelled, late]
    choice = random.Random(7)
    done: Counter[str] = Counter()
    waiting = iter([(choice.choice(kinds), f"storm-{i}") for i in range(REQUESTS)])

    async with calls_to(server) as stub:

        async def work() -> None:
            for kind, name in waiting:
                await kind(stub, name)
                done[kind.__name__] += 1

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))
        assert done.total() == REQUESTS
        await eventually(lambda: is_idle(server))
        await good(stub, "after the storm")
    assert (await server.info()).engines[0].restarts == restarts
    for word in ("Traceback", "unexpected error", "ERROR"):
        assert word not in server.stderr[logged:]
