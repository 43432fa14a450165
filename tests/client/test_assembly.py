"""A worker's prompt that waits for space in a pool that waits for encoders."""

from __future__ import annotations

import asyncio

import numpy as np

from encoder_client import EmbeddingPool, EncoderClient, EncoderClientError
from encoder_client.worker.assembly import Assembly
from encoder_client.worker.inbox import Arrival, PromptParts
from tests.client.chunks import layout, ready, rows
from tests.client.scripted_encoder import ScriptedEncoder
from tests.waiting import eventually

DATA = rows(40, 8)


async def test_f38_leases_go_back_when_the_pool_stalls_and_parts_are_sent_again() -> None:
    encoder = ScriptedEncoder(payload=DATA.tobytes)
    pool = EmbeddingPool(2 * DATA.nbytes, patience=0.01)
    async with (
        encoder.serve() as target,
        EncoderClient(target, pool=pool, transports=("inline",)) as client,
        await pool.reserve("somebody who waits for an encoder", [DATA.nbytes]) as other,
    ):
        arrivals = [Arrival(client, ready(DATA, part, 2)) for part in range(2)]
        for arrival in arrivals:
            arrival.chunk.encoder.grpc_target = target
        parts = PromptParts("p", {part: layout(40, 8, part, 2) for part in range(2)}, {0: arrivals[0]})
        told: list[int] = []

        async def missing(part: int, error: EncoderClientError) -> None:
            assert "gave its lease back" in str(error)
            told.append(part)
            parts.ready[part] = arrivals[part]  # it is sent again
            parts.changed.set()

        async with Assembly(parts, 2, pool, 600.0) as assembly:
            collecting = asyncio.create_task(assembly.collect(missing))
            await eventually(lambda: encoder.outcomes == ["ABANDONED"])
            parts.ready[1] = arrivals[1]  # too late for what has space
            parts.changed.set()
            await eventually(lambda: encoder.outcomes == ["ABANDONED"] * 2)
            assert told == []
            other.close()
            async with asyncio.timeout(30):
                embeddings = await collecting
        assert sorted(told) == [0, 1]
        for embedding in embeddings:
            np.testing.assert_array_equal(embedding.numpy(), DATA)
    assert encoder.outcomes == ["ABANDONED", "ABANDONED", "OK", "OK"]
