"""A chunk that must not be used: its lease goes back at once, by every way on which it is refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc
import pytest

from encoder_client import (
    ChunkError,
    ClientSettings,
    EmbeddingPool,
    EncoderClient,
    EncoderClientError,
    EncoderError,
    Layout,
    PartFailed,
    Ready,
    Synced,
    image,
)
from encoder_client.worker.assembly import Assembly
from encoder_client.worker.inbox import Inbox
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from tests.client.chunks import LEASE, layout, ready, rows
from tests.client.scripted_encoder import ScriptedEncoder
from tests.waiting import PATIENCE_SECONDS

INLINE = ClientSettings(transports=("inline",))
DATA = rows(40, 8)
OTHER = b"another lease..."


def leased(chunk: EmbeddingChunk, lease: bytes, receiver: str = "") -> EmbeddingChunk:
    """A READY chunk with that lease."""
    chunk.leases[0].lease_id, chunk.leases[0].receiver_id = lease, receiver
    return chunk


def foreign() -> EmbeddingChunk:
    """Of a request that nobody made here, at an encoder that nobody should call."""
    chunk = ready(DATA)
    chunk.request_id, chunk.encoder.instance_id, chunk.encoder.grpc_target = "another", "2" * 32, "127.0.0.1:1"
    return chunk


def formless() -> EmbeddingChunk:
    """Neither LAYOUT nor READY."""
    chunk = ready(DATA)
    chunk.ClearField("state")
    return chunk


@pytest.mark.parametrize(
    ("chunks", "given_back"),
    [
        ([layout(40, 8), ready(rows(39, 8))], {LEASE}),
        ([layout(40, 8, 0, 2), leased(ready(rows(39, 8), 0, 2), OTHER), ready(DATA, 1, 2)], {OTHER, LEASE}),
        ([foreign()], {LEASE}),
        ([formless(), leased(ready(DATA), OTHER)], {LEASE, OTHER}),
        ([ready(DATA), leased(ready(DATA), OTHER)], {OTHER}),
        ([ready(DATA), ready(DATA)], set()),
    ],
    ids=["contradiction", "and what came with it", "foreign", "formless", "twice", "twice, with one lease"],
)
async def test_f13_a_call_gives_back_what_it_refuses(chunks: Sequence[EmbeddingChunk], given_back: set[bytes]) -> None:
    """A READY that was handed out is its taker's, also if the encoder tells of the same lease again."""
    encoder = ScriptedEncoder(chunks, payload=DATA.tobytes)
    items = [image(b"file")] * chunks[0].num_parts
    async with encoder.serve() as target, EncoderClient(target, INLINE) as client:
        async with client.encode(items) as call:
            with pytest.raises(ChunkError):
                async for _ in call:
                    pass
        assert encoder.given_back == given_back
        async with client.encode(items) as call:
            with pytest.raises(ChunkError):
                await call.embeddings()
        everything = {lease.lease_id for chunk in chunks for lease in chunk.leases}
        assert encoder.given_back == everything


async def test_f13_a_part_that_is_encoded_again_and_refused_is_given_back() -> None:
    """The pool stalls, the lease goes back, and the second answer contradicts itself."""
    encoder = ScriptedEncoder([ready(DATA)], payload=DATA.tobytes)
    pool = EmbeddingPool(4096, patience=0.05)
    async with encoder.serve() as target, EncoderClient(target, INLINE, pool=pool) as client:
        blocker = pool.ask("blocker", [4096], 60.0)
        async with client.encode([image(b"file")], timeout=30) as call:
            reading = asyncio.create_task(call.embeddings())
            async with asyncio.timeout(20):
                await encoder.released.wait()
            assert encoder.given_back == {LEASE}
            encoder.chunks = [leased(ready(DATA), OTHER), leased(ready(DATA), b"a third lease...")]
            blocker.result().close()
            with pytest.raises(ChunkError, match="ended twice"):
                await reading
        assert encoder.given_back == {LEASE, OTHER, b"a third lease..."}


@pytest.mark.parametrize("in_place", [True, False], ids=["in place", "read"])
async def test_f13_a_read_gives_back_what_it_refuses(in_place: bool) -> None:
    encoder = ScriptedEncoder(payload=DATA.tobytes)
    settings = ClientSettings(expected_fingerprint=bytes(32))
    async with encoder.serve() as target, EncoderClient(target, settings) as client:
        read = client.read_in_place if in_place else client.read
        unfit, unbounded = ready(DATA), leased(ready(DATA), OTHER)
        unbounded.ClearField("checksum")
        for chunk in (unfit, unbounded):
            chunk.encoder.grpc_target = target
            with pytest.raises(ChunkError):
                await read(chunk)
        assert encoder.given_back == {LEASE, OTHER}
        assert encoder.fetches == 0


async def test_f13_a_subscription_gives_back_what_it_refuses() -> None:
    good, bad = leased(ready(DATA, 0, 2), LEASE, "lm"), leased(ready(rows(39, 8), 1, 2), OTHER, "lm")
    bad.encoder.instance_id, bad.encoder.grpc_target = "", ""
    contradicts = EmbeddingChunk()
    contradicts.CopyFrom(good)
    contradicts.ClearField("locators")  # and has the lease that was handed out
    encoder = ScriptedEncoder([layout(40, 8, 1, 2), bad, good, contradicts])
    settings = ClientSettings(receiver="lm", transports=("inline",))
    async with (
        encoder.serve() as target,
        EncoderClient(target, settings) as client,
        client.subscribe() as subscription,
    ):
        seen = []
        async for event in subscription:
            if isinstance(event, Synced):
                break
            seen.append(event)
        assert [type(event) for event in seen] == [Layout, PartFailed, Layout, Ready, PartFailed]
        assert encoder.given_back == {OTHER}


async def test_an_answer_that_is_left_gives_back_what_it_has_begun_to_read() -> None:
    """One part is refused, and the caller of the answer has gone: the read of the other never makes a step."""
    encoder = ScriptedEncoder(payload=DATA.tobytes)
    settings = ClientSettings(receiver="lm", transports=("inline",))
    inbox = Inbox(1)
    parts = inbox.open("p")

    async def missing(part_idx: int, error: EncoderClientError) -> None:
        raise EncoderError(grpc.StatusCode.CANCELLED, "nobody listens")

    async with encoder.serve() as target, EncoderClient(target, settings) as client:
        for part, lease in enumerate((LEASE, OTHER)):
            inbox.take(client, Layout(layout(40, 8, part, 2)))
            chunk = leased(ready(DATA if part == 0 else rows(39, 8), part, 2), lease, "lm")
            chunk.encoder.grpc_target = target
            inbox.take(client, Ready(chunk))
        with pytest.raises(EncoderError, match="nobody listens"):
            async with Assembly(parts, 2, client.pool, 10.0, PATIENCE_SECONDS) as assembly:
                await assembly.collect(missing)
        assert LEASE in encoder.given_back
    assert encoder.fetches == 0
