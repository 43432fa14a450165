"""Requests, and callers that keep a number of them in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Self

from encoder_client import EncoderClient, EncoderClientError, PartCancelled, PartError, PartFailed, Ready, image
from encoder_svc.bench.result import Percentiles
from encoder_svc.bench.statistics import percentile
from encoder_svc.errors import SetupError
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2 import CachePolicy
from epd.encoder.v1.media_pb2 import MediaItem

BYPASS = CachePolicy.CACHE_POLICY_BYPASS
USE = CachePolicy.CACHE_POLICY_USE
END_SECONDS = 120.0
"""A request that has not ended by then does not end."""


@dataclass(frozen=True)
class Sample:
    """One request of one image. Times in seconds; moments by the monotonic clock."""

    begun: float
    in_memory: float
    """When the checked bytes were in the caller's memory."""
    confirmed: float
    """When the encoder had confirmed the lease, and the rows were handed out."""
    prepare: float
    forward: float
    stage: float
    read: float
    batch_items: int
    batch_patches: int
    from_cache: bool

    @property
    def latency(self) -> float:
        """Until the bytes were in the caller's memory."""
        return self.in_memory - self.begun


async def encode_one(
    client: EncoderClient,
    source: bytes | MediaItem,
    *,
    policy: CachePolicy = BYPASS,
    request_id: str = "",
    lease_ttl: float | None = None,
) -> Sample:
    """Sends one image and reads its rows.

    Raises:
        PartError: the part failed or was cancelled.
        EncoderClientError: the call or the read failed.
    """
    item = source if isinstance(source, MediaItem) else image(source)
    begun = monotonic()
    sample: Sample | None = None
    async with client.encode(
        [item],
        cache_policy=policy,
        request_id=request_id,
        timeout=END_SECONDS,
        lease_ttl=lease_ttl,
        skip_layout=True,
    ) as call:
        async for event in call:
            match event:
                case Ready(chunk):
                    sample = await _read(client, chunk, begun)
                case PartFailed():
                    raise PartError(event.prompt_id, event.part_idx, event.error)
                case PartCancelled():
                    raise PartCancelledError
    if sample is None:
        raise EncoderClientError("the call ended without its part")
    return sample


class PartCancelledError(EncoderClientError):
    """The part was cancelled, as it was asked for."""


async def _read(client: EncoderClient, chunk: EmbeddingChunk, begun: float) -> Sample:
    reservation = await client.pool.reserve(chunk.prompt_id, [chunk.nbytes])
    read_begun = monotonic()
    embedding = await client.read_into(chunk, reservation.take(0))
    times = chunk.timings
    return Sample(
        begun=begun,
        in_memory=read_begun + embedding.read_seconds,
        confirmed=monotonic(),
        prepare=times.prepare.ToNanoseconds() / 1e9,
        forward=times.forward.ToNanoseconds() / 1e9,
        stage=times.stage.ToNanoseconds() / 1e9,
        read=embedding.read_seconds,
        batch_items=times.batch_items,
        batch_patches=times.batch_patches,
        from_cache=chunk.from_cache,
    )


@dataclass(frozen=True)
class Window:
    """How long a load is measured: for a time, or for a number of requests.

    By time, the requests that end between ``ramp`` and ``ramp + seconds`` are counted: callers are under way before and
    after. By number, all are, from the first to the last, filling and emptying the pipeline included.
    """

    seconds: float = 0.0
    requests: int = 0
    ramp: float = 0.0

    @classmethod
    def share(cls, seconds: float, requests: int, rounds: int, concurrency: int) -> Self:
        """One of ``rounds`` equal windows; ``requests`` wins over ``seconds`` unless it is 0."""
        if requests:
            return cls(requests=max(concurrency, -(-requests // rounds)))
        length = seconds / rounds
        return cls(seconds=length, ramp=min(1.0, length / 4))


@dataclass(frozen=True)
class Load:
    """What a window saw."""

    samples: Sequence[Sample]
    seconds: float

    @property
    def rate(self) -> float:
        """Requests per second."""
        return len(self.samples) / self.seconds


async def drive(send: Callable[[], Awaitable[Sample]], concurrency: int, window: Window) -> Load:
    """Keeps requests in flight, each caller sending its next as soon as its last has ended.

    Args:
        send: one request.
        concurrency: callers.
        window: how long.

    Raises:
        EncoderClientError: a request failed; the others are given up.
    """
    samples: list[Sample] = []
    left = window.requests
    begun = monotonic()
    end = begun + window.ramp + window.seconds

    async def caller() -> None:
        nonlocal left
        while left > 0 if window.requests else monotonic() < end:
            left -= 1
            samples.append(await send())

    await together([caller() for _ in range(concurrency)])
    if window.requests:
        return Load(samples, max(sample.confirmed for sample in samples) - begun)
    counted = [sample for sample in samples if begun + window.ramp <= sample.confirmed < end]
    if not counted:
        raise SetupError("no request ended inside a window; give more --seconds, or --requests instead")
    return Load(counted, window.seconds)


async def together(work: Sequence[Awaitable[None]]) -> None:
    """Runs all, and ends with the first error, after the others have been cancelled."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def percentiles_ms(seconds: Sequence[float]) -> Percentiles:
    """The p50 and p99 of durations, in milliseconds."""
    return Percentiles(p50=round(1000 * percentile(seconds, 0.50), 3), p99=round(1000 * percentile(seconds, 0.99), 3))
