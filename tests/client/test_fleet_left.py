"""A call to a fleet that is left while other tasks wait for it: each of them ends, and is told why."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from math import inf
from typing import Any

import grpc
import pytest

from encoder_client import EncoderError, PartError, image
from encoder_client.fleet.fleet_call import FleetCall
from encoder_client.fleet.fleet_events import FleetEvents
from encoder_client.fleet.fleet_prompt import EncodeOptions, Prompt
from epd.encoder.v1.encoder_service_pb2 import CachePolicy, Delivery
from tests.client.chunks import ready, rows
from tests.client.test_fleet_faults import TIMEOUT, fleet_of
from tests.client.unreliable_encoder import UnreliableEncoder
from tests.waiting import PATIENCE_SECONDS, eventually

HOUR = 3600.0
"""No poll finds out meanwhile that an encoder says nothing."""
CANCELLED = grpc.StatusCode.CANCELLED


async def told(waiting: Coroutine[Any, Any, Any] | asyncio.Task[Any]) -> Exception | None:
    """What somebody who waits is told."""
    try:
        await asyncio.wait_for(waiting, PATIENCE_SECONDS)
    except Exception as error:
        return error
    return None


async def first_result(call: FleetCall) -> object:
    return await anext(call.results())


async def test_who_waits_for_events_or_results_is_told() -> None:
    silent = UnreliableEncoder()
    async with fleet_of([silent], poll_seconds=HOUR) as fleet:
        silent.silent = True
        for wait in (FleetCall.__anext__, first_result, FleetCall.embeddings):
            asked = len(silent.asked)
            async with fleet.encode([image(b"a")], timeout=TIMEOUT) as call:
                other = asyncio.create_task(wait(call))
                await eventually(lambda asked=asked: len(silent.asked) > asked)
            error = await told(other)
            assert isinstance(error, EncoderError)
            assert error.code is CANCELLED
        with pytest.raises(EncoderError, match="the call was left"):
            await asyncio.wait_for(anext(aiter(call)), PATIENCE_SECONDS)


async def test_who_waits_for_a_part_that_is_asked_for_again_is_told() -> None:
    encoder = UnreliableEncoder()
    async with fleet_of([encoder], poll_seconds=HOUR) as fleet:
        async with fleet.encode([image(b"a")], timeout=TIMEOUT) as call:
            await call.embeddings()
            encoder.silent = True
            other = asyncio.create_task(call.again(0))
            await eventually(lambda: len(encoder.asked) == 2)
        # Also who comes later: to ask again, or to read what was READY.
        for waiting in (other, call.again(0), call.again(0, "as a test wants it"), call.read(call.chunks[0])):
            error = await told(waiting)
            assert isinstance(error, PartError)
            assert error.part_idx == 0
        assert len(encoder.asked) == 2
    assert not encoder.leases


async def test_an_event_that_was_not_seen_is_seen_by_nobody_and_its_lease_goes_back() -> None:
    encoder = UnreliableEncoder()
    async with fleet_of([encoder]) as fleet:
        async with fleet.encode([image(b"a")], timeout=TIMEOUT) as call:
            await eventually(lambda: call.complete is not None)
        assert not encoder.leases
        with pytest.raises(EncoderError, match="the call was left"):
            await anext(aiter(call))


async def test_an_answer_that_has_just_come_takes_no_other_waiter_along() -> None:
    """A part may be read twice at a time, by an application: whoever asks second has a waiter of his own."""
    options = EncodeOptions(
        receivers=(),
        delivery=Delivery.DELIVERY_UNSPECIFIED,
        priority=0,
        cache_policy=CachePolicy.CACHE_POLICY_UNSPECIFIED,
        cache_salt=b"",
        lease_ttl=None,
        skip_layout=False,
    )
    events = FleetEvents(Prompt("p", "r", 1, {0: image(b"a")}, {0: inf}, options, {}))
    chunks = [ready(rows(seed=seed)) for seed in range(3)]
    events.ready(chunks[0])
    first = asyncio.create_task(events.replacement(0))
    await asyncio.sleep(0)
    events.ready(chunks[1])
    # The first has its answer, but goes on only after somebody else has begun to wait, and before that one is answered.
    asyncio.get_running_loop().call_soon(events.ready, chunks[2])
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await events.replacement(0) is chunks[2]
    assert await first is chunks[1]
    assert not events.orphans
