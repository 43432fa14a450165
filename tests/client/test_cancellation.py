"""Waits for gRPC that are cancelled: they lose nothing, and leave no memory behind."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import random
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from typing import Any, Self

import grpc
import pytest

from encoder_client import EncoderClient, cancellation, image
from encoder_client.cancellation import Responses, answer, take_all
from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.encoder_service_pb2_grpc import EncoderServiceStub
from tests.client.scripted_encoder import ScriptedEncoder
from tests.photograph import photo
from tests.server_process import ServerProcess
from tests.waiting import eventually

WINDOWS, CALLS = 5, 600
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
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await other
        assert caught.value.code() is grpc.StatusCode.CANCELLED


async def test_a_call_whose_channel_is_closed_fails_and_cancels_nobody(encoder: ScriptedEncoder) -> None:
    """Whoever waits was not cancelled: a task that ended so would be taken for one that nobody waits for."""
    encoder.hang = True
    channel = grpc.aio.insecure_channel(encoder.target)
    stub = EncoderServiceStub(channel)
    responses = Responses[pb.EncodeResponse](stub.Encode(pb.EncodeRequest()))
    await anext(responses)
    await anext(responses)
    waits = [
        asyncio.create_task(asyncio.wait_for(anext(responses), 30)),
        asyncio.create_task(asyncio.wait_for(answer(stub.Cancel(pb.CancelRequest(), timeout=30)), 30)),
    ]
    await encoder.asked_to_cancel.wait()
    await channel.close(None)
    ended = await asyncio.gather(*waits, return_exceptions=True)
    assert [error.code() for error in ended if isinstance(error, grpc.aio.AioRpcError)] == [
        grpc.StatusCode.CANCELLED
    ] * 2


async def test_what_fails_when_nobody_waits_any_more_is_no_error_of_the_loop(encoder: ScriptedEncoder) -> None:
    heard: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: heard.append(context))
    async with grpc.aio.insecure_channel(encoder.target) as channel:
        stub = EncoderServiceStub(channel)
        encoder.release_failures = 1
        call = stub.Release(pb.ReleaseRequest(), timeout=30)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await answer(call)
        await eventually(call.done)
        del call
        await answer(stub.Release(pb.ReleaseRequest(), timeout=30))
    gc.collect()
    assert not heard


async def test_all_responses_are_taken_until_nobody_waits(encoder: ScriptedEncoder) -> None:
    async with grpc.aio.insecure_channel(encoder.target) as channel:
        stub = EncoderServiceStub(channel)
        seen: list[pb.EncodeResponse] = []
        await take_all(stub.Encode(pb.EncodeRequest()), seen.append)
        assert [len(response.events) for response in seen] == [1, 0, 1]

        encoder.hang = True
        encoder.ended.clear()
        seen.clear()
        wait = asyncio.create_task(take_all(stub.Encode(pb.EncodeRequest()), seen.append))
        await eventually(lambda: len(seen) == 2)
        wait.cancel()
        await asyncio.wait([wait])
        assert wait.cancelled()
        await encoder.ended.wait()
        assert len(seen) == 2


async def test_what_cannot_be_taken_ends_the_call(encoder: ScriptedEncoder) -> None:
    encoder.hang = True

    def refuse(_: pb.EncodeResponse) -> None:
        raise ValueError("no room")

    async with grpc.aio.insecure_channel(encoder.target) as channel:
        with pytest.raises(ValueError, match="no room"):
            await take_all(EncoderServiceStub(channel).Encode(pb.EncodeRequest()), refuse)
        await encoder.ended.wait()


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
            await eventually(lambda: held() is None)  # the loop itself lets go of the task first
    finally:
        gc.enable()


async def test_a_unary_call_goes_on_without_whoever_waited(encoder: ScriptedEncoder) -> None:
    async with grpc.aio.insecure_channel(encoder.target) as channel:
        call = EncoderServiceStub(channel).Release(pb.ReleaseRequest(), timeout=30)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await answer(call)
        await encoder.released.wait()


class CallWithoutEnd:
    """A call that gRPC forgot: no real one can be made to do so. Its deadline has passed."""

    def time_remaining(self) -> float:
        return 0.0

    def __await__(self) -> Generator[Any, None, bool]:
        return asyncio.Event().wait().__await__()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> pb.EncodeResponse:
        await self
        raise AssertionError


@pytest.mark.parametrize("wait", [answer, lambda call: anext(Responses(call))])
async def test_nobody_waits_for_ever_for_a_call_that_grpc_does_not_end(
    wait: Callable[[Any], Awaitable[Any]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cancellation, "LATE_SECONDS", 0.01)
    with pytest.raises(grpc.aio.AioRpcError, match="did not end at its deadline") as caught:
        await wait(CallWithoutEnd())
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "did not end a call" in caplog.text


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
