"""What a faulty encoder or network does, the client notices before anyone uses it."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from encoder_client import (
    Accepted,
    ChunkError,
    ClientSettings,
    EncodeCall,
    EncoderClient,
    EncoderError,
    Event,
    Layout,
    ReadError,
    image,
)
from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, Locator, MooncakeLocator
from tests.client.chunks import layout, ready, rows
from tests.client.scripted_encoder import ScriptedEncoder
from tests.waiting import PATIENCE_SECONDS, eventually

DATA = rows(40, 8)


@asynccontextmanager
async def connected(
    encoder: ScriptedEncoder, *, read_timeout: float = 30.0, expected_fingerprint: bytes = b""
) -> AsyncIterator[EncoderClient]:
    settings = ClientSettings(
        transports=("inline",), read_timeout=read_timeout, expected_fingerprint=expected_fingerprint
    )
    async with encoder.serve() as target, EncoderClient(target, settings) as client:
        yield client


def chunk_at(encoder: ScriptedEncoder, chunk: EmbeddingChunk | None = None) -> EmbeddingChunk:
    chunk = chunk or ready(DATA)
    chunk.encoder.grpc_target = encoder.target
    return chunk


async def nothing_is_held(client: EncoderClient) -> None:
    """Every slot comes back, once the loop has let go of what it ran."""
    await eventually(lambda: gc.collect() >= 0 and client.pool.statistics.slots == 0)


async def collect(call: EncodeCall, seen: list[Event]) -> None:
    async for event in call:
        seen.append(event)  # noqa: PERF401 # what came before an error counts


async def test_a_good_read_is_released_as_ok() -> None:
    encoder = ScriptedEncoder(payload=DATA.tobytes)
    async with connected(encoder) as client:
        embedding = await client.read(chunk_at(encoder))
    assert (embedding.numpy() == DATA).all()
    assert embedding.transport == "inline"
    assert encoder.outcomes == ["OK"]


async def test_f14_damaged_bytes_are_reported_and_refused() -> None:
    encoder = ScriptedEncoder(payload=lambda: bytes(DATA.nbytes))
    async with connected(encoder) as client:
        with pytest.raises(ReadError, match="do not have its checksum"):
            await client.read(chunk_at(encoder))
        await nothing_is_held(client)
    assert encoder.outcomes == ["CORRUPT"]
    assert encoder.fetches == 2


async def test_f14_damage_on_the_way_is_read_again_and_reported() -> None:
    payloads = iter([bytes(DATA.nbytes), DATA.tobytes()])
    encoder = ScriptedEncoder(payload=lambda: next(payloads))
    async with connected(encoder) as client:
        embedding = await client.read(chunk_at(encoder))
        assert (embedding.numpy() == DATA).all()
    assert encoder.outcomes == ["CORRUPT"]


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b""])
async def test_f14_another_number_of_bytes_is_refused(change: Callable[[bytes], bytes]) -> None:
    encoder = ScriptedEncoder(payload=lambda: change(DATA.tobytes()))
    async with connected(encoder) as client:
        with pytest.raises(ReadError, match="no transport delivered part 0"):
            await client.read(chunk_at(encoder))
    assert encoder.outcomes == ["TRANSPORT_FAILED"]


async def test_a_transport_that_fails_is_followed_by_the_next(caplog: pytest.LogCaptureFixture) -> None:
    encoder = ScriptedEncoder(payload=DATA.tobytes)
    async with (
        encoder.serve() as target,
        EncoderClient(target, ClientSettings(transports=("mooncake", "inline"))) as client,
    ):
        if "mooncake" not in client.transports:
            pytest.skip("Mooncake cannot be loaded here")
        chunk = chunk_at(encoder)
        # Port 1 of the loopback: nobody listens there.
        gone = MooncakeLocator(session="127.0.0.1:1", address=4096, protocol="tcp")
        chunk.locators.insert(0, Locator(mooncake=gone))
        with caplog.at_level(logging.WARNING, "encoder_client"):
            embedding = await client.read(chunk)
    assert embedding.transport == "inline"
    assert (embedding.numpy() == DATA).all()
    assert "mooncake did not deliver part 0" in caplog.text
    assert encoder.outcomes == ["OK"]


@pytest.mark.parametrize(
    "state", [pb.LeaseState.LEASE_STATE_EXPIRED, pb.LeaseState.LEASE_STATE_REVOKED, pb.LeaseState.LEASE_STATE_UNKNOWN]
)
async def test_f12_a_read_whose_lease_had_ended_is_thrown_away(state: pb.LeaseState) -> None:
    encoder = ScriptedEncoder(payload=DATA.tobytes)
    encoder.state = state
    async with connected(encoder) as client:
        with pytest.raises(ReadError, match="ended before the read did"):
            await client.read(chunk_at(encoder))
        await nothing_is_held(client)


async def test_f11_a_lost_answer_to_a_release_is_asked_for_again() -> None:
    encoder = ScriptedEncoder(payload=DATA.tobytes)
    encoder.release_failures = 2
    encoder.state = pb.LeaseState.LEASE_STATE_ALREADY_RELEASED
    async with connected(encoder) as client:
        await client.read(chunk_at(encoder))
    assert len(encoder.releases) == 3
    assert len({lease.lease_id for call in encoder.releases for lease in call}) == 1


async def test_a_read_that_nobody_confirms_is_thrown_away() -> None:
    encoder = ScriptedEncoder(payload=DATA.tobytes)
    encoder.release_failures = 10**6
    # The first limit is long enough for the bytes to come, unless this machine is very busy.
    for seconds in (0.1, 1.0, 10.0):
        async with connected(encoder, read_timeout=seconds) as client:
            with pytest.raises(ReadError) as failed:
                await client.read(chunk_at(encoder))
        if "no transport delivered" not in str(failed.value):
            break
    assert "did not confirm" in str(failed.value)


async def test_releases_travel_together() -> None:
    encoder = ScriptedEncoder(payload=DATA.tobytes)
    chunks = [ready(DATA, part, 50) for part in range(50)]
    async with connected(encoder) as client:
        for part, chunk in enumerate(chunks):
            chunk_at(encoder, chunk).leases[0].lease_id = bytes([part] * 16)
        await asyncio.gather(*(client.abandon([chunk]) for chunk in chunks))
    assert encoder.outcomes == ["ABANDONED"] * 50
    assert len(encoder.releases) == 1


async def test_f12_a_chunk_of_another_request_never_reaches_the_caller() -> None:
    foreign = layout()
    foreign.request_id = "another"
    encoder = ScriptedEncoder([foreign])
    async with connected(encoder) as client, client.encode([image(b"file")]) as call:
        with pytest.raises(ChunkError, match="request_id"):
            await call.embeddings()


@pytest.mark.parametrize(("name", "value"), [("request_id", "mine"), ("prompt_id", "mine"), ("num_parts", 2)])
async def test_f12_another_call_than_was_sent_is_not_taken_for_it(name: str, value: object) -> None:
    encoder = ScriptedEncoder([layout()])  # it accepts the request r of the prompt p, with one part
    async with connected(encoder) as client, client.encode([image(b"file")], **{name: value}) as call:  # type: ignore[arg-type]
        with pytest.raises(ChunkError, match=name):
            await call.embeddings()


async def test_f13_a_ready_that_contradicts_its_layout_never_reaches_the_caller() -> None:
    encoder = ScriptedEncoder([layout(40, 8), ready(rows(39, 8))])
    async with connected(encoder) as client, client.encode([image(b"file")]) as call:
        seen: list[Event] = []
        with pytest.raises(ChunkError, match="grid_dim"):
            await collect(call, seen)
        assert [type(event) for event in seen] == [Accepted, Layout]


async def test_a_part_that_ends_twice_is_noticed() -> None:
    encoder = ScriptedEncoder([ready(DATA), ready(DATA)])
    async with connected(encoder) as client, client.encode([image(b"file")]) as call:
        with pytest.raises(ChunkError, match="ended twice"):
            async for _ in call:
                pass


async def test_a_complete_without_its_parts_is_noticed() -> None:
    encoder = ScriptedEncoder([ready(DATA)])
    encoder.chunks[0].num_parts = 2
    async with connected(encoder) as client, client.encode([image(b"a"), image(b"b")]) as call:
        with pytest.raises(ChunkError, match=r"parts \[1\] have not ended"):
            async for _ in call:
                pass


async def test_f27_leaving_the_call_cancels_it() -> None:
    encoder = ScriptedEncoder([layout()])
    encoder.hang = True
    async with connected(encoder) as client:
        async with client.encode([image(b"file")]) as call:
            async for _ in call:
                break
        async with asyncio.timeout(PATIENCE_SECONDS):
            await encoder.ended.wait()


async def test_leaving_while_embeddings_are_awaited_lets_everything_go() -> None:
    encoder = ScriptedEncoder([layout(40, 8, 0, 2), layout(40, 8, 1, 2), ready(DATA, 0, 2)], payload=DATA.tobytes)
    encoder.hang = True
    async with connected(encoder) as client:

        async def run() -> None:
            async with client.encode([image(b"a"), image(b"b")]) as call:
                await call.embeddings()

        task = asyncio.create_task(run())
        async with asyncio.timeout(PATIENCE_SECONDS):
            await encoder.released.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        del task
        async with asyncio.timeout(PATIENCE_SECONDS):
            await encoder.ended.wait()
        await nothing_is_held(client)


async def test_an_encoder_that_is_not_there_is_an_error_with_a_code() -> None:
    async with EncoderClient("127.0.0.1:1", ClientSettings(transports=("inline",))) as client:
        with pytest.raises(EncoderError, match="UNAVAILABLE"):
            async with client.encode([image(b"file")], timeout=PATIENCE_SECONDS) as call:
                await call.embeddings()
        with pytest.raises(EncoderError, match="UNAVAILABLE"):
            await client.health()


async def test_another_models_embedding_is_not_read() -> None:
    encoder = ScriptedEncoder(payload=DATA.tobytes)
    async with connected(encoder, expected_fingerprint=bytes(32)) as client:
        with pytest.raises(ChunkError, match="compatibility_fingerprint"):
            await client.read(chunk_at(encoder))
    assert encoder.outcomes == ["ABANDONED"]
    assert encoder.fetches == 0
