"""Reads the parts of a prompt as they arrive, from whichever encoder, until all are here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Self

import grpc

from encoder_client.embedding import Embedding
from encoder_client.errors import EncoderClientError, EncoderError
from encoder_client.pool import EmbeddingPool, Reservation
from encoder_client.worker.inbox import Arrival, PromptParts
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk

Missing = Callable[[int, EncoderClientError], Awaitable[None]]
"""Is told of a part that will not come from where it was sent, and why."""


class Assembly:
    """One prompt's embeddings. Use it as an async context manager: what was not taken over is let go at the end.

    Space in the pool is reserved for all parts at once, as soon as the size of each is known, so that prompts that wait
    for space hold none.

    Args:
        parts: what arrives.
        num_parts: how many parts the prompt has.
        pool: where they are read to.
        space_timeout: seconds to wait for space.
    """

    def __init__(self, parts: PromptParts, num_parts: int, pool: EmbeddingPool, space_timeout: float) -> None:
        self._parts = parts
        self._num_parts = num_parts
        self._pool = pool
        self._space_timeout = space_timeout
        self._reservation: Reservation | None = None
        self._reserved: set[int] = set()
        self._reads: dict[int, asyncio.Task[Embedding]] = {}
        self._embeddings: dict[int, Embedding] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for read in self._reads.values():
            read.cancel()
        await asyncio.gather(*self._reads.values(), return_exceptions=True)
        self._embeddings.clear()
        if self._reservation is not None:
            self._reservation.close()

    @property
    def layouts(self) -> list[EmbeddingChunk]:
        """LAYOUT of every part, in order."""
        return [self._parts.layouts[part] for part in range(self._num_parts)]

    async def collect(self, missing: Missing) -> list[Embedding]:
        """Waits until all parts have been read.

        Args:
            missing: is told of each part that must be sent again.

        Returns:
            One embedding for each part, in order.

        Raises:
            PoolError: there is no space for them.
        """
        while len(self._embeddings) < self._num_parts:
            self._parts.changed.clear()
            await self._take_reads(missing)
            if self._reservation is None and len(self._parts.layouts) == self._num_parts:
                self._reservation = await self._reserve()
                self._reserved = set(range(self._num_parts))
            if self._reservation is not None:
                await self._start_reads(missing)
            for part in list(self._parts.faults):
                error = self._parts.faults.pop(part)
                if part not in self._reads and part not in self._embeddings:
                    await missing(part, error)
            if len(self._embeddings) < self._num_parts:
                await self._something()
        return [self._embeddings[part] for part in range(self._num_parts)]

    async def _reserve(self) -> Reservation:
        """Waits for space. If the pool stalls meanwhile, READY parts go back unread, and must be sent again."""
        changed, stalled = self._parts.changed, asyncio.Event()

        def stall() -> None:
            stalled.set()
            changed.set()

        sizes = [layout.nbytes for layout in self.layouts]
        space = self._pool.ask(self._parts.id, sizes, self._space_timeout, stall)
        space.add_done_callback(lambda _: changed.set())
        try:
            while not space.done():
                changed.clear()
                if stalled.is_set():
                    await self._give_back()
                await changed.wait()
        finally:
            space.cancel()
        return space.result()

    async def _give_back(self) -> None:
        arrivals = list(self._parts.ready.items())
        self._parts.ready.clear()
        for part, _ in arrivals:
            self._parts.faults[part] = EncoderError(
                grpc.StatusCode.RESOURCE_EXHAUSTED, "the worker had no memory for it, and gave its lease back"
            )
        await unread([arrival for _, arrival in arrivals])

    async def _start_reads(self, missing: Missing) -> None:
        assert self._reservation is not None
        for part in sorted(self._parts.ready):
            arrival = self._parts.ready.pop(part)
            fault = self._fault_of(part, arrival.chunk)
            if fault is not None or part in self._reads or part in self._embeddings:
                await arrival.client.abandon([arrival.chunk])
                if fault is not None:
                    await missing(part, fault)
                continue
            if part in self._reserved:
                self._reserved.discard(part)
                read = arrival.client.read_into(arrival.chunk, self._reservation.take(part, arrival.chunk.nbytes))
            else:  # its space went with a read that failed
                read = arrival.client.read(arrival.chunk)
            self._reads[part] = asyncio.create_task(read)

    def _fault_of(self, part: int, chunk: EmbeddingChunk) -> EncoderError | None:
        """Why a READY part cannot be used with what is known of the prompt."""
        layout = self._parts.layouts.get(part)
        if layout is None or chunk.num_parts != self._num_parts:
            return _unfit(f"it was sent as one of {chunk.num_parts} parts, and the prompt has {self._num_parts}")
        if (chunk.nbytes, chunk.token_count) > (layout.nbytes, layout.token_count):
            return _unfit("it was sent twice, with different media")
        if chunk.compatibility_fingerprint != self._parts.layouts[0].compatibility_fingerprint:
            return _unfit("other weights, dtype, preprocessing or width made it than another part of the prompt")
        return None

    async def _take_reads(self, missing: Missing) -> None:
        for part, read in list(self._reads.items()):
            if not read.done():
                continue
            del self._reads[part]
            try:
                self._embeddings[part] = read.result()
            except EncoderClientError as error:
                await missing(part, error)

    async def _something(self) -> None:
        """Waits until a part arrives or has been read."""
        changed = asyncio.create_task(self._parts.changed.wait())
        try:
            await asyncio.wait({changed, *self._reads.values()}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()


def unread(arrivals: list[Arrival]) -> Awaitable[object]:
    """Gives back the leases of parts that nobody will read."""
    return asyncio.gather(*(arrival.client.abandon([arrival.chunk]) for arrival in arrivals))


def _unfit(message: str) -> EncoderError:
    return EncoderError(grpc.StatusCode.FAILED_PRECONDITION, message)
