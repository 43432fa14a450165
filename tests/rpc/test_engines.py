"""Two engines and two media workers, killed again and again under load."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from epd.encoder.v1 import encoder_service_pb2 as pb
from tests.conftest import servers
from tests.rpc.calls import (
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
from tests.rpc.statuses import reason_of
from tests.server_process import START_SECONDS, ServerProcess
from tests.waiting import eventually

AT_ONCE = 6
ROUNDS = 5
"""In each of which both engines die."""


@pytest.fixture(scope="module")
def pair(tiny_checkpoint: Path) -> Iterator[ServerProcess]:
    """A server with two engines and two media workers."""
    with servers(tiny_checkpoint) as start:
        yield start(engines=2, media_workers=2)


class Load:
    """Requests of two parts each, sent by several callers without a pause."""

    def __init__(self) -> None:
        self.parts: Counter[str] = Counter()
        """By how they ended: `ready`, or the reason."""
        self.boots: set[str] = set()
        """The lives of engines that made READY parts."""

    async def run(self, stub: Any, stop: asyncio.Event) -> None:
        while not stop.is_set():
            call = stub.Encode(encode_request(image(0), image(1)), timeout=START_SECONDS)
            events = await events_of(call)
            chunks, failed = ready_chunks(events), failures(events)
            # Each part has had exactly one end, and the call ended well.
            assert sorted([c.part_idx for c in chunks] + [f.part_idx for f in failed]) == [0, 1]
            assert events[-1].HasField("complete")
            self.parts["ready"] += len(chunks)
            self.parts.update(map(reason_of, failed))
            self.boots.update(chunk.encoder.engine_boot_id for chunk in chunks)
            await release(stub, *chunks)


@asynccontextmanager
async def load_on(server: ServerProcess) -> AsyncIterator[Load]:
    """Load for as long as the block lasts; afterwards nothing of it is left."""
    load, stop = Load(), asyncio.Event()
    async with calls_to(server) as stub:
        tasks = [asyncio.create_task(load.run(stub, stop)) for _ in range(AT_ONCE)]
        try:
            yield load
        finally:
            stop.set()
            await asyncio.gather(*tasks)
    await eventually(lambda: is_idle(server))


async def ready_engines(server: ServerProcess) -> list[str]:
    """The boot ids of those that take batches."""
    engines = (await server.info()).engines
    return [engine.boot_id for engine in engines if engine.state == pb.ENGINE_STATE_READY]


async def both_are_ready(server: ServerProcess) -> bool:
    return len(await ready_engines(server)) == 2


async def test_both_engines_work_and_each_reads_its_own_arena(pair: ServerProcess) -> None:
    await eventually(lambda: both_are_ready(pair), START_SECONDS)
    async with load_on(pair) as load:
        await eventually(lambda: len(load.boots) == 2)
    assert set(load.parts) == {"ready"}
    info = await pair.info()
    assert {engine.boot_id for engine in info.engines} == load.boots
    assert [engine.index for engine in info.engines] == [0, 1]


async def test_f29_one_engine_serves_while_the_other_is_dead(pair: ServerProcess) -> None:
    await eventually(lambda: both_are_ready(pair), START_SECONDS)
    before = set(await ready_engines(pair))
    async with load_on(pair) as load:
        await eventually(lambda: load.boots == before)
        pair.engines()[0].kill()

        async def one_is_left() -> bool:
            return len(before & set(await ready_engines(pair))) == 1

        await eventually(one_is_left)
        served = load.parts["ready"]
        await eventually(lambda: load.parts["ready"] >= served + 20)
        assert await one_is_left()
        await eventually(lambda: both_are_ready(pair), START_SECONDS)
        # The new life takes work too.
        await eventually(lambda: len(load.boots) == 3)
    # What the dead one ran was run again; nothing failed.
    assert set(load.parts) == {"ready"}


# Each round waits for two processes that import torch.
@pytest.mark.timeout(1200)
@pytest.mark.slow
async def test_f29_ten_kills_of_engines_under_load(pair: ServerProcess) -> None:
    await eventually(lambda: both_are_ready(pair), START_SECONDS)
    slowest = 0.0
    async with load_on(pair) as load:
        for _ in range(ROUNDS):
            boots = set(await ready_engines(pair))
            await eventually(lambda boots=boots: boots <= load.boots, START_SECONDS)
            begin = time.monotonic()
            for engine in pair.engines():
                engine.kill()

            async def both_are_new(boots: set[str] = boots) -> bool:
                ready = set(await ready_engines(pair))
                return len(ready) == 2 and not ready & boots

            await eventually(both_are_new, START_SECONDS)
            slowest = max(slowest, time.monotonic() - begin)
    info = await pair.info()
    print(f"back after at most {slowest:.1f} s; parts ended: {dict(load.parts)}")
    assert set(load.parts) <= {"ready", "ENGINE_LOST"}
    assert sum(engine.restarts for engine in info.engines) >= 2 * ROUNDS
    assert [engine.leased_bytes + engine.reserved_bytes for engine in info.engines] == [0, 0]
    async with calls_to(pair) as stub:
        await release(stub, *ready_chunks(await encode(stub)))


async def test_f29_kills_of_media_workers_under_load(pair: ServerProcess) -> None:
    await eventually(lambda: both_are_ready(pair), START_SECONDS)
    restarts = (await pair.info()).load.media_worker_restarts
    async with load_on(pair) as load:
        for round_ in range(2):
            served = load.parts["ready"]
            await eventually(lambda served=served: load.parts["ready"] >= served + 20, START_SECONDS)
            # One that has just been killed is started again after a pause.
            await eventually(lambda: len(pair.media_workers()) == 2)
            for worker in pair.media_workers():
                worker.kill()

            async def all_were_started_again(least: int = restarts + 2 * round_ + 2) -> bool:
                return (await pair.info()).load.media_worker_restarts >= least

            await eventually(all_were_started_again, START_SECONDS)
        served = load.parts["ready"]
        await eventually(lambda: load.parts["ready"] >= served + 20, START_SECONDS)
    # Only what a worker was holding in its hands is lost, and it is told as that.
    assert set(load.parts) <= {"ready", "MEDIA_WORKER_LOST"}
    assert load.parts["MEDIA_WORKER_LOST"] <= 4
