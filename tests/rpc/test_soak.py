"""Thousands of requests, a fifth of them cancelled, beside a stream that says nothing: nothing is left or grows."""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.encoder_service_pb2_grpc import EncoderServiceStub
from tests.photograph import photo
from tests.rpc.calls import SECONDS, calls_to, encode, encode_request, events_of, image, is_idle, ready_chunks, release
from tests.server_process import ServerProcess
from tests.waiting import eventually

REQUESTS = 5_000
"""Of a round."""
MOST_ROUNDS = 6
AT_ONCE = 24
CANCELLED = 0.2
PHOTO = photo(56, 56)
MOST_GROWTH = {"front": 200 * REQUESTS, "engine": 32 << 20, "media worker": 32 << 20}
"""Bytes that a process may grow by in a round. An empty grpc.aio server shows 20 to 60 a request; torch keeps something
for each new shape of a batch, and here all are new to it."""

PING_SECONDS = 6.0
"""Between two pings of a client. The server takes one every 5 s, and closes the connection after the second that comes
sooner."""
PINGS = 3


class IdleStream:
    """A stream on a connection of its own that pings, in a thread.

    Args:
        target: the server.
        begin: begins the stream on a channel.
    """

    def __init__(self, target: str, begin: Callable[[grpc.Channel], Any]) -> None:
        options = [
            ("grpc.keepalive_time_ms", int(PING_SECONDS * 1000)),
            ("grpc.keepalive_timeout_ms", 60_000),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        self.begin = time.monotonic()
        self.seen: list[Any] = []
        self.error: grpc.RpcError | None = None
        self._channel = grpc.insecure_channel(target, options)
        self._stream = begin(self._channel)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def open(self) -> bool:
        """It has not ended."""
        return self._thread.is_alive()

    def close(self) -> None:
        self._stream.cancel()
        self._thread.join()
        self._channel.close()

    def _read(self) -> None:
        try:
            self.seen.extend(self._stream)
        except grpc.RpcError as error:
            self.error = error


@pytest.fixture(scope="module")
def idle_stream(server: ServerProcess) -> Iterator[IdleStream]:
    """A health watch that is idle throughout this file."""
    stream = IdleStream(server.target, lambda channel: HealthStub(channel).Watch(HealthCheckRequest()))
    yield stream
    stream.close()


@pytest.fixture(scope="module")
def idle_subscription(server: ServerProcess) -> Iterator[IdleStream]:
    """A subscription to which nothing is addressed throughout this file."""
    stub: Any = EncoderServiceStub
    request = pb.SubscribeRequest(receiver_id="idle")
    stream = IdleStream(server.target, lambda channel: stub(channel).Subscribe(request))
    yield stream
    stream.close()


def resident_bytes(server: ServerProcess) -> dict[str, int]:
    """The memory of each process that is its own."""
    processes = {"front": server.process, "engine": server.engine(), "media worker": server.media_worker()}
    return {
        name: memory.rss - memory.shared
        for name, memory in ((name, psutil.Process(process.pid).memory_info()) for name, process in processes.items())
    }


@pytest.mark.slow
async def test_f10_f27_thousands_of_requests_leave_nothing(
    server: ServerProcess, idle_stream: IdleStream, idle_subscription: IdleStream
) -> None:
    await eventually(lambda: is_idle(server))
    restarts, logged = (await server.info()).engines[0].restarts, len(server.stderr)
    choice = random.Random(11)
    fields: dict[str, Any] = {"cache_policy": pb.CACHE_POLICY_USE, "cache_salt": secrets.token_bytes(16)}
    request = encode_request(image(data=PHOTO), **fields)
    done: Counter[str] = Counter()

    async with calls_to(server) as stub:
        await release(stub, *ready_chunks(await encode(stub, image(data=PHOTO), **fields)))

        async def read(_: int) -> None:
            chunks = ready_chunks(await events_of(stub.Encode(request, timeout=SECONDS)))
            done["ready"] += len(chunks)
            assert await release(stub, *chunks) == [pb.LEASE_STATE_HELD]

        async def leave(number: int) -> None:
            # Past the cache, so that it is somewhere on its way when the caller leaves, and just may be READY.
            call = stub.Encode(encode_request(image(data=PHOTO), lease_ttl={"seconds": 1}))
            if number % 2:
                await call.read()
            else:
                await asyncio.sleep(0)
            call.cancel()
            done["left"] += 1

        async def work(numbers: Iterator[int]) -> None:
            for number in numbers:
                await (leave if choice.random() < CANCELLED else read)(number)

        async def round_of_requests() -> dict[str, int]:
            numbers = iter(range(REQUESTS))
            await asyncio.gather(*(work(numbers) for _ in range(AT_ONCE)))
            await eventually(lambda: is_idle(server))
            return resident_bytes(server)

        # What a process takes once, for its caches and pools, it takes in the first rounds; a leak grows in each.
        growing, rounds = set(MOST_GROWTH), 1
        before = await round_of_requests()
        while growing and rounds < MOST_ROUNDS:
            after = await round_of_requests()
            grown = {name: after[name] - before[name] for name in after}
            print(f"{dict(done)}; bytes that processes grew by in round {rounds}: {grown}")
            growing = {name for name in growing if grown[name] > MOST_GROWTH[name]}
            before, rounds = after, rounds + 1
    assert not growing, "grew in every round"
    assert done.total() == rounds * REQUESTS
    assert done["ready"] > done.total() * 0.7
    assert (await server.info()).engines[0].restarts == restarts
    for word in ("Traceback", "unexpected error", "ERROR"):
        assert word not in server.stderr[logged:]


async def pings_have_passed(stream: IdleStream) -> None:
    """Waits for them; the stream is still there."""

    def passed() -> bool:
        return not stream.open or time.monotonic() - stream.begin > (PINGS + 0.5) * PING_SECONDS

    await eventually(passed, 60)
    assert stream.open, stream.error


async def test_f28_an_idle_stream_outlives_pings(idle_stream: IdleStream, idle_subscription: IdleStream) -> None:
    await pings_have_passed(idle_stream)
    assert [answer.status for answer in idle_stream.seen] == [HealthCheckResponse.SERVING]


async def test_f28_an_idle_subscription_outlives_pings(idle_subscription: IdleStream) -> None:
    await pings_have_passed(idle_subscription)
    assert idle_subscription.seen == [pb.SubscribeResponse(synced=pb.Synced(events=0))]
