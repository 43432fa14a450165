"""``bench batching``: whether running images together is faster than one at a time, size by size."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from encoder_client import EncoderClient
from encoder_svc.bench.floors import BATCHING_GAIN
from encoder_svc.bench.load import Load, Sample, Window, drive, encode_one
from encoder_svc.bench.photographs import Photographs
from encoder_svc.bench.result import BatchingResult, BatchingSize, Chart, Series
from encoder_svc.bench.run import Run
from encoder_svc.bench.statistics import mean_batch


@dataclass(frozen=True)
class BatchingOptions:
    """What to measure."""

    image_sizes: Sequence[int]
    concurrency: int
    seconds: float
    """Of each side at each size, over all rounds."""
    requests: int
    """Instead of seconds. 0: seconds count."""
    rounds: int


async def measure_batching(run: Run, options: BatchingOptions) -> BatchingResult:
    """Runs two servers by turns that differ in the budget of a batch only: the default's, and one item's."""
    with ExitStack() as stack:
        batched = run.start(stack, "the server that batches", run.service())
        # A part that exceeds the budget runs alone, so this budget lets every part run alone.
        single = run.start(stack, "the server that does not", run.service(batch_patches="1"))
        async with run.client(batched) as together, run.client(single) as alone:
            sizes = {}
            for side in options.image_sizes:
                sizes[str(side)] = await _measure_size(run, options, side, together, alone)
    return BatchingResult(
        **run.heading(),
        floors=[BATCHING_GAIN.check(f"sizes.{side}.gain", size.gain) for side, size in sizes.items()],
        charts=[_chart(options, sizes)],
        sizes=sizes,
        smallest_gain=min(size.gain for size in sizes.values()),
    )


async def _measure_size(
    run: Run, options: BatchingOptions, side: int, together: EncoderClient, alone: EncoderClient
) -> BatchingSize:
    photographs = Photographs(side)
    # In one round each side has its turn.
    turns = ((together, options.concurrency), (alone, options.concurrency), (together, 1))
    loads: list[list[Load]] = [[] for _ in turns]
    with run.display.stage(f"{side} px", (options.rounds + 1) * len(turns)) as advance:
        for number in range(options.rounds + 1):
            for (client, concurrency), found in zip(turns, loads, strict=True):

                async def send(client: EncoderClient = client) -> Sample:
                    return await encode_one(client, photographs.next())

                if number == 0:
                    await drive(send, concurrency, Window(requests=2 * concurrency))
                else:
                    window = Window.share(options.seconds, options.requests, options.rounds, concurrency)
                    found.append(await drive(send, concurrency, window))
                advance(1)
    rates = [sum(len(load.samples) for load in found) / sum(load.seconds for load in found) for found in loads]
    items, _ = mean_batch([(one.batch_items, one.batch_patches) for load in loads[0] for one in load.samples])
    return BatchingSize(
        batched_images_per_second=rates[0],
        single_images_per_second=rates[1],
        sequential_images_per_second=rates[2],
        gain=rates[0] / rates[1],
        gain_over_sequential=rates[0] / rates[2],
        mean_batch_items=items,
    )


def _chart(options: BatchingOptions, sizes: dict[str, BatchingSize]) -> Chart:
    x: list[float | str] = [f"{side} px" for side in sizes]
    lines = {
        "over batches of one item": [size.gain for size in sizes.values()],
        "over one request at a time": [size.gain_over_sequential for size in sizes.values()],
    }
    return Chart(
        title=f"gain of batching, {options.concurrency} at a time",
        x_label="",
        y_label="times as many images per second",
        kind="bars",
        series=[Series(label=label, x=x, y=y) for label, y in lines.items()],
        bound=1.0,
    )
