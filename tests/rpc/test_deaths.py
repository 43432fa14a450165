"""kill -9 of everything, one after another: the front answers throughout, each part ends once, nothing stays held."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import psutil
import pytest

from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.encoder_service_pb2_grpc import EncoderServiceStub
from tests.conftest import servers
from tests.photograph import photo
from tests.rpc.calls import (
    NARROW,
    PHOTO,
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
from tests.rpc.statuses import reason_of, retry_of
from tests.server_process import START_SECONDS, ServerProcess
from tests.waiting import eventually

RECEIVER = Path(__file__).with_name("receiver_process.py")


@pytest.fixture(scope="module")
def mortal(tiny_checkpoint: Path) -> Iterator[ServerProcess]:
    """A server whose processes are killed."""
    with servers(tiny_checkpoint) as start:
        yield start()


@pytest.fixture
async def stub(mortal: ServerProcess) -> AsyncIterator[Any]:
    async with calls_to(mortal) as stub:
        yield stub
        await eventually(lambda: is_ready(mortal), START_SECONDS)
        events = await encode(stub)
        assert kinds(events) == ["accepted", "layout", "ready", "complete"]
        await release(stub, *ready_chunks(events))
    await eventually(lambda: is_idle(mortal))


async def is_ready(server: ServerProcess) -> bool:
    """The engine and the media worker take work."""
    async with calls_to(server) as stub:
        # A request that the media worker refuses on sight goes all the way but through the tower.
        info = await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=SECONDS)
        if info.engines[0].state != pb.ENGINE_STATE_READY:
            return False
        try:
            (failed,) = failures(await encode(stub, image(data=b"not an image")))
        except grpc.aio.AioRpcError:
            return False
        return reason_of(failed) == "MEDIA_UNRECOGNIZED"


async def answers_throughout(server: ServerProcess, done: asyncio.Event) -> int:
    """Asks the front again and again until ``done``; returns how often it answered."""
    answers = 0
    async with calls_to(server) as stub:
        while not done.is_set():
            await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=SECONDS)
            answers += 1
    return answers


async def ends_once(call: Any, parts: int) -> list[pb.Event]:
    """Reads a call to its end; each of its parts has exactly one."""
    events = await events_of(call)
    assert "part_cancelled" not in kinds(events)
    ends = [chunk.part_idx for chunk in ready_chunks(events)] + [failed.part_idx for failed in failures(events)]
    assert sorted(ends) == list(range(parts))
    assert kinds(events)[-1] == "complete"
    return events


async def test_f29_kill_of_the_media_worker_during_a_decode(stub: Any, mortal: ServerProcess) -> None:
    done = asyncio.Event()
    asking = asyncio.create_task(answers_throughout(mortal, done))
    worker = mortal.media_worker()
    with mortal.held(worker):
        call = stub.Encode(encode_request(*map(image, range(3))), timeout=START_SECONDS)
        await call.read()

        async def one_is_preparing() -> bool:
            return (await mortal.info()).load.parts["preparing"] > 0

        await eventually(one_is_preparing)
        worker.kill()
    events = await ends_once(call, parts=3)
    assert {reason_of(failed) for failed in failures(events)} == {"MEDIA_WORKER_LOST"}
    assert retry_of(failures(events)[0]) == 1.0
    await release(stub, *ready_chunks(events))
    await eventually(lambda: is_ready(mortal), START_SECONDS)
    done.set()
    assert await asking > 0
    assert (await mortal.info()).load.media_worker_restarts >= 1


async def test_f29_kill_of_the_engine_during_a_forward(stub: Any, mortal: ServerProcess) -> None:
    done = asyncio.Event()
    asking = asyncio.create_task(answers_throughout(mortal, done))
    leased = ready_chunks(await encode(stub))
    engine = mortal.engine()
    boot_id = (await mortal.info()).engines[0].boot_id
    with mortal.held(engine):
        call = stub.Encode(encode_request(*map(image, range(3))), timeout=START_SECONDS)
        await call.read()

        async def one_is_encoding() -> bool:
            return (await mortal.info()).load.parts["encoding"] > 0

        await eventually(one_is_encoding)
        engine.kill()
    events = await ends_once(call, parts=3)
    assert {reason_of(failed) for failed in failures(events)} <= {"ENGINE_LOST"}
    await release(stub, *ready_chunks(events))
    # What it had given out before is gone with it.
    assert await release(stub, *leased) == [pb.LEASE_STATE_REVOKED]
    await eventually(lambda: is_ready(mortal), START_SECONDS)
    done.set()
    assert await asking > 0
    engine_info = (await mortal.info()).engines[0]
    assert (engine_info.restarts >= 1, engine_info.leased_bytes, engine_info.reserved_bytes) == (True, 0, 0)
    assert engine_info.boot_id != boot_id


async def test_f10_what_a_caller_that_reads_nothing_was_not_told_is_given_back_when_it_goes(
    stub: Any, mortal: ServerProcess
) -> None:
    """A part becomes READY behind a message that gRPC cannot write: the call ends, and nobody knows that lease."""
    use, many = pb.CACHE_POLICY_USE, 8  # as many as are hashed at once, and so told at once
    await release(stub, *ready_chunks(await encode(stub, cache_policy=use)))

    async def leases() -> int:
        return (await mortal.info()).load.leases

    async with grpc.aio.insecure_channel(mortal.target, options=NARROW) as channel:
        other: Any = EncoderServiceStub(channel)
        items = [image(part) for part in range(many)]
        with mortal.held(mortal.engine()):
            call = other.Encode(encode_request(*items, image(many, photo(56, 56)), cache_policy=use), timeout=SECONDS)
            await eventually(lambda: is_now(leases, many))
        await eventually(lambda: is_now(leases, many + 1))
        call.cancel()
        # What was given to gRPC may be on its way to the caller, and stays.
        await eventually(lambda: is_now(leases, many))
    mortal.engine().kill()


async def is_now(count: Callable[[], Awaitable[int]], number: int) -> bool:
    """What is counted is so many."""
    return await count() == number


async def test_f10_kill_of_the_receiver_during_a_read(stub: Any, mortal: ServerProcess, tmp_path: Path) -> None:
    file = tmp_path / "photo.jpg"
    file.write_bytes(PHOTO)
    receiver = psutil.Popen(
        [sys.executable, RECEIVER, mortal.target, file],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        line = await asyncio.to_thread(receiver.stdout.readline)
        assert line == "reading\n"
        assert (await mortal.info()).engines[0].leased_bytes > 0
    finally:
        receiver.kill()
        receiver.wait()
        receiver.stdout.close()

    async def nothing_is_leased() -> bool:
        return (await mortal.info()).engines[0].leased_bytes == 0

    await eventually(nothing_is_leased)


async def test_kill_of_the_front_leaves_nothing(mortal: ServerProcess) -> None:
    # The last test of this mortal.
    children = mortal.children()
    assert len(children) == 2
    # One of them cannot even run to notice.
    with mortal.held(mortal.engine()):
        # stop() fails if a child is alive a moment later.
        assert mortal.stop(signal.SIGKILL) == -signal.SIGKILL
    assert not any(child.is_running() for child in children)
