"""Named receivers against real servers: before and after the call, in processes that die, over broken connections."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc
import numpy as np
import pytest

from encoder_client import (
    ClientSettings,
    Embedding,
    EmbeddingPool,
    EncoderClient,
    EncoderError,
    Layout,
    LeaseRevoked,
    PartCancelled,
    PartFailed,
    ReadError,
    Ready,
    Subscription,
    SubscriptionEvent,
    Synced,
    image,
)
from encoder_client.subscriptions import subscription as subscription_module
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2 import CachePolicy
from tests.conftest import StartServer
from tests.cutting_proxy import cutting_proxy
from tests.photograph import photo
from tests.server_process import START_SECONDS, ServerProcess
from tests.waiting import eventually

PARTY = Path(__file__).with_name("party_process.py")
ITEM = image(photo(140, 112))
SECONDS = START_SECONDS
"""Longer than anything here takes."""
BYPASS = CachePolicy.CACHE_POLICY_BYPASS


@pytest.fixture
def server(mooncake_server: ServerProcess) -> ServerProcess:
    return mooncake_server


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A receiver of the test's own."""
    return str(request.node.name)


@asynccontextmanager
async def receiver(
    target: str, name: str, incarnation: int = 1, patience: float | None = SECONDS
) -> AsyncIterator[tuple[EncoderClient, Subscription]]:
    """A subscribed receiver."""
    async with (
        EncoderClient(target, ClientSettings(receiver=name, transports=("inline",))) as client,
        client.subscribe(incarnation=incarnation, patience=patience) as subscription,
    ):
        yield client, subscription


async def following(subscription: Subscription, *kinds: type) -> SubscriptionEvent:
    """The next event, which must be of the given kinds."""
    async with asyncio.timeout(SECONDS):
        event = await anext(aiter(subscription))
    assert isinstance(event, kinds or (object,)), event
    return event


async def ready_of(subscription: Subscription) -> EmbeddingChunk:
    """The next READY chunk, behind its LAYOUT."""
    await following(subscription, Layout)
    event = await following(subscription, Ready)
    assert isinstance(event, Ready)
    return event.chunk


async def encode(target: str, receivers: Sequence[str], prompt_id: str = "p", lease_ttl: float | None = None) -> None:
    """What a router does: it encodes for receivers, and sees no tensor."""
    async with (
        EncoderClient(target, ClientSettings(transports=("inline",))) as caller,
        caller.encode(
            [ITEM], prompt_id=prompt_id, receivers=receivers, cache_policy=BYPASS, lease_ttl=lease_ttl
        ) as call,
    ):
        assert [type(event).__name__ async for event in call][-1] == "Complete"


async def leases_of(server: ServerProcess) -> int:
    """Live leases."""
    return (await server.info()).load.leases


async def is_empty(server: ServerProcess) -> bool:
    """Nothing is leased, nothing runs, and no receiver has anything to read."""
    info = await server.info()
    return (info.load.requests, info.load.leases, info.engines[0].leased_bytes) == (0, 0, 0)


