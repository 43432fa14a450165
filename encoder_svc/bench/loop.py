"""``bench loop``: how soon a small call is answered while the server has its hands full."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from time import monotonic

from encoder_client import EncoderClient, image
from encoder_svc.bench.floors import RPC_BESIDE_FORWARD_P99_MS, RPC_BESIDE_STREAMS_P99_MS
from encoder_svc.bench.large_requests import LargeRequests
from encoder_svc.bench.load import Sample, encode_one, percentiles_ms, together
from encoder_svc.bench.photographs import Photographs
from encoder_svc.bench.result import Chart, LoopResult, Series
from encoder_svc.bench.run import Run
from encoder_svc.bench.statistics import distribution
from epd.encoder.v1.media_pb2 import MediaItem

CALLS_PER_SECOND = 100
CALL_TIMEOUT_SECONDS = 30.0
FIRST_SIDE, LAST_SIDE = 448, 4480
"""Pixels: between these, an image is sought whose forward takes as long as asked."""


@dataclass(frozen=True)
class LoopOptions:
    """What to measure."""

    calls: int
    """Behind each percentile."""
    forward_seconds: float
    streams: int
    """Requests at a time."""
    stream_bytes: int


async def measure_loop(run: Run, options: LoopOptions) -> LoopResult:
    """Calls ``GetServerInfo`` at a fixed pace: beside nothing, beside long forwards, and beside large requests."""
    with ExitStack() as stack:
        service = run.start(stack, "the server", run.service())
        async with run.client(service) as client:
            with run.display.stage("calls beside nothing"):
                await _pings(client, CALLS_PER_SECOND // 2)  # warm up
                idle = await _pings(client, options.calls)
            with run.display.stage(f"looking for a forward of {options.forward_seconds:g} s"):
                item = await _long_item(client, options.forward_seconds)
            forwards: list[Sample] = []
            with run.display.stage("calls beside forwards"):
                beside_forward = await _beside_forwards(client, options.calls, item, forwards)
            sender = run.start(
                stack,
                "the sender of large requests",
                LargeRequests(service.target, run.transports, options.streams, options.stream_bytes),
            )
            with run.display.stage("calls beside large requests"):
                beside_streams = await _pings(client, options.calls)
            streams_per_second = sender.stop()
    result = LoopResult(
        **run.heading(),
        floors=[],
        charts=[_chart(options, idle, beside_forward, beside_streams)],
        idle_ms=percentiles_ms(idle),
        beside_forward_ms=percentiles_ms(beside_forward),
        beside_streams_ms=percentiles_ms(beside_streams),
        forward_seconds=median(sample.forward for sample in forwards),
        streams_per_second=streams_per_second,
        calls=options.calls,
    )
    floors = [
        RPC_BESIDE_FORWARD_P99_MS.check("beside_forward_ms.p99", result.beside_forward_ms.p99),
        RPC_BESIDE_STREAMS_P99_MS.check("beside_streams_ms.p99", result.beside_streams_ms.p99),
    ]
    return result.model_copy(update={"floors": floors})


async def _pings(client: EncoderClient, calls: int) -> list[float]:
    """Calls at a fixed pace, whether or not the last one has been answered.

    Returns:
        For each the seconds from the moment that it was due: a call that this process sent late has waited too.
    """
    begun = monotonic()

    async def ping(due: float) -> float:
        await client.server_info(timeout=CALL_TIMEOUT_SECONDS)
        return monotonic() - due

    tasks = []
    for number in range(calls):
        due = begun + number / CALLS_PER_SECOND
        await asyncio.sleep(max(0.0, due - monotonic()))
        tasks.append(asyncio.create_task(ping(due)))
    return list(await asyncio.gather(*tasks))


async def _beside_forwards(client: EncoderClient, calls: int, item: MediaItem, done: list[Sample]) -> list[float]:
    """Calls at a fixed pace while one forward follows the other; the samples of these go into ``done``."""
    runs = True
    latencies: list[float] = []

    async def encode() -> None:
        while runs:
            done.append(await encode_one(client, item))

    async def measure() -> None:
        nonlocal runs
        latencies.extend(await _pings(client, calls))
        runs = False

    await together([encode(), measure()])
    return latencies


async def _long_item(client: EncoderClient, seconds: float) -> MediaItem:
    """An image whose forward alone takes at least this long, or the largest that is tried."""
    side = FIRST_SIDE
    while True:
        item = image(Photographs(side, count=1).next(), max_pixels=side * side)
        sample = await encode_one(client, item)
        if sample.forward >= seconds or side >= LAST_SIDE:
            return item
        # Between linear and quadratic in the patches, so in between the square and the fourth root of the time.
        growth = (seconds / max(sample.forward, 1e-4)) ** 0.4
        side = min(LAST_SIDE, 28 * -(-int(side * min(2.0, max(1.1, growth))) // 28))


def _chart(
    options: LoopOptions, idle: Sequence[float], beside_forward: Sequence[float], beside_streams: Sequence[float]
) -> Chart:
    series = []
    for label, seconds in (
        ("beside nothing", idle),
        (f"beside forwards of {options.forward_seconds:g} s", beside_forward),
        (f"beside {options.streams} requests of {options.stream_bytes / 1e6:g} MB", beside_streams),
    ):
        values, shares = distribution([1000 * value for value in seconds])
        series.append(Series(label=label, x=list(values), y=shares))
    return Chart(
        title=f"GetServerInfo, {CALLS_PER_SECOND} a second",
        x_label="milliseconds",
        y_label="share of calls",
        kind="lines",
        logarithmic=True,
        series=series,
    )
