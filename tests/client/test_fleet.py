"""Several real encoders as one: spread, killed, drained, busy, and every prompt answered right."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from encoder_client import (
    Accepted,
    ClientSettings,
    Complete,
    Embedding,
    EmbeddingPool,
    EncoderClient,
    EncoderError,
    EncoderFleet,
    HealthState,
    Layout,
    PartError,
    PartFailed,
    Ready,
    image,
)
from epd.encoder.v1.encoder_service_pb2 import CachePolicy
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from tests.conftest import StartServer, servers
from tests.photograph import photo
from tests.rpc.metrics_page import metric
from tests.server_process import START_SECONDS, ServerProcess
from tests.waiting import eventually

SIZES = [(140, 112), (252, 196), (112, 140), (196, 252), (168, 168), (84, 224)]
PHOTOS = [photo(*size) for size in SIZES]
ITEMS = [image(data) for data in PHOTOS]
TIMEOUT = START_SECONDS


@pytest.fixture(scope="module")
def pair(tiny_checkpoint: Path) -> Iterator[list[ServerProcess]]:
    """Two servers for the tests that leave them as they were."""
    with servers(tiny_checkpoint) as start:
        started = [start(wait=False), start(wait=False)]
        yield [server.wait_ready() for server in started]


@pytest.fixture(scope="module")
def expected(pair: list[ServerProcess]) -> list[npt.NDArray[np.float32]]:
    """What one server makes of each photograph, alone."""

    async def alone() -> list[npt.NDArray[np.float32]]:
        async with EncoderClient(pair[0].target, ClientSettings(transports=("inline",))) as client:
            rows = []
            for item in ITEMS:
                async with client.encode([item], cache_policy=CachePolicy.CACHE_POLICY_BYPASS) as call:
                    [embedding] = await call.embeddings()
                    rows.append(embedding.numpy().copy())
            return rows

    return asyncio.run(alone())


@asynccontextmanager
async def fleet_of(servers: Sequence[ServerProcess], pool: EmbeddingPool | None = None) -> AsyncIterator[EncoderFleet]:
    """A fleet that has heard of all its encoders.

    It polls them no more often than by default: three answers in a row that are late eject one, and this machine may
    keep it from running for seconds.
    """
    targets = [server.target for server in servers]
    async with EncoderFleet(targets, ClientSettings(transports=("inline",)), pool=pool) as fleet:
        await eventually(lambda: set(fleet.states.values()) == {HealthState.SERVING})
        yield fleet


def assert_right(embeddings: Sequence[Embedding], expected: Sequence[npt.NDArray[np.float32]]) -> None:
    for embedding, rows in zip(embeddings, expected, strict=True):
        np.testing.assert_allclose(embedding.numpy(), rows, atol=1e-4)


async def leases(servers: Sequence[ServerProcess]) -> int:
    return sum([(await server.info()).load.leases for server in servers])


async def test_a_prompt_is_spread_and_comes_back_in_its_order(
    pair: list[ServerProcess], expected: list[npt.NDArray[np.float32]]
) -> None:
    async with fleet_of(pair) as fleet, fleet.encode(ITEMS, prompt_id="p", timeout=TIMEOUT) as call:
        embeddings = await call.embeddings()
        assert_right(embeddings, expected)
        assert [embedding.chunk.part_idx for embedding in embeddings] == list(range(len(ITEMS)))
        assert len({embedding.chunk.encoder.instance_id for embedding in embeddings}) == 2
        assert {(chunk.prompt_id, chunk.num_parts) for chunk in call.chunks.values()} == {("p", len(ITEMS))}
    assert await leases(pair) == 0


async def test_the_events_are_those_of_one_call(pair: list[ServerProcess]) -> None:
    items = [*ITEMS[:3], image(b"not an image")]
    async with fleet_of(pair) as fleet:
        async with fleet.encode(items, request_id="r", timeout=TIMEOUT) as call:
            events = [event async for event in call]
            await fleet.client.abandon([event.chunk for event in events if isinstance(event, Ready)])
            with pytest.raises(PartError) as caught:
                await call.embeddings()
        kinds = [type(event) for event in events]
        assert (kinds[0], kinds[-1]) == (Accepted, Complete)
        assert call.accepted is not None
        assert call.accepted.request_id == "r"
        for part_idx in range(3):
            mine = [type(e) for e in events if isinstance(e, Layout | Ready) and e.chunk.part_idx == part_idx]
            assert mine == [Layout, Ready]
        [failed] = [event for event in events if isinstance(event, PartFailed)]
        assert failed.error.reason == caught.value.reason == "MEDIA_UNRECOGNIZED"
        assert call.complete is not None
        assert (call.complete.ready, call.complete.failed, call.complete.cancelled) == (3, 1, 0)
        # Bad input says nothing of an encoder.
        assert set(fleet.states.values()) == {HealthState.SERVING}
    assert await leases(pair) == 0


async def test_who_is_told_to_have_content_is_asked_for_it(pair: list[ServerProcess]) -> None:
    """So a receiver that knows only content keys asks no other encoder in vain."""
    items = [image(photo(140, 112, quality=quality)) for quality in range(20, 28)]
    async with EncoderFleet([pair[0].target], ClientSettings(transports=("inline",))) as one:
        async with one.encode(items, timeout=TIMEOUT) as call:
            await call.embeddings()
        chunks = call.chunks
    keys = [MediaItem(modality=Modality.MODALITY_IMAGE, content_key=chunks[n].content_key, part_idx=n) for n in chunks]
    unknown = await metric(pair[1], "parts_total", state="failed", reason="CONTENT_UNKNOWN")
    async with fleet_of(pair) as fleet:
        holders = {part_idx: chunk.encoder.instance_id for part_idx, chunk in chunks.items()}
        async with fleet.encode(keys, holders=holders, timeout=TIMEOUT) as call:
            assert len(await call.embeddings()) == len(items)
        assert await metric(pair[1], "parts_total", state="failed", reason="CONTENT_UNKNOWN") == unknown
        # One that is not there is no obstacle.
        async with fleet.encode(keys[:1], holders={0: "nobody"}, timeout=TIMEOUT) as call:
            assert len(await call.embeddings()) == 1


async def test_content_goes_where_it_is(pair: list[ServerProcess]) -> None:
    async with fleet_of(pair) as fleet:
        placed: dict[int, set[str]] = {}
        for _ in range(4):
            async with fleet.encode(ITEMS, timeout=TIMEOUT) as call:
                for embedding in await call.embeddings():
                    placed.setdefault(embedding.chunk.part_idx, set()).add(embedding.chunk.encoder.instance_id)
        assert call.complete is not None
        assert call.complete.from_cache == len(ITEMS)
        assert all(len(instances) == 1 for instances in placed.values())


async def test_f41_two_addresses_of_one_server_are_one_encoder(pair: list[ServerProcess]) -> None:
    port = pair[0].target.rpartition(":")[2]
    targets = [pair[0].target, f"localhost:{port}", f"dns:127.0.0.1:{port}"]
    async with EncoderFleet(targets, ClientSettings(transports=("inline",)), poll_seconds=0.1) as fleet:
        await eventually(lambda: set(fleet.states.values()) == {HealthState.SERVING})
        assert sorted(fleet.states) == sorted(targets[:2])  # the name has the first one's address
        async with fleet.encode(ITEMS, timeout=TIMEOUT) as call:
            embeddings = await call.embeddings()
    # All in one call: the encoder was seen as one.
    assert {embedding.chunk.request_id for embedding in embeddings} == {f"{call.prompt_id}.1"}


async def test_an_encoder_that_is_killed_costs_no_prompt(
    pair: list[ServerProcess], start_server: StartServer, expected: list[npt.NDArray[np.float32]]
) -> None:
    victim, survivor = start_server(), pair[0]
    async with fleet_of([victim, survivor]) as fleet:

        async def prompt(number: int) -> None:
            async with fleet.encode(
                ITEMS, prompt_id=f"p{number}", timeout=TIMEOUT, cache_policy=CachePolicy.CACHE_POLICY_BYPASS
            ) as call:
                assert_right(await call.embeddings(), expected)
                assert call.complete is not None
                assert call.complete.ready == len(ITEMS)

        async def kill_on_the_way() -> None:
            async with fleet.encode(ITEMS, timeout=TIMEOUT, cache_policy=CachePolicy.CACHE_POLICY_BYPASS) as call:
                async for event in call:
                    match event:
                        case Ready(chunk) if chunk.encoder.grpc_target == victim.target:
                            victim.stop(signal.SIGKILL)
                            break
                # It is READY, and cannot be read any more: another makes it again.
                assert_right(await call.embeddings(), expected)

        await asyncio.gather(kill_on_the_way(), *(prompt(number) for number in range(8)))
        assert fleet.states[victim.target] is HealthState.EJECTED
        assert fleet.states[survivor.target] is HealthState.SERVING

        async def nothing_is_held() -> bool:
            gc.collect()
            return (await leases([survivor]), fleet.pool.statistics.slots) == (0, 0)

        await eventually(nothing_is_held)


async def test_a_read_through_the_call_survives_the_encoder(
    start_server: StartServer, expected: list[npt.NDArray[np.float32]]
) -> None:
    started = [start_server(wait=False), start_server(wait=False)]
    pair = [server.wait_ready() for server in started]
    async with fleet_of(pair) as fleet, fleet.encode(ITEMS[:1], timeout=TIMEOUT) as call:
        [chunk] = [event.chunk async for event in call if isinstance(event, Ready)]
        [holder] = [server for server in pair if server.target == chunk.encoder.grpc_target]
        holder.stop(signal.SIGKILL)
        embedding = await call.read(chunk)
        assert_right([embedding], expected[:1])
        assert embedding.chunk.encoder.instance_id != chunk.encoder.instance_id


async def test_an_encoder_that_drains_ends_what_it_has_and_gets_nothing_new(
    pair: list[ServerProcess], start_server: StartServer, expected: list[npt.NDArray[np.float32]]
) -> None:
    leaving, staying = start_server(drain_seconds=START_SECONDS), pair[0]
    async with fleet_of([leaving, staying]) as fleet:
        with leaving.held(leaving.engine()):
            async with fleet.encode(ITEMS, timeout=TIMEOUT, cache_policy=CachePolicy.CACHE_POLICY_BYPASS) as call:
                results = call.results()
                await layouts_of(results, len(ITEMS))
                leaving.process.send_signal(signal.SIGTERM)
                await eventually(lambda: fleet.states[leaving.target] is HealthState.UNKNOWN)
                async with fleet.encode(ITEMS, timeout=TIMEOUT) as other:
                    embeddings = await other.embeddings()
                assert_right(embeddings, expected)
                assert {e.chunk.encoder.grpc_target for e in embeddings} == {staying.target}
                leaving.engine().resume()
                found = {r.chunk.part_idx: r async for r in results if isinstance(r, Embedding)}
                assert_right([found[part_idx] for part_idx in sorted(found)], expected)
        assert await leases([staying]) == 0
    assert leaving.process.wait(START_SECONDS) == 0


async def layouts_of(results: AsyncIterator[object], count: int) -> None:
    seen = 0
    while seen < count:
        seen += isinstance(await anext(results), Layout)


async def test_a_busy_encoder_is_passed_by_and_then_used(
    start_server: StartServer, expected: list[npt.NDArray[np.float32]]
) -> None:
    started = [start_server(wait=False, max_queued_parts=6) for _ in range(2)]
    pair = [server.wait_ready() for server in started]
    async with fleet_of(pair) as fleet:

        async def prompt() -> None:
            # Twenty-four items, where twelve are taken at once: some wait for their turn.
            async with fleet.encode(ITEMS, timeout=TIMEOUT, cache_policy=CachePolicy.CACHE_POLICY_BYPASS) as call:
                assert_right(await call.embeddings(), expected)

        await asyncio.gather(*(prompt() for _ in range(4)))
        assert set(fleet.states.values()) == {HealthState.SERVING}
    assert await leases(pair) == 0


async def test_without_any_encoder_a_call_says_why() -> None:
    async with EncoderFleet(["127.0.0.1:1"], ClientSettings(transports=("inline",)), poll_seconds=0.1) as fleet:
        # Then it is known why.
        await eventually(lambda: set(fleet.states.values()) == {HealthState.EJECTED})
        async with fleet.encode(ITEMS[:1], timeout=0.5) as call:
            with pytest.raises(PartError, match=r"127\.0\.0\.1:1: UNAVAILABLE") as caught:
                await call.embeddings()
        assert caught.value.part_idx == 0


async def test_a_part_can_be_late_alone(pair: list[ServerProcess], expected: list[npt.NDArray[np.float32]]) -> None:
    async with fleet_of(pair) as fleet:
        engines = [server.engine() for server in pair]
        with pair[0].held(engines[0]), pair[1].held(engines[1]):
            async with fleet.encode(
                ITEMS[:2], timeout=TIMEOUT, part_timeouts={1: 0.5}, cache_policy=CachePolicy.CACHE_POLICY_BYPASS
            ) as call:
                async for event in call:
                    if isinstance(event, PartFailed):
                        assert event.part_idx == 1
                        assert event.error.code.name == "DEADLINE_EXCEEDED"
                        for engine in engines:
                            engine.resume()
                with pytest.raises(PartError):
                    await call.embeddings()
                assert_right([await call.read(call.chunks[0])], expected[:1])
    assert await leases(pair) == 0


async def test_leaving_cancels_and_gives_everything_back(pair: list[ServerProcess]) -> None:
    async with fleet_of(pair) as fleet:
        # What is READY when the caller leaves, and has not been told yet, stays leased for its time: here nothing is.
        with pair[0].held(pair[0].engine()), pair[1].held(pair[1].engine()):
            async with fleet.encode(ITEMS, timeout=TIMEOUT, cache_policy=CachePolicy.CACHE_POLICY_BYPASS) as call:
                async for event in call:
                    if isinstance(event, Layout):
                        break

            async def no_request_is_live() -> bool:
                return not any([(await server.info()).load.requests for server in pair])

            await eventually(no_request_is_live)

        async def nothing_is_left() -> bool:
            loads = [(await server.info()).load for server in pair]
            return not any(load.leases or sum(load.parts.values()) for load in loads)

        await eventually(nothing_is_left)


async def test_encoders_that_do_not_fit_together_are_refused(
    pair: list[ServerProcess], tmp_path: Path, start_server: StartServer
) -> None:
    from encoder_svc.checkpoints import write_checkpoint

    write_checkpoint("qwen2_5_vl", tmp_path / "other", preset="tiny", seed=7)
    other = start_server(model=tmp_path / "other")
    async with fleet_of([pair[0], other]) as fleet, fleet.encode(ITEMS, timeout=TIMEOUT) as call:
        with pytest.raises(EncoderError, match="do not fit together") as caught:
            await call.embeddings()
        assert other.target in str(caught.value)
    wanted = (await other.info()).model.compatibility_fingerprint
    targets = [pair[0].target, other.target]
    async with (
        EncoderFleet(targets, ClientSettings(transports=("inline",), expected_fingerprint=wanted)) as fleet,
        fleet.encode(ITEMS, timeout=TIMEOUT) as call,
    ):
        embeddings = await call.embeddings()
    assert {embedding.chunk.encoder.grpc_target for embedding in embeddings} == {other.target}


async def test_a_full_pool_gives_leases_back_and_asks_again(
    pair: list[ServerProcess], expected: list[npt.NDArray[np.float32]]
) -> None:
    pool = EmbeddingPool(512 << 10)
    async with fleet_of(pair, pool) as fleet:
        # Somebody has all of the pool, and waits for an encoder.
        held = [await pool.reserve("older", [512 << 10])]
        async with fleet.encode(ITEMS, timeout=TIMEOUT) as call:
            reads = asyncio.create_task(call.embeddings())

            async def everything_was_given_back() -> bool:
                return call.complete is not None and await leases(pair) == 0

            await eventually(everything_was_given_back)
            assert not reads.done()
            held.pop().close()
            gc.collect()
            assert_right(await reads, expected)
    assert await leases(pair) == 0


@pytest.mark.parametrize("items", [[], [image(PHOTOS[0], part_idx=1)] * 2, [image(PHOTOS[0], part_idx=5)]])
async def test_a_call_that_cannot_be_is_refused_at_once(items: list[object]) -> None:
    async with EncoderFleet(["127.0.0.1:1"], ClientSettings(transports=("inline",))) as fleet:
        with pytest.raises(ValueError, match="part_idx"):
            fleet.encode(items)  # type: ignore[arg-type]
