"""``bench throughput``: images, videos or sounds per second through the whole service, beside the plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from encoder_client import EncoderClient
from encoder_svc.bench.floors import THROUGHPUT_RATIO
from encoder_svc.bench.load import Load, Sample, Window, drive, encode_one
from encoder_svc.bench.media import Media, MediumName, make_media
from encoder_svc.bench.plain_loop import PlainLoop
from encoder_svc.bench.result import Chart, Pipeline, Round, Series, ThroughputResult
from encoder_svc.bench.run import Run
from encoder_svc.bench.statistics import mean_batch

PICTURES = 64


@dataclass(frozen=True)
class ThroughputOptions:
    """What to measure."""

    family: str
    """The ``model_type``."""
    medium: MediumName
    image_size: int
    """Side of images and of the frames of videos."""
    concurrency: int
    seconds: float
    """Of each side, over all rounds."""
    requests: int
    """Of each side, over all rounds, instead of seconds. 0: seconds count."""
    rounds: int


async def measure_throughput(run: Run, options: ThroughputOptions) -> ThroughputResult:
    """Runs the service and the plain loop by turns, each while the other is idle."""
    media = make_media(options.medium, options.image_size, PICTURES)
    window = Window.share(options.seconds, options.requests, options.rounds, options.concurrency)
    with ExitStack() as stack:
        service = run.start(stack, "the server", run.service())
        loop = run.start(stack, "the plain loop", PlainLoop(run.subject, options.medium, media))
        async with run.client(service) as client:
            loads, references = await _rounds(run, options, window, client, loop, media)
    images, seconds = sum(len(load.samples) for load in loads), sum(load.seconds for load in loads)
    reference_images, reference_seconds = sum(count for count, _ in references), sum(length for _, length in references)
    rate, reference_rate = images / seconds, reference_images / reference_seconds
    items, patches = mean_batch([(one.batch_items, one.batch_patches) for load in loads for one in load.samples])
    ratio = rate / reference_rate
    rounds = [
        Round(images_per_second=load.rate, reference_images_per_second=count / length)
        for load, (count, length) in zip(loads, references, strict=True)
    ]
    floor = None
    if (options.family, options.medium) == ("qwen2_5_vl", "image"):
        floor = THROUGHPUT_RATIO.get((run.subject.dtype, options.image_size, options.concurrency))
    return ThroughputResult(
        **run.heading(),
        floors=[] if floor is None else [floor.check("ratio", ratio)],
        charts=[_chart(options, rounds)],
        images_per_second=rate,
        reference_images_per_second=reference_rate,
        ratio=ratio,
        mean_batch_items=items,
        mean_batch_patches=patches,
        images=images,
        reference_images=reference_images,
        pipeline=_pipeline([one for load in loads for one in load.samples], seconds),
        rounds=rounds,
    )


async def _rounds(
    run: Run,
    options: ThroughputOptions,
    window: Window,
    client: EncoderClient,
    loop: PlainLoop,
    media: Media,
) -> tuple[list[Load], list[tuple[int, float]]]:
    async def send() -> Sample:
        return await encode_one(client, media.next())

    warm_up = window if window.requests else Window(requests=2 * options.concurrency)
    with run.display.stage("warming up"):
        await drive(send, options.concurrency, warm_up)
        await loop.run(images=min(8, warm_up.requests))
    loads, references = [], []
    with run.display.stage("service and plain loop by turns", 2 * options.rounds) as advance:
        for _ in range(options.rounds):
            loads.append(await drive(send, options.concurrency, window))
            advance(1)
            references.append(await loop.run(seconds=window.seconds, images=window.requests))
            advance(1)
    return loads, references


def _pipeline(samples: Sequence[Sample], seconds: float) -> Pipeline:
    """The work of the stages over the time that it took. A batch is told by each of its items."""
    prepare = sum(one.prepare for one in samples) / seconds
    forward = sum(one.forward / one.batch_items for one in samples) / seconds
    stage = sum(one.stage / one.batch_items for one in samples) / seconds
    read = sum(one.read for one in samples) / seconds
    return Pipeline(prepare=prepare, forward=forward, stage=stage, read=read, total=prepare + forward + stage + read)


def _chart(options: ThroughputOptions, rounds: list[Round]) -> Chart:
    x: list[float | str] = [f"round {number + 1}" for number in range(len(rounds))]
    service = [one.images_per_second for one in rounds]
    reference = [one.reference_images_per_second for one in rounds]
    return Chart(
        title=f"{options.family}, {options.medium}, {options.image_size} px, {options.concurrency} at a time",
        x_label="",
        y_label=f"{options.medium}s per second" if options.medium != "audio" else "sounds per second",
        kind="bars",
        series=[Series(label="service", x=x, y=service), Series(label="plain loop", x=x, y=reference)],
    )
