"""Waits for gRPC that are cancelled: they lose nothing, and leave no memory behind."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import random
import weakref
from collections.abc import AsyncIterator, Iterator

import grpc
import pytest

from encoder_client import EncoderClient, image
from encoder_client.cancellation import Responses, answer
from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.encoder_service_pb2_grpc import EncoderServiceStub
from tests.client.scripted_encoder import ScriptedEncoder
from tests.photograph import photo
from tests.server_process import ServerProcess

WINDOWS, CALLS = 3, 600
MOST_BYTES = 350
"""For each cancelled call, over all kinds: gRPC keeps 80 for each of its batches that fails. Cancelled inside gRPC, as
a plain ``asyncio.timeout`` would, these calls leave some 700."""


@pytest.fixture
async def encoder() -> AsyncIterator[ScriptedEncoder]:
    scripted = ScriptedEncoder()
    async with scripted.serve():
        yield scripted


async def test_a_wait_that_is_cancelled_loses_no_response(encoder: ScriptedEncoder) -> None:
    async with grpc.aio.insecure_channel(encoder.target) as channel:
        responses = Responses[pb.EncodeResponse](EncoderServiceStub(channel).Encode(pb.EncodeRequest()))
        waits = 0
        seen = []
        while True:
            try:
                # Zero is over before anything can have come; later waits meet responses that are on their way.
                async with asyncio.timeout(waits * 0.0005):
                    seen.append(await anext(responses))
            except TimeoutError:
                waits += 1
            except StopAsyncIteration:
                break
    assert waits
    assert [len(response.events) for response in seen] == [1, 0, 1]
    assert seen[-1].events[0].HasField("complete")


async def test_the_call_ends_only_when_it_is_told_to(encoder: ScriptedEncoder) -> None:
    encoder.hang = True
    async with grpc.aio.insecure_channel(encoder.target) as channel:
        responses = Responses[pb.EncodeResponse](EncoderServiceStub(channel).Encode(pb.EncodeRequest()))
        await anext(responses)
        await anext(responses)
        wait = asyncio.create_task(asyncio.wait_for(anext(responses), 30))
        await asyncio.sleep(0)
        wait.cancel()
        await asyncio.wait([wait])
        assert not encoder.ended.is_set()
        other = asyncio.create_task(asyncio.wait_for(anext(responses), 30))
        await asyncio.sleep(0)
        responses.cancel()
        await encoder.ended.wait()
        with pytest.raises(asyncio.CancelledError):
            await other


async def test_a_call_that_fails_holds_nothing_of_who_waited() -> None:
    """What it raised holds the frames of the wait: embeddings in them would live until the garbage is collected."""

    class Embedding: ...

    async def wait(responses: Responses[pb.EncodeResponse]) -> weakref.ref[Embedding]:
        embedding = Embedding()
        held = weakref.ref(embedding)
        try:
            await wait_with(embedding, responses)
        except grpc.aio.AioRpcError:
            return held
        raise AssertionError("nobody is there")

    async def wait_with(embedding: Embedding, responses: Responses[pb.EncodeResponse]) -> None:
        await anext(responses)

    gc.disable()
    try:
        async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
            responses = Responses[pb.EncodeResponse](EncoderServiceStub(channel).Encode(pb.EncodeRequest()))
            held = await wait(responses)
            await asyncio.sleep(0)  # the loop itself lets go of the task now
            assert held() is None
    finally:
        gc.enable()


async def test_a_unary_call_goes_on_without_whoever_waited(encoder: ScriptedEncoder) -> None:
    async with grpc.aio.insecure_channel(encoder.target) as channel:
        call = EncoderServiceStub(channel).Release(pb.ReleaseRequest(), timeout=30)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await answer(call)
        await encoder.released.wait()


async def test_calls_that_are_left_keep_no_memory(mooncake_server: ServerProcess) -> None:
    draws = random.Random(7)
    item = image(photo(56, 56))

    async def encode(client: EncoderClient) -> None:
        async with client.encode([item], skip_layout=True, lease_ttl=1) as call:
            async for _ in call:
                pass

    async def ask(client: EncoderClient) -> None:
        await client.server_info()

    async def caller(client: EncoderClient, numbers: Iterator[int]) -> None:
        for number in numbers:
            try:
                # From at once to when the answer has just come.
                async with asyncio.timeout(draws.uniform(0, 0.02)):
                    await (encode, ask)[number % 2](client)
            except TimeoutError:
                pass

    async def leave(client: EncoderClient, calls: int) -> None:
        numbers = iter(range(calls))
        await asyncio.gather(*(caller(client, numbers) for _ in range(16)))
        await client.server_info()

    async with EncoderClient(mooncake_server.target) as client:
        await leave(client, CALLS)
        grown = []
        for _ in range(WINDOWS):
            before = malloc_bytes_in_use()
            await leave(client, CALLS)
            grown.append(malloc_bytes_in_use() - before)
    # What the process takes once, such as a larger table of names, is in one of them only.
    assert min(grown) / CALLS < MOST_BYTES


class _MallInfo(ctypes.Structure):
    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"  # malloc.h
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def malloc_bytes_in_use() -> int:
    """What malloc has given out and not got back: nothing of Python's small objects, all of gRPC's."""
    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is None:
        pytest.skip("only glibc tells what is in use")
    function.restype = _MallInfo
    gc.collect()
    info = function()
    return int(info.uordblks + info.hblkhd)
