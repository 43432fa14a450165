"""An encoder of a fleet is cut off at any moment, while callers come and leave: every prompt ends, and ends right."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import count
from random import Random

from encoder_client import (
    ClientSettings,
    Embedding,
    EncoderClientError,
    EncoderFleet,
    HealthState,
    PartError,
    image,
)
from epd.encoder.v1.media_pb2 import MediaItem
from tests.client.unreliable_encoder import UnreliableEncoder, payload_of
from tests.cutting_proxy import CuttingProxy, cutting_proxy
from tests.waiting import PATIENCE_SECONDS, eventually

FLEETS = 8
TIMEOUT = 150.0
SETTINGS = ClientSettings(transports=("inline",), read_timeout=PATIENCE_SECONDS)
RESULTS = 40
"""So many come of the prompts of one fleet, about."""


@asynccontextmanager
async def fleet_of_two(random: Random) -> AsyncIterator[tuple[EncoderFleet, CuttingProxy]]:
    """A fleet of two encoders, one of them behind a proxy."""
    cut, whole = UnreliableEncoder(), UnreliableEncoder()
    try:
        async with cutting_proxy(await cut.start()) as proxy:
            cut.target = proxy.target
            targets = [proxy.target, await whole.start()]
            async with EncoderFleet(targets, SETTINGS, poll_seconds=0.1, random=random) as fleet:
                await eventually(lambda: set(fleet.states.values()) == {HealthState.SERVING})
                yield fleet, proxy
    finally:
        await cut.stop()
        await whole.stop()


async def prompts_at_a_fleet(random: Random) -> list[str]:
    """How some prompts ended: an encoder is cut off after some of their results, and some are left."""
    async with fleet_of_two(random) as (fleet, proxy):
        plan: dict[int, Callable[[], object]] = {}
        moments = count()

        async def read(items: Sequence[MediaItem]) -> dict[int, bytes]:
            found: dict[int, bytes] = {}
            async with fleet.encode(items, timeout=TIMEOUT) as call, aclosing(call.results()) as results:
                async for result in results:
                    plan.get(next(moments), int)()
                    if isinstance(result, PartError):
                        raise result
                    if isinstance(result, Embedding):
                        found[result.chunk.part_idx] = result.numpy().tobytes()
            return found

        async def prompt(number: int, parts: int) -> str:
            items = [image(b"prompt %d, part %d" % (number, part_idx)) for part_idx in range(parts)]
            try:
                return "right" if await read(items) == dict(enumerate(map(payload_of, items))) else "wrong"
            except asyncio.CancelledError:
                return "left"
            except EncoderClientError as error:
                return str(error)

        def cut() -> None:
            proxy.open = random.random() < 0.5  # just the connections, or for good
            proxy.cut()

        prompts = [asyncio.create_task(prompt(number, random.randint(1, 6))) for number in range(6)]
        for left in random.sample(prompts, 2):
            plan[random.randrange(RESULTS)] = left.cancel
        plan[random.randrange(RESULTS)] = cut
        ends = await asyncio.gather(*prompts)
        assert not fleet._dispatchers
    return ends


async def test_every_prompt_ends_right_or_was_left() -> None:
    ends = await asyncio.gather(*(prompts_at_a_fleet(Random(seed)) for seed in range(FLEETS)))
    for seed, of_fleet in enumerate(ends):
        assert set(of_fleet) <= {"right", "left"}, f"seed {seed}"