class Party:
    """A process of ``party_process.py``."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, PARTY, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    async def line(self) -> list[str]:
        """The next line that it says, in words."""
        assert self.process.stdout is not None
        async with asyncio.timeout(SECONDS):
            return (await asyncio.to_thread(self.process.stdout.readline)).split()

    def kill(self) -> None:
        """It dies without a word."""
        self.process.kill()
        self.process.wait()


@pytest.fixture
def start_party() -> Iterator[Callable[..., Party]]:
    """Starts processes; they are gone when the test ends."""
    parties: list[Party] = []

    def start(*arguments: object) -> Party:
        parties.append(Party(*arguments))
        return parties[-1]

    yield start
    for party in parties:
        party.kill()
        for pipe in (party.process.stdin, party.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_receiver_gets_its_parts_whether_it_comes_before_or_after_the_call(
    server: ServerProcess, name: str, when: str
) -> None:
    if when == "after":
        await encode(server.target, [name])
    async with receiver(server.target, name) as (client, subscription):
        if when == "before":
            assert await following(subscription) == Synced(0)
            await encode(server.target, [name])
        embedding = await client.read(await ready_of(subscription))
        assert np.isfinite(embedding.numpy()).all()
        if when == "after":
            assert await following(subscription) == Synced(1)
    await eventually(lambda: is_empty(server))


async def test_four_receivers_of_one_part_cost_one_encode_and_one_copy(server: ServerProcess) -> None:
    names = [f"lm/tp{rank}" for rank in range(4)]
    await eventually(lambda: is_empty(server))
    await eventually(lambda: no_subscription(server))
    before = await server.info()
    async with AsyncExitStack() as stack:
        ranks = [await stack.enter_async_context(receiver(server.target, name)) for name in names]
        for _, subscription in ranks:
            await following(subscription, Synced)
        await encode(server.target, names)
        chunks = [await ready_of(subscription) for _, subscription in ranks]
        info = await server.info()
        assert len({chunk.generation for chunk in chunks}) == 1
        assert info.engines[0].leased_bytes - before.engines[0].leased_bytes == chunks[0].nbytes
        assert info.load.leases == info.load.subscriptions == 4
        assert info.load.receiver_parts - before.load.receiver_parts == 4
        embeddings: list[Embedding] = []
        for (client, _), chunk in zip(ranks, chunks, strict=True):
            assert len(chunk.leases) == 1
            embeddings.append(await client.read(chunk))
        assert all((embedding.numpy() == embeddings[0].numpy()).all() for embedding in embeddings)
    await eventually(lambda: is_empty(server))


async def test_a_part_that_fails_is_told_to_its_receivers(server: ServerProcess, name: str) -> None:
    async with receiver(server.target, name) as (_, subscription), EncoderClient(server.target) as caller:
        await following(subscription, Synced)
        async with caller.encode([image(b"not an image")], prompt_id="bad", receivers=[name]) as call:
            assert [type(event).__name__ async for event in call] == ["Accepted", "PartFailed", "Complete"]
        failed = await following(subscription, PartFailed)
        assert isinstance(failed, PartFailed)
        assert (failed.prompt_id, failed.part_idx, failed.error.reason) == ("bad", 0, "MEDIA_UNRECOGNIZED")


async def test_a_caller_that_dies_after_accepted_leaves_no_receiver_waiting(
    server: ServerProcess, start_party: Callable[..., Party], tmp_path: Path, name: str
) -> None:
    file = tmp_path / "photo.jpg"
    file.write_bytes(photo(252, 196))
    async with receiver(server.target, name) as (_, subscription):
        await following(subscription, Synced)
        with server.held(server.engine()):
            caller = start_party("call", server.target, file, name)
            assert await caller.line() == ["accepted"]
            await following(subscription, Layout)
            caller.kill()
            cancelled = await following(subscription, PartCancelled)
            assert isinstance(cancelled, PartCancelled)
            assert cancelled.prompt_id == "killed"
    await eventually(lambda: is_empty(server))


async def test_a_receiver_dies_twice_holding_leases_and_others_never_notice(
    server: ServerProcess, start_party: Callable[..., Party]
) -> None:
    async with receiver(server.target, "other") as (client, subscription):
        await following(subscription, Synced)
        for life in (1, 2):
            holder = start_party("hold", server.target, "dies", life)
            assert (await holder.line())[0] == "Synced"
            await encode(server.target, ["dies", "other"], prompt_id=f"p{life}", lease_ttl=10.0)
            embedding = await client.read(await ready_of(subscription))
            assert np.isfinite(embedding.numpy()).all()
            while (await holder.line())[0] != "Ready":
                pass
            holder.kill()
        await eventually(lambda: is_empty(server))
        async with receiver(server.target, "dies", 3) as (third, again):
            assert await following(again) == Synced(0), "how they ended concerns no later life"
            await encode(server.target, ["dies"])
            await third.read(await ready_of(again))
    await eventually(lambda: is_empty(server))


async def test_a_newer_life_takes_over_and_the_older_one_is_told(
    server: ServerProcess, start_party: Callable[..., Party]
) -> None:
    old = start_party("hold", server.target, "lm-x", 5)
    assert (await old.line())[0] == "Synced"
    await encode(server.target, ["lm-x"])
    while (line := await old.line())[0] != "Ready":
        pass
    chunk = EmbeddingChunk.FromString(bytes.fromhex(line[1]))
    async with receiver(server.target, "lm-x", 6) as (client, subscription):
        assert await following(subscription) == Synced(0)
        assert await old.line() == [], "ABORTED ends it"
        assert old.process.wait(SECONDS) != 0
        with pytest.raises(ReadError):
            await client.read(chunk)
        async with receiver(server.target, "lm-x", 4) as (_, older):
            with pytest.raises(EncoderError) as refused:
                await anext(aiter(older))
        assert (refused.value.code, refused.value.reason) == (grpc.StatusCode.ABORTED, "SUBSCRIPTION_SUPERSEDED")
        assert await leases_of(server) == 0


async def test_over_a_lost_connection_nothing_is_missed_and_nothing_comes_twice(
    server: ServerProcess, name: str
) -> None:
    async with (
        cutting_proxy(server.target) as proxy,
        receiver(proxy.target, name) as (client, subscription),
    ):
        await following(subscription, Synced)
        await encode(server.target, [name], prompt_id="seen")
        seen = await ready_of(subscription)
        proxy.open = False
        proxy.cut()
        for number in range(3):
            await encode(server.target, [name], prompt_id=f"missed-{number}")
        proxy.open = True
        missed = [await ready_of(subscription) for _ in range(3)]
        assert sorted(chunk.prompt_id for chunk in missed) == [f"missed-{number}" for number in range(3)]
        assert await following(subscription) == Synced(4), "the one that was seen came again, and was left out"
        for chunk in (seen, *missed):
            assert np.isfinite((await client.read(chunk)).numpy()).all()
        assert proxy.connections > 1
    await eventually(lambda: is_empty(server))


async def test_a_receiver_that_stands_still_for_a_while_reads_on(
    server: ServerProcess, start_party: Callable[..., Party]
) -> None:
    holder = start_party("hold", server.target, "still", 1)
    assert (await holder.line())[0] == "Synced"
    holder.process.send_signal(signal.SIGSTOP)
    await encode(server.target, ["still"], prompt_id="a", lease_ttl=1.0)
    await encode(server.target, ["still"], prompt_id="b")
    holder.process.send_signal(signal.SIGCONT)
    read = 0
    while read < 2:  # among them, on a slow machine, that the short lease has ended
        read += (await holder.line())[0] == "Ready"
    holder.kill()
    # The next life takes the leases of the one that died.
    async with receiver(server.target, "still", 2) as (_, subscription):
        await following(subscription, Synced)
        assert await leases_of(server) == 0


async def test_an_engine_that_dies_takes_the_leases_and_the_receivers_are_told(start_server: StartServer) -> None:
    server = start_server()
    async with receiver(server.target, "lm") as (client, subscription):
        await following(subscription, Synced)
        await encode(server.target, ["lm"])
        chunk = await ready_of(subscription)
        server.engine().kill()
        revoked = await following(subscription, LeaseRevoked)
        assert isinstance(revoked, LeaseRevoked)
        assert (revoked.prompt_id, revoked.request_id, revoked.error.reason) == ("p", chunk.request_id, "LEASE_REVOKED")
        with pytest.raises(ReadError):
            await client.read(chunk)


async def test_a_drain_tells_receivers_all_and_then_ends_their_subscriptions(start_server: StartServer) -> None:
    server = start_server(drain_seconds=60)
    async with receiver(server.target, "lm", patience=0) as (client, subscription):
        await following(subscription, Synced)
        with server.held(server.engine()):
            router = asyncio.create_task(encode(server.target, ["lm"]))
            await following(subscription, Layout)
            server.process.send_signal(signal.SIGTERM)
            await eventually(lambda: "stopping:" in server.stdout)
        event = await following(subscription, Ready)
        await router
        assert isinstance(event, Ready)
        assert server.process.poll() is None, "it waits for who has not read"
        await client.read(event.chunk)
        with pytest.raises(EncoderError) as ended:
            await anext(aiter(subscription))
        assert (ended.value.code, ended.value.reason) == (grpc.StatusCode.UNAVAILABLE, "SHUTTING_DOWN")
        assert server.stop() == 0


async def test_a_part_that_died_with_its_server_fails_when_the_next_one_answers(start_server: StartServer) -> None:
    first = start_server()
    async with cutting_proxy(first.target) as proxy, receiver(proxy.target, "lm") as (_, subscription):
        await following(subscription, Synced)
        with first.held(first.engine()):
            router = asyncio.create_task(encode(first.target, ["lm"], prompt_id="lost"))
            await following(subscription, Layout)
            first.process.kill()
        with pytest.raises(EncoderError):
            await router
        second = start_server()
        proxy.move(second.target)
        failed = await following(subscription, PartFailed)
        assert isinstance(failed, PartFailed)
        assert (failed.prompt_id, failed.error.code) == ("lost", grpc.StatusCode.UNAVAILABLE)
        await following(subscription, Synced)


async def test_f39_a_receiver_that_never_reads_costs_a_bounded_number_of_parts(
    start_server: StartServer, start_party: Callable[..., Party]
) -> None:
    server = start_server(max_receiver_parts=8)
    holder = start_party("hold", server.target, "slow", 1)
    assert (await holder.line())[0] == "Synced"
    holder.process.send_signal(signal.SIGSTOP)
    refusals: list[EncoderError] = []
    for number in range(20):
        try:
            await encode(server.target, ["slow"], prompt_id=f"p{number}")
        except EncoderError as error:
            refusals.append(error)
        assert (await server.info()).load.receiver_parts <= 8
    assert {(error.code, error.reason) for error in refusals} == {(grpc.StatusCode.RESOURCE_EXHAUSTED, "RECEIVER_FULL")}
    assert len(refusals) == 12
    assert all(error.retry_after for error in refusals)
    await encode(server.target, ["another"])


async def test_a_serialised_chunk_is_redeemed_by_a_third_process(
    server: ServerProcess, start_party: Callable[..., Party]
) -> None:
    third = start_party("redeem", "lm-third")
    async with receiver(server.target, "lm-third") as (client, subscription):
        await following(subscription, Synced)
        await encode(server.target, ["lm-third"], prompt_id="one")
        await encode(server.target, ["lm-third"], prompt_id="two")
        mine = await client.read(await ready_of(subscription))
        chunk = await ready_of(subscription)
        assert third.process.stdin is not None
        third.process.stdin.write(chunk.SerializeToString().hex() + "\n")
        third.process.stdin.flush()
        (data,) = await third.line()
        assert bytes.fromhex(data) == mine.numpy().tobytes()
        assert await leases_of(server) == 0


async def test_what_a_full_pool_made_a_receiver_ask_for_again_is_not_told_as_something_new(
    server: ServerProcess, name: str
) -> None:
    pool = EmbeddingPool(1 << 20, patience=0.05)
    async with (
        EncoderClient(server.target, ClientSettings(receiver=name, transports=("inline",)), pool=pool) as client,
        client.subscribe() as subscription,
        EncoderClient(server.target, ClientSettings(transports=("inline",))) as router,
    ):
        await following(subscription, Synced)
        async with router.encode([ITEM], prompt_id="waits", receivers=[name]) as call:
            assert [type(event).__name__ async for event in call][-1] == "Complete"
        chunk = await ready_of(subscription)
        async with await pool.reserve("before", [1 << 20]):
            read = asyncio.create_task(client.read(chunk))
            await eventually(lambda: is_empty(server))
        assert np.isfinite((await read).numpy()).all()
        await encode(server.target, [name], prompt_id="next")
        following_chunk = await ready_of(subscription)
        assert following_chunk.prompt_id == "next"
        await client.abandon([following_chunk])


async def test_a_client_without_a_name_cannot_subscribe(server: ServerProcess) -> None:
    async with EncoderClient(server.target) as client:
        with pytest.raises(ValueError, match="give ClientSettings a receiver"):
            client.subscribe()


async def test_without_a_server_patience_ends() -> None:
    async with receiver("127.0.0.1:1", "lm", patience=0.2) as (_, subscription):
        with pytest.raises(EncoderError) as ended:
            await following(subscription)
    assert ended.value.code is grpc.StatusCode.UNAVAILABLE


async def test_leaving_ends_a_wait_in_another_task(server: ServerProcess) -> None:
    async with receiver(server.target, "lm-leaves") as (_, subscription):
        await following(subscription, Synced)
        waiting = asyncio.create_task(following(subscription))
        await asyncio.sleep(0)
    with pytest.raises((asyncio.CancelledError, EncoderError, StopAsyncIteration)):
        await waiting
    await eventually(lambda: no_subscription(server))


async def test_leaving_ends_a_pause_between_two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    paused = asyncio.Event()

    def longest(_: float, most: float) -> float:
        paused.set()
        return most

    monkeypatch.setattr(subscription_module, "FIRST_PAUSE", 1e6)
    monkeypatch.setattr(random, "uniform", longest)
    async with receiver("127.0.0.1:1", "lm", patience=None) as (_, subscription):
        waiting = asyncio.create_task(following(subscription))
        await paused.wait()
    with pytest.raises(EncoderError):
        await waiting


async def no_subscription(server: ServerProcess) -> bool:
    """Nobody listens."""
    return (await server.info()).load.subscriptions == 0
