"""``bench soak``: many requests, some of them cancelled or abandoned, some under an engine that is killed.

Every part must end once, nothing may be held in the end, and no process may grow.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic

from encoder_client import EncoderClient
from encoder_svc.bench.display import Advance
from encoder_svc.bench.floors import NONE_LEFT, RECOVERY_SECONDS, RSS_REQUESTS, RSS_SLOPE_BYTES_PER_REQUEST
from encoder_svc.bench.load import together
from encoder_svc.bench.memory import MemoryRecord
from encoder_svc.bench.photographs import Photographs
from encoder_svc.bench.result import Chart, Ends, FloorCheck, Leaks, Series, SoakResult
from encoder_svc.bench.run import Run
from encoder_svc.bench.soak_callers import LEASE_SECONDS, SoakCallers
from encoder_svc.bench.soak_kills import EngineKiller

SETTLE_SECONDS = LEASE_SECONDS + 10.0
"""Leases of callers that left before they could read end by their time."""
ARENA_BYTES_PER_REQUEST = 1024
"""So small an arena is full of cached embeddings long before the second half, whose growth is judged."""
MIN_ARENA_BYTES, MAX_ARENA_BYTES = 2 << 20, 16 << 20
MEASURE_SECONDS = 0.2
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class SoakOptions:
    """What to do."""

    image_size: int
    concurrency: int
    requests: int
    cancel_share: float
    """Of the requests: half of these are cancelled by ``Cancel``, half by leaving the call."""
    kill_engine_every: int
    """Requests between two kills of the engine. 0: none."""
    seed: int


async def measure_soak(run: Run, options: SoakOptions) -> SoakResult:
    """Sends the requests, waits until nothing should be held, and looks at what is."""
    arena = min(MAX_ARENA_BYTES, max(MIN_ARENA_BYTES, options.requests * ARENA_BYTES_PER_REQUEST))
    with ExitStack() as stack:
        service = run.start(stack, "the server", run.service(arena_bytes=str(arena), restart_seconds="0.1"))
        record = MemoryRecord(service)
        async with run.client(service) as client:
            callers = SoakCallers(client, Photographs(options.image_size), options.cancel_share, options.seed)
            killer = EngineKiller(service, client, options.kill_engine_every)
            with run.display.stage("requests", options.requests) as advance:
                begun = monotonic()
                await _send_all(callers, killer, record, options, advance)
                seconds = monotonic() - begun
            with run.display.stage("waiting until nothing is held"):
                leaks = await _leaks(client)
    slopes = {name: None if value is None else round(value, 1) for name, value in _slopes(record, options).items()}
    recovery = max(killer.recoveries, default=None)
    ends = Ends(**{name: callers.ends[name] for name in Ends.model_fields})
    unexpected = callers.unexpected_failures(killed=killer.kills > 0)
    floors = [
        NONE_LEFT.check("requests_without_an_end", options.requests - sum(ends.model_dump().values())),
        NONE_LEFT.check("wrong_ends", callers.wrong_ends),
        NONE_LEFT.check("unexpected_failures", unexpected),
        *(NONE_LEFT.check(f"leaks.{name}", value) for name, value in leaks.model_dump().items()),
        *_memory_floors(slopes, options),
    ]
    if killer.kills:
        floors.append(RECOVERY_SECONDS.check("slowest_recovery_seconds", recovery))
    return SoakResult(
        **run.heading(),
        floors=floors,
        charts=[_chart(record)],
        requests=options.requests,
        requests_per_second=options.requests / seconds,
        ends=ends,
        requests_without_an_end=options.requests - sum(ends.model_dump().values()),
        from_cache=callers.from_cache,
        failed_by_reason=dict(callers.failures),
        unexpected_failures=unexpected,
        wrong_ends=callers.wrong_ends,
        leaks=leaks,
        rss_slope_bytes_per_request=slopes,
        kills=killer.kills,
        slowest_recovery_seconds=recovery,
        ok=all(check.met for check in floors),
    )


async def _send_all(
    callers: SoakCallers, killer: EngineKiller, record: MemoryRecord, options: SoakOptions, advance: Advance
) -> None:
    numbers = iter(range(options.requests))

    async def caller() -> None:
        for number in numbers:
            await callers.send(number)
            advance(1)

    async def kill() -> None:
        while callers.ended < options.requests:
            await killer.maybe_kill(callers.ended)
            await asyncio.sleep(_POLL_SECONDS)

    async def measure() -> None:
        while callers.ended < options.requests:
            record.measure(callers.ended)
            await asyncio.sleep(MEASURE_SECONDS)

    await together([kill(), measure(), *(caller() for _ in range(options.concurrency))])


async def _leaks(client: EncoderClient) -> Leaks:
    """What the server holds once it holds nothing, or when it has had the time to."""
    end = monotonic() + SETTLE_SECONDS
    while True:
        info = await client.server_info()
        leaks = Leaks(
            requests=info.load.requests,
            parts=sum(info.load.parts.values()),
            leases=info.load.leases,
            leased_bytes=sum(engine.leased_bytes for engine in info.engines),
            reserved_bytes=sum(engine.reserved_bytes for engine in info.engines),
            media_bytes=info.load.media_bytes,
        )
        if not any(leaks.model_dump().values()) or monotonic() > end:
            return leaks
        await asyncio.sleep(_POLL_SECONDS)


def _slopes(record: MemoryRecord, options: SoakOptions) -> dict[str, float | None]:
    return record.slopes(options.requests / 2)


def _memory_floors(slopes: dict[str, float | None], options: SoakOptions) -> list[FloorCheck]:
    if options.requests < RSS_REQUESTS:
        return []
    return [
        RSS_SLOPE_BYTES_PER_REQUEST.check(f"rss_slope_bytes_per_request.{name}", value)
        for name, value in slopes.items()
        # A process that was killed is measured up to its death and no further.
        if value is not None or not options.kill_engine_every
    ]


def _chart(record: MemoryRecord) -> Chart:
    series = [
        Series(label=name, x=[x for x, _ in points], y=[y / (1 << 20) for _, y in points])
        for name, lives in record.lives().items()
        for points in lives
    ]
    return Chart(
        title="resident memory", x_label="requests that have ended", y_label="MiB", kind="lines", series=series
    )
