"""The client against a real server: real photographs in, real embeddings out, nothing left behind."""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
from dataclasses import replace

import numpy as np
import pytest

from encoder_client import (
    Accepted,
    ClientSettings,
    Complete,
    EmbeddingPool,
    EncoderClient,
    EncoderError,
    Layout,
    PartError,
    PartFailed,
    PoolError,
    ReadError,
    Ready,
    image,
    transport_choice,
)
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from tests.conftest import StartServer
from tests.photograph import photo
from tests.server_process import START_SECONDS, ServerProcess
from tests.waiting import eventually

PHOTO = photo(252, 196)
SMALL = photo(140, 112)
ITEM = image(SMALL)


@pytest.fixture
def server(mooncake_server: ServerProcess) -> ServerProcess:
    return mooncake_server


async def nothing_is_held(pool: EmbeddingPool) -> None:
    """Every slot comes back, once the loop has let go of what it ran."""

    def is_empty() -> bool:
        gc.collect()
        return pool.statistics.slots == 0

    await eventually(is_empty)


async def leased_bytes(client: EncoderClient) -> int:
    return sum(engine.leased_bytes for engine in (await client.server_info()).engines)


async def test_events_come_in_order(server: ServerProcess) -> None:
    async with (
        EncoderClient(server.target) as client,
        client.encode([image(PHOTO), image(SMALL)], prompt_id="p", request_id="r") as call,
    ):
        events = [event async for event in call]
        chunks = [event.chunk for event in events if isinstance(event, Ready)]
        await client.abandon(chunks)
    kinds = [type(event) for event in events]
    assert kinds[0] is Accepted
    assert kinds[-1] is Complete
    assert sorted(map(str, kinds[1:-1])) == sorted(map(str, [Layout, Layout, Ready, Ready]))
    for part in (0, 1):
        mine = [type(e) for e in events if isinstance(e, Layout | Ready) and e.chunk.part_idx == part]
        assert mine == [Layout, Ready]
    assert call.accepted is not None
    assert (call.accepted.request_id, call.accepted.prompt_id, call.accepted.num_parts) == ("r", "p", 2)


async def test_embeddings_come_in_the_order_of_the_items(server: ServerProcess) -> None:
    async with EncoderClient(server.target) as client:
        items = [image(SMALL, part_idx=1), image(PHOTO, part_idx=0)]
        async with client.encode(items) as call:
            small, large = await call.embeddings()
        assert (small.chunk.part_idx, large.chunk.part_idx) == (1, 0)
        assert small.numpy().shape[0] == 20
        assert large.numpy().shape[0] == 63
        assert call.complete is not None
        assert call.complete.ready == 2
        assert await leased_bytes(client) == 0


async def test_events_first_and_embeddings_then(server: ServerProcess) -> None:
    async with EncoderClient(server.target) as client, client.encode([image(SMALL)]) as call:
        async for event in call:
            if isinstance(event, Layout):
                break
        [embedding] = await call.embeddings()
        assert embedding.chunk.token_count == call.layouts[0].token_count


async def test_without_layouts(server: ServerProcess) -> None:
    async with EncoderClient(server.target) as client, client.encode([image(SMALL)], skip_layout=True) as call:
        [embedding] = await call.embeddings()
    assert not call.layouts
    assert embedding.numpy().shape[0] == 20


async def test_all_transports_deliver_the_same_bytes_and_the_fastest_goes_first(server: ServerProcess) -> None:
    async with EncoderClient(server.target) as client:
        assert client.transports == ("shared_memory", "mooncake", "zeromq", "inline")
        read = []
        for transports in ((), *((name,) for name in client.transports)):
            async with client.encode([image(PHOTO)]) as call:
                [chunk] = [event.chunk async for event in call if isinstance(event, Ready)]
                read.append(await client.read(chunk, transports=transports))
        assert [embedding.transport for embedding in read] == ["shared_memory", *client.transports]
        for embedding in read[1:]:
            np.testing.assert_array_equal(embedding.numpy(), read[0].numpy())
        assert np.abs(read[0].numpy()).max() > 0.1
        statistics = client.transport_statistics
        assert [statistics[name].reads for name in client.transports] == [2, 1, 1, 1]
        assert statistics["zeromq"].nbytes == read[0].nbytes
        assert not any(one.failures or one.avoided for one in statistics.values())
        assert await leased_bytes(client) == 0


