"""How leases are given back: at once without load, many in one call with it, and behind who does not wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest

from encoder_client.errors import EncoderError
from encoder_client.releases import MOST_UNREAD, ReleaseBatcher, Releases
from encoder_client.stub import EncoderStub
from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.encoder_service_pb2 import LEASE_STATE_HELD, READ_OUTCOME_ABANDONED, READ_OUTCOME_OK
from tests.client.scripted_encoder import ScriptedEncoder
from tests.waiting import PATIENCE_SECONDS, eventually


class SlowEncoder(ScriptedEncoder):
    """Answers ``Release`` when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[bytes]] = []
        self.answers = asyncio.Semaphore(0)

    async def Release(  # noqa: N802 # the name of the call
        self, request: pb.ReleaseRequest, context: Any
    ) -> pb.ReleaseResponse:
        self.calls.append([lease.lease_id for lease in request.leases])
        await self.answers.acquire()
        return await super().Release(request, context)


@pytest.fixture
async def encoder() -> AsyncIterator[SlowEncoder]:
    slow = SlowEncoder()
    async with slow.serve():
        yield slow


@pytest.fixture
async def channel(encoder: SlowEncoder) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(encoder.target) as channel:
        yield channel


@pytest.fixture
async def releases(channel: grpc.aio.Channel) -> ReleaseBatcher:
    return ReleaseBatcher(EncoderStub(channel), channel, timeout=60.0)


async def test_what_ends_during_a_call_goes_together_in_the_next(
    encoder: SlowEncoder, releases: ReleaseBatcher
) -> None:
    names = [b"%d" % number for number in range(20)]
    first = asyncio.create_task(releases.release(names[0], READ_OUTCOME_OK))
    await eventually(lambda: bool(encoder.calls))
    assert encoder.calls == [names[:1]]
    others = [asyncio.create_task(releases.release(name, READ_OUTCOME_OK)) for name in names[1:]]
    await asyncio.sleep(0)
    encoder.answers.release()
    assert await first == LEASE_STATE_HELD
    encoder.answers.release()
    assert await asyncio.gather(*others) == [LEASE_STATE_HELD] * 19
    assert encoder.calls == [names[:1], names[1:]]


async def test_closing_sends_what_waits_for_a_call(encoder: SlowEncoder, releases: ReleaseBatcher) -> None:
    tasks = [asyncio.create_task(releases.release(b"a", READ_OUTCOME_OK))]
    await eventually(lambda: bool(encoder.calls))
    tasks.append(asyncio.create_task(releases.release(b"b", READ_OUTCOME_OK)))
    await asyncio.sleep(0)
    encoder.answers.release()
    encoder.answers.release()
    await releases.close()
    assert encoder.calls == [[b"a"], [b"b"]]
    assert await asyncio.gather(*tasks) == [LEASE_STATE_HELD] * 2


async def test_closing_does_not_wait_for_who_goes_on_giving_back(
    encoder: SlowEncoder, releases: ReleaseBatcher
) -> None:
    """Prompts that run when a client is closed, since another one failed, must not hold its end up."""

    async def go_on() -> None:
        while True:
            encoder.answers.release()
            await releases.release(b"a", READ_OUTCOME_OK)

    others = [asyncio.create_task(go_on()) for _ in range(3)]
    await eventually(lambda: len(encoder.calls) > 1)
    await asyncio.wait_for(releases.close(), PATIENCE_SECONDS)
    for other in others:
        other.cancel()
    await asyncio.wait(others)


async def test_a_channel_that_is_closed_meanwhile_is_an_error_of_the_release(
    encoder: SlowEncoder, channel: grpc.aio.Channel, releases: ReleaseBatcher
) -> None:
    """Nobody was cancelled. A read that ended so would be one that nobody waits for."""
    released = asyncio.create_task(releases.release(b"a", READ_OUTCOME_OK))
    await eventually(lambda: bool(encoder.calls))
    later = asyncio.create_task(releases.release(b"b", READ_OUTCOME_OK))
    await asyncio.sleep(0)
    await channel.close(None)
    with pytest.raises(EncoderError, match="CANCELLED"):
        await released
    with pytest.raises(EncoderError, match="CANCELLED: the lease was not given back"):
        await later


async def test_a_server_that_stands_still_gets_unread_leases_back_when_it_goes_on(
    encoder: SlowEncoder, channel: grpc.aio.Channel
) -> None:
    """Who lets go of them goes on meanwhile, and a read that wants its answer does not wait for them."""
    releases = Releases(EncoderStub(channel), channel, timeout=60.0)
    await releases.give_back(b"a", READ_OUTCOME_ABANDONED)
    assert encoder.calls == [[b"a"]]
    assert not encoder.given_back
    read = asyncio.create_task(releases.confirm(b"b", READ_OUTCOME_OK))
    await eventually(lambda: encoder.calls == [[b"a"], [b"b"]])
    encoder.answers.release()
    encoder.answers.release()
    assert await read == LEASE_STATE_HELD
    await eventually(lambda: encoder.given_back == {b"a", b"b"})
    await releases.close()


async def test_unread_leases_that_wait_are_bounded_and_end_with_the_client(
    encoder: SlowEncoder, channel: grpc.aio.Channel, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "encoder_client")
    releases = Releases(EncoderStub(channel), channel, timeout=0.1)
    others = asyncio.all_tasks()
    leases = [b"%d" % number for number in range(MOST_UNREAD + 1)]
    await asyncio.gather(*(releases.give_back(lease, READ_OUTCOME_ABANDONED) for lease in leases))
    assert "too many are on their way" in caplog.text
    assert leases[-1] not in {lease for call in encoder.calls for lease in call}
    await asyncio.wait_for(releases.close(), PATIENCE_SECONDS)
    await channel.close(None)
    await eventually(lambda: not client_tasks(others))


def client_tasks(others: set[asyncio.Task[Any]]) -> list[asyncio.Task[Any]]:
    """Those that are not gRPC's own, and were not there before."""
    return [task for task in asyncio.all_tasks() - others if "encoder_client" in str(task.get_coro())]


async def test_a_server_that_is_gone_confirms_nothing_and_is_not_waited_for() -> None:
    """Its leases went with it. Whoever wants the embedding gets it elsewhere, as soon as he knows."""
    encoder = SlowEncoder()
    async with AsyncExitStack() as serving:
        target = await serving.enter_async_context(encoder.serve())
        async with grpc.aio.insecure_channel(target) as channel:
            releases = Releases(EncoderStub(channel), channel, timeout=3600.0)
            read = asyncio.create_task(releases.confirm(b"a", READ_OUTCOME_OK))
            await eventually(lambda: bool(encoder.calls))
            await serving.aclose()
            with pytest.raises(EncoderError, match="UNAVAILABLE"):
                await asyncio.wait_for(read, PATIENCE_SECONDS)


async def test_a_server_that_was_given_up_is_not_waited_for(encoder: SlowEncoder, channel: grpc.aio.Channel) -> None:
    releases = Releases(EncoderStub(channel), channel, timeout=3600.0)
    reads = [asyncio.create_task(releases.confirm(b"a", READ_OUTCOME_OK))]
    await eventually(lambda: bool(encoder.calls))
    reads.append(asyncio.create_task(releases.confirm(b"b", READ_OUTCOME_OK)))
    await asyncio.sleep(0)
    releases.give_up()
    for read in reads:
        with pytest.raises(EncoderError, match="given"):
            await asyncio.wait_for(read, PATIENCE_SECONDS)
