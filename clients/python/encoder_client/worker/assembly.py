"""Reads the parts of a prompt as they arrive, from whichever encoder, until all are here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, Self

import grpc

from encoder_client.cancellation import answer
from encoder_client.embedding import Embedding
from encoder_client.errors import EncoderClientError, ReadError, from_rpc_error
from encoder_client.pool.embedding_pool import EmbeddingPool, Reservation
from encoder_client.prompts.multimodal_embedding import MultiModalEmbedding
from encoder_client.worker.inbox import Arrival, PromptParts
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2 import AcquireRequest

Missing = Callable[[int, EncoderClientError], Awaitable[None]]
"""Is told of a part that will not come from where it was sent, and why."""


class PartsLateError(EncoderClientError):
    """Parts of a prompt did not come, and nothing was told of them either."""


class Assembly:
    """One prompt's embeddings. Use it as an async context manager: what was not taken over is let go at the end.

    Space in the pool is reserved for all parts at once, as soon as the size of each is known. READY parts wait for it
    with their leases, unless the pool stalls (:mod:`encoder_client.pool.pool_stalls`): then these go back, and the
    embeddings are asked for again, by ``Acquire``, when there is space.

    Args:
        parts: what arrives.
        num_parts: how many parts the prompt has.
        pool: where they are read to.
        space_timeout: seconds to wait for space.
        part_timeout: seconds to wait for parts of which nothing new is told. An encoder that is gone tells nothing, not
            even of what was READY there.
    """

    def __init__(
        self, parts: PromptParts, num_parts: int, pool: EmbeddingPool, space_timeout: float, part_timeout: float
    ) -> None:
        self._parts = parts
        self._num_parts = num_parts
        self._pool = pool
        self._space_timeout = space_timeout
        self._part_timeout = part_timeout
        self._prompt = MultiModalEmbedding(parts.id, num_parts)
        self._layouts: dict[int, EmbeddingChunk] = {}
        self._refused: set[tuple[int, str]] = set()
        """Parts and requests whose LAYOUT does not fit."""
        self._space: asyncio.Future[Reservation] | None = None
        self._reserved = set(range(num_parts))
        self._stalled = False
        self._given_back: dict[int, Arrival] = {}
        self._reads: dict[int, asyncio.Task[Embedding]] = {}
        self._reading: dict[int, Arrival] = {}
        """What they read."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        # One that is cancelled before its first step gives back nothing by itself; a second release does no harm.
        stopped = [self._reading[part] for part, read in self._reads.items() if read.cancel()]
        await asyncio.gather(*self._reads.values(), return_exceptions=True)
        self._reads.clear()
        await give_back(stopped)
        self._prompt.release()
        if self._space is not None and not self._space.cancel() and self._space.exception() is None:
            self._space.result().close()

    @property
    def layouts(self) -> list[EmbeddingChunk]:
        """LAYOUT of every part, in order."""
        return [self._layouts[part] for part in range(self._num_parts)]

    async def collect(self, missing: Missing) -> tuple[Embedding, ...]:
        """Waits until all parts have been read.

        Args:
            missing: is told of each part that must be sent again.

        Returns:
            One embedding for each part, in order.

        Raises:
            PoolError: there is no space for them.
            PartsLateError: some did not come.
        """
        while True:
            self._parts.changed.clear()
            await self._take_layouts(missing)
            await self._take_reads(missing)
            if self._space is None and len(self._layouts) == self._num_parts:
                sizes = [layout.nbytes for layout in self.layouts]
                self._space = self._pool.ask(self._parts.id, sizes, self._space_timeout, self._stall)
            if self._space is not None and self._space.done():
                await self._ask_again(missing)
                await self._start_reads(self._space.result(), missing)
            elif self._stalled:
                self._given_back |= self._parts.ready
                self._parts.ready.clear()
                await give_back(self._given_back.values())
            for part in list(self._parts.faults):
                error = self._parts.faults.pop(part)
                if part in self._prompt.missing and part not in self._reads:
                    await missing(part, error)
            if self._prompt.complete:
                return self._prompt.parts()
            await self._something()

    def _stall(self) -> None:
        self._stalled = True
        self._parts.changed.set()

    async def _take_layouts(self, missing: Missing) -> None:
        for part in sorted(self._parts.layouts.keys() - self._layouts.keys()):
            layout = self._parts.layouts[part]
            try:
                self._prompt.expect(layout)
            except EncoderClientError as error:
                # The part may come again, and then right.
                del self._parts.layouts[part]
                self._refused.add((part, layout.request_id))
                await missing(part, error)
            else:
                self._layouts[part] = layout

    async def _start_reads(self, space: Reservation, missing: Missing) -> None:
        for part in sorted(self._parts.ready.keys() - self._reads.keys()):
            arrival = self._parts.ready.pop(part)
            try:
                wanted = part in self._layouts and self._prompt.wants(arrival.chunk)
            except EncoderClientError as error:
                wanted = False
                if (part, arrival.chunk.request_id) not in self._refused:
                    await missing(part, error)
            if not wanted:
                await give_back([arrival])
            elif part in self._reserved:
                self._reserved.discard(part)
                slot = space.take(part, arrival.chunk.nbytes)
                self._read(part, arrival, arrival.client.read_into(arrival.chunk, slot))
            else:  # its space went with a read that failed
                self._read(part, arrival, arrival.client.read(arrival.chunk))

    def _read(self, part: int, arrival: Arrival, read: Coroutine[Any, Any, Embedding]) -> None:
        self._reading[part] = arrival
        self._reads[part] = asyncio.create_task(read)

    async def _take_reads(self, missing: Missing) -> None:
        for part, read in list(self._reads.items()):
            if not read.done():
                continue
            del self._reads[part]
            try:
                if read.cancelled():  # by nobody here; taken for a cancel of the prompt, it would end without a word
                    raise ReadError(f"the read of part {part} was cancelled")
                self._prompt.add(read.result())
            except EncoderClientError as error:
                if part not in self._parts.ready:  # else it came again meanwhile
                    await missing(part, error)

    async def _ask_again(self, missing: Missing) -> None:
        """Leases again what was given back. The answers come by the subscriptions, as everything does."""
        while self._given_back:
            part, arrival = self._given_back.popitem()
            chunk = arrival.chunk
            request = AcquireRequest(
                content_key=chunk.content_key, receivers=[arrival.client.settings.receiver], prompt_id=chunk.prompt_id,
                part_idx=part, num_parts=chunk.num_parts,
            )  # fmt: skip
            try:
                stub, timeout = arrival.client.stub, arrival.client.settings.read_timeout
                await answer(stub.acquire(request, timeout=timeout))
            except grpc.aio.AioRpcError as error:
                await missing(part, from_rpc_error(error))

    async def _something(self) -> None:
        """Waits until a part arrives or has been read, or there is space. The two last have limits of their own."""
        changed = asyncio.create_task(self._parts.changed.wait())
        waits: set[asyncio.Future[object]] = {changed, *self._reads.values()}  # type: ignore[arg-type] # only waited for
        if self._space is not None and not self._space.done():
            waits.add(self._space)  # type: ignore[arg-type]
        timeout = self._part_timeout if len(waits) == 1 else None
        try:
            done, _ = await asyncio.wait(waits, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            changed.cancel()
        if not done:
            late = ", ".join(str(part) for part in self._prompt.missing)
            raise PartsLateError(
                f"nothing was told of the prompt for {timeout:g} s, and parts {late} are not here: the encoder that "
                "had them may be gone, or they were never sent; ask again, and send them again (setting: part_seconds)"
            )


async def give_back(arrivals: Iterable[Arrival]) -> None:
    """Gives back the leases of parts that nobody will read, or not now."""
    await asyncio.gather(*(arrival.client.abandon([arrival.chunk]) for arrival in arrivals))