@pytest.mark.parametrize("transport", ["shared_memory", "mooncake", "zeromq"])
async def test_many_reads_at_once(server: ServerProcess, transport: str) -> None:
    pool = EmbeddingPool(8 << 20)
    async with EncoderClient(server.target, ClientSettings(transports=(transport,)), pool=pool) as client:
        async with client.encode([image(SMALL)]) as call:
            [expected] = await call.embeddings()

        async def one(width: int) -> str:
            items = [image(photo(width, 112)), image(SMALL)]
            async with client.encode(items) as call:
                _, small = await call.embeddings()
                np.testing.assert_allclose(small.numpy(), expected.numpy(), atol=1e-4)
                return small.transport

        transports = await asyncio.gather(*(one(112 + 28 * (n % 5)) for n in range(16)))
        assert set(transports) == {transport}
        assert await leased_bytes(client) == 0
        expected.release()
        await nothing_is_held(pool)
        assert pool.statistics.peak <= 8 << 20


async def test_a_failed_part_does_not_touch_its_siblings(server: ServerProcess) -> None:
    async with EncoderClient(server.target) as client:
        async with client.encode([image(b"not an image"), image(SMALL)]) as call:
            events = [event async for event in call]
            [failed] = [event for event in events if isinstance(event, PartFailed)]
            [chunk] = [event.chunk for event in events if isinstance(event, Ready)]
            assert (await client.read(chunk)).numpy().shape[0] == 20
            with pytest.raises(PartError) as caught:
                await call.embeddings()
        assert failed.error.reason == caught.value.reason == "MEDIA_UNRECOGNIZED"
        assert caught.value.part_idx == 0
        assert await leased_bytes(client) == 0


async def test_a_refused_call_names_the_field(server: ServerProcess) -> None:
    async with EncoderClient(server.target) as client:
        with pytest.raises(EncoderError) as caught:
            async with client.encode([image(SMALL, part_idx=5)]) as call:
                await call.embeddings()
    assert caught.value.reason == "REQUEST_INVALID"
    assert [violation.field for violation in caught.value.field_violations] == ["items[0].part_idx"]


async def test_f11_a_released_lease_reads_nothing_more(server: ServerProcess) -> None:
    async with EncoderClient(server.target) as client, client.encode([image(SMALL)]) as call:
        [chunk] = [event.chunk async for event in call if isinstance(event, Ready)]
        await client.read(chunk)
        with pytest.raises(ReadError, match="no transport delivered"):
            await client.read(chunk, transports=("inline",))


async def test_a_lease_can_be_renewed_until_it_is_released(server: ServerProcess) -> None:
    async with EncoderClient(server.target) as client, client.encode([image(SMALL)], lease_ttl=200) as call:
        [chunk] = [event.chunk async for event in call if isinstance(event, Ready)]
        [seconds] = await client.renew([chunk], 500)
        assert 200 < seconds <= 500
        await client.read(chunk)
        with pytest.raises(ReadError, match="cannot be renewed"):
            await client.renew([chunk], 500)


async def test_cancel_is_exact(server: ServerProcess) -> None:
    async with EncoderClient(server.target) as client:
        answer = await client.cancel(request_id="nobody's")
        assert (answer.requests, answer.parts) == (0, 0)
        with pytest.raises(ValueError, match="either"):
            await client.cancel()


async def test_information_and_health(server: ServerProcess) -> None:
    async with EncoderClient(server.target) as client:
        info = await client.server_info()
        assert await client.health()
        assert len(info.model.compatibility_fingerprint) == 32
    fingerprint = info.model.compatibility_fingerprint
    async with (
        EncoderClient(server.target, ClientSettings(expected_fingerprint=fingerprint)) as client,
        client.encode([ITEM]) as call,
    ):
        await call.embeddings()
    async with EncoderClient(server.target, ClientSettings(expected_fingerprint=bytes(32))) as client:
        with pytest.raises(EncoderError, match="FINGERPRINT_MISMATCH"):
            async with client.encode([image(SMALL)]) as call:
                await call.embeddings()


