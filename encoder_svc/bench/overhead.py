"""``bench overhead``: what a request costs beside preparing and forward, and what one costs that needs neither."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from encoder_client import EncoderClient
from encoder_svc.bench.floors import (
    CACHED_CONCURRENCY,
    CACHED_P50_MS,
    CACHED_REQUESTS_PER_SECOND,
    FIXED_OVERHEAD_P50_MS,
)
from encoder_svc.bench.load import USE, Sample, Window, drive, encode_one, percentiles_ms
from encoder_svc.bench.photographs import Photographs
from encoder_svc.bench.result import Chart, OverheadResult, Series
from encoder_svc.bench.run import Run
from encoder_svc.bench.statistics import distribution

RATE_REQUESTS = 10
"""Cached requests in the window for the rate, for each that is sent alone."""


@dataclass(frozen=True)
class OverheadOptions:
    """What to measure."""

    image_size: int
    requests: int
    """Behind each percentile, at concurrency 1."""
    concurrency: int
    """Of cached requests, for the rate."""


async def measure_overhead(run: Run, options: OverheadOptions) -> OverheadResult:
    """Sends new images one at a time, then images that the encoder holds: one at a time, and many."""
    photographs = Photographs(options.image_size)
    with ExitStack() as stack:
        service = run.start(stack, "the server", run.service())
        async with run.client(service) as client:
            computed = await _computed(run, options, client, photographs)
            alone, together, seconds = await _cached(run, options, client, photographs)
    overheads = [sample.latency - sample.prepare - sample.forward for sample in computed]
    cached = [*alone, *together]
    share = sum(sample.from_cache for sample in cached) / len(cached)
    result = OverheadResult(
        **run.heading(),
        floors=[],
        charts=[_chart(overheads, [sample.latency for sample in alone])],
        requests=len(computed),
        end_to_end_ms=percentiles_ms([sample.latency for sample in computed]),
        prepare_ms=percentiles_ms([sample.prepare for sample in computed]),
        forward_ms=percentiles_ms([sample.forward for sample in computed]),
        stage_ms=percentiles_ms([sample.stage for sample in computed]),
        fixed_overhead_ms=percentiles_ms(overheads),
        confirmed_overhead_ms=percentiles_ms(
            [sample.confirmed - sample.begun - sample.prepare - sample.forward for sample in computed]
        ),
        cached_ms=percentiles_ms([sample.latency for sample in alone]) if share == 1 else None,
        cached_confirmed_ms=percentiles_ms([one.confirmed - one.begun for one in alone]) if share == 1 else None,
        cached_requests_per_second=len(together) / seconds if share == 1 else None,
        cached_share=share,
    )
    checks = [
        FIXED_OVERHEAD_P50_MS.check("fixed_overhead_ms.p50", result.fixed_overhead_ms.p50),
        CACHED_P50_MS.check("cached_ms.p50", None if result.cached_ms is None else result.cached_ms.p50),
    ]
    if options.concurrency == CACHED_CONCURRENCY:
        rate = result.cached_requests_per_second
        checks.append(CACHED_REQUESTS_PER_SECOND.check("cached_requests_per_second", rate))
    return result.model_copy(update={"floors": checks})


async def _computed(
    run: Run, options: OverheadOptions, client: EncoderClient, photographs: Photographs
) -> Sequence[Sample]:
    samples = []
    warm_up = max(2, options.requests // 10)
    with run.display.stage("one new image at a time", warm_up + options.requests) as advance:
        for _ in range(warm_up + options.requests):
            samples.append(await encode_one(client, photographs.next()))
            advance(1)
    return samples[warm_up:]


async def _cached(
    run: Run, options: OverheadOptions, client: EncoderClient, photographs: Photographs
) -> tuple[Sequence[Sample], Sequence[Sample], float]:
    """Cached requests: those sent alone, those sent together, and the seconds that the latter took."""
    # One for each caller. The whole file is sent each time, as by somebody who does not know that it is held.
    held = [photographs.next() for _ in range(options.concurrency)]
    for file in held:
        await encode_one(client, file, policy=USE)
    alone = []
    warm_up = max(2, options.requests // 10)
    with run.display.stage("one cached image at a time", warm_up + options.requests) as advance:
        for _ in range(warm_up + options.requests):
            alone.append(await encode_one(client, held[0], policy=USE))
            advance(1)
    turn = 0

    async def send() -> Sample:
        nonlocal turn
        turn += 1
        return await encode_one(client, held[turn % len(held)], policy=USE)

    with run.display.stage(f"cached images, {options.concurrency} at a time"):
        await drive(send, options.concurrency, Window(requests=warm_up * options.concurrency))
        load = await drive(send, options.concurrency, Window(requests=RATE_REQUESTS * options.requests))
    return alone[warm_up:], load.samples, load.seconds


def _chart(overheads: Sequence[float], cached: Sequence[float]) -> Chart:
    series = []
    for label, seconds in (("fixed overhead of a new image", overheads), ("cached image, whole request", cached)):
        values, shares = distribution([1000 * value for value in seconds])
        series.append(Series(label=label, x=list(values), y=shares))
    return Chart(
        title="one request at a time",
        x_label="milliseconds",
        y_label="share of requests",
        kind="lines",
        logarithmic=True,
        series=series,
    )
