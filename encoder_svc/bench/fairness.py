"""``bench fairness``: what one large prompt does to single images of others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic

from encoder_client import EncoderClient, image
from encoder_svc.bench.floors import FAIRNESS_RATIO
from encoder_svc.bench.load import BYPASS, Sample, encode_one, percentiles_ms, together
from encoder_svc.bench.photographs import Photographs
from encoder_svc.bench.result import Chart, FairnessResult, Series
from encoder_svc.bench.run import Run
from encoder_svc.bench.statistics import distribution

WARM_UP_SECONDS = 1.0


@dataclass(frozen=True)
class FairnessOptions:
    """What to measure."""

    image_size: int
    concurrency: int
    """Single images at a time that are measured, and as many others in the comparison."""
    prompt_images: int
    prompts: int
    """Large prompts, one after the other."""


async def measure_fairness(run: Run, options: FairnessOptions) -> FairnessResult:
    """Sends single images while a large prompt runs, then for as long while other single images do, by turns."""
    beside_prompt: list[Sample] = []
    beside_singles: list[Sample] = []
    with ExitStack() as stack:
        service = run.start(stack, "the server", run.service())
        async with run.client(service) as client:
            scene = _Scene(client, Photographs(options.image_size), options)
            with run.display.stage("warming up"):
                await scene.beside_singles(WARM_UP_SECONDS)
            with run.display.stage("singles beside a prompt, and beside singles", options.prompts) as advance:
                for _ in range(options.prompts):
                    begun = monotonic()
                    beside_prompt += await scene.beside_prompt()
                    beside_singles += await scene.beside_singles(monotonic() - begun)
                    advance(1)
    prompt_ms = percentiles_ms([sample.latency for sample in beside_prompt])
    singles_ms = percentiles_ms([sample.latency for sample in beside_singles])
    ratio = prompt_ms.p99 / singles_ms.p99
    return FairnessResult(
        **run.heading(),
        floors=[FAIRNESS_RATIO.check("ratio", ratio)],
        charts=[_chart(options, beside_prompt, beside_singles)],
        beside_prompt_ms=prompt_ms,
        beside_singles_ms=singles_ms,
        ratio=ratio,
        singles_beside_prompt=len(beside_prompt),
        singles_beside_singles=len(beside_singles),
        prompts=options.prompts,
    )


class _Scene:
    """Single images, and what runs beside them."""

    def __init__(self, client: EncoderClient, photographs: Photographs, options: FairnessOptions) -> None:
        self._client = client
        self._photographs = photographs
        self._options = options

    async def beside_prompt(self) -> list[Sample]:
        """Single images that were sent while one large prompt ran."""
        items = [image(self._photographs.next()) for _ in range(self._options.prompt_images)]
        runs = True

        async def prompt() -> None:
            nonlocal runs
            async with self._client.encode(items, cache_policy=BYPASS) as call:
                await call.embeddings()
            runs = False

        samples: list[Sample] = []
        callers = [self._caller(samples, lambda: runs) for _ in range(self._options.concurrency)]
        await together([prompt(), *callers])
        return samples

    async def beside_singles(self, seconds: float) -> list[Sample]:
        """Single images that were sent while as many others were."""
        end = monotonic() + seconds
        samples: list[Sample] = []
        others: list[Sample] = []
        callers = [
            self._caller(found, lambda: monotonic() < end)
            for found in (samples, others)
            for _ in range(self._options.concurrency)
        ]
        await together(callers)
        return samples

    async def _caller(self, samples: list[Sample], goes_on: Callable[[], bool]) -> None:
        while True:
            samples.append(await encode_one(self._client, self._photographs.next()))
            if not goes_on():
                return


def _chart(options: FairnessOptions, beside_prompt: Sequence[Sample], beside_singles: Sequence[Sample]) -> Chart:
    series = []
    for label, samples in (
        (f"beside a prompt of {options.prompt_images} images", beside_prompt),
        (f"beside {options.concurrency} other singles", beside_singles),
    ):
        values, shares = distribution([1000 * sample.latency for sample in samples])
        series.append(Series(label=label, x=list(values), y=shares))
    return Chart(
        title=f"single images of {options.image_size} px, {options.concurrency} at a time",
        x_label="milliseconds",
        y_label="share of requests",
        kind="lines",
        logarithmic=True,
        series=series,
    )