async def test_named_receivers_get_leases_of_their_own(server: ServerProcess) -> None:
    async with EncoderClient(server.target) as caller:
        async with caller.encode([image(SMALL)], receivers=["lm-0", "lm-1"]) as call:
            [chunk] = [event.chunk async for event in call if isinstance(event, Ready)]
        for name in ("lm-0", "lm-1"):
            async with EncoderClient(server.target, ClientSettings(receiver=name)) as receiver:
                assert (await receiver.read(chunk)).numpy().shape[0] == 20
        assert await leased_bytes(caller) == 0


def redeem(ticket: bytes, answers: multiprocessing.Queue[object]) -> None:
    async def main() -> None:
        chunk = EmbeddingChunk.FromString(ticket)
        async with EncoderClient(chunk.encoder.grpc_target) as client:
            answers.put((await client.read(chunk)).numpy().tobytes())

    asyncio.run(main())


async def test_a_serialised_chunk_is_a_ticket_for_another_process(server: ServerProcess) -> None:
    context = multiprocessing.get_context("spawn")
    answers: multiprocessing.Queue[object] = context.Queue()
    async with EncoderClient(server.target) as client:
        async with client.encode([image(SMALL)]) as call:
            [expected] = await call.embeddings()
        async with client.encode([image(SMALL)]) as call:
            [chunk] = [event.chunk async for event in call if isinstance(event, Ready)]
        reader = context.Process(target=redeem, args=(chunk.SerializeToString(), answers))
        reader.start()
        try:
            read = await asyncio.to_thread(answers.get, timeout=START_SECONDS)
        finally:
            reader.kill()
            await asyncio.to_thread(reader.join)
        assert read == expected.numpy().tobytes()
        assert await leased_bytes(client) == 0


async def test_a_pool_that_is_too_small_says_so_and_frees_the_encoder(server: ServerProcess) -> None:
    async with EncoderClient(server.target, pool=EmbeddingPool(4096)) as client:
        async with client.encode([ITEM]) as call:
            with pytest.raises(PoolError, match="the pool has 4096"):
                await call.embeddings()
        async with client.encode([ITEM]) as call:
            [chunk] = [event.chunk async for event in call if isinstance(event, Ready)]
            with pytest.raises(PoolError, match="the pool has 4096"):
                await client.read(chunk)
        assert await leased_bytes(client) == 0


async def test_an_engine_that_hangs_during_a_transfer_does_not_hold_the_reader(
    server: ServerProcess, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Longer than this test: by its end no transport that failed is tried again.
    monkeypatch.setattr(transport_choice, "SHORTEST_PAUSE", transport_choice.LONGEST_PAUSE)
    transports = ("mooncake", "zeromq", "inline")
    async with EncoderClient(server.target, ClientSettings(transports=transports)) as client:
        # The first read by Mooncake sets its engine up, which takes seconds on a busy machine.
        async with client.encode([image(SMALL)]) as call:
            [expected] = await call.embeddings()
        async with client.encode([image(SMALL)]) as call:
            [chunk] = [event.chunk async for event in call if isinstance(event, Ready)]
        async with client.encode([ITEM]) as call:
            [another] = [event.chunk async for event in call if isinstance(event, Ready)]
        # Each but the last may take half of what is left: so the last has a quarter of it.
        client.settings = replace(client.settings, read_timeout=16.0)
        with server.held(server.engine()):
            embedding = await client.read(chunk)
            statistics = client.transport_statistics
            at_once = await client.read(another)
        for name in ("mooncake", "zeromq"):
            assert f"{name} did not deliver part 0" in caplog.text
            assert (statistics[name].failures, statistics[name].avoided) == (1, 1)
        # The second read did not wait behind them.
        assert client.transport_statistics["zeromq"].failures == 1
        for read in (embedding, at_once):
            assert read.transport == "inline"
            np.testing.assert_array_equal(read.numpy(), expected.numpy())


async def test_an_engine_that_died_after_ready_costs_the_read_and_no_more(start_server: StartServer) -> None:
    server = start_server(mooncake="on")
    async with EncoderClient(server.target) as client:
        chunks = []
        for _ in client.transports:
            async with client.encode([image(SMALL)]) as call:
                chunks += [event.chunk async for event in call if isinstance(event, Ready)]
        server.engine().kill()

        async def nothing_is_leased() -> bool:
            return (await client.server_info()).load.leases == 0

        await eventually(nothing_is_leased)
        for chunk, transport in zip(chunks, client.transports, strict=True):
            with pytest.raises(ReadError):
                await client.read(chunk, transports=(transport,))
        await nothing_is_held(client.pool)
