"""The reads of some parts of a prompt, into memory that is reserved for all of them at once.

As long as the pool has no space, READY parts wait with their leases. If the pool stalls meanwhile
(:mod:`encoder_client.pool.pool_stalls`), these leases go back, since their slots may be what the pool waits for. Once
there is space, the embeddings are asked for again: by their content key, and those that are gone by then by their
media. Whoever has space gives back nothing unread, so each part is asked for again once at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import grpc

from encoder_client import chunk_checks
from encoder_client.cancellation import answer
from encoder_client.embedding import Embedding
from encoder_client.errors import ChunkError, EncoderError, ReadError, from_rpc_error
from encoder_client.pool.embedding_pool import Reservation, Slot
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2 import AcquireRequest

if TYPE_CHECKING:
    from encoder_client.client import EncoderClient

Read = Callable[[EmbeddingChunk, Slot], Coroutine[Any, Any, Embedding]]
EncodeAgain = Callable[[EmbeddingChunk], Coroutine[Any, Any, EmbeddingChunk]]


class PartReads:
    """Reads parts as they become READY. Call :meth:`close` in any case.

    Args:
        client: its pool takes the embeddings, and its leases are used.
        parts: their ``part_idx``, in the order of the sizes and of the results.
        read: reads a READY chunk into its memory, and gives its lease back.
        encode_again: has the part of a READY chunk encoded once more, and returns the new chunk. Called if a lease went
            back and the encoder does not have the embedding any more.
    """

    def __init__(self, client: EncoderClient, parts: Sequence[int], read: Read, encode_again: EncodeAgain) -> None:
        self._client = client
        self._parts = list(parts)
        self._read = read
        self._encode_again = encode_again
        self._space: asyncio.Future[Reservation] | None = None
        self._held: dict[int, EmbeddingChunk] = {}
        self._given_back: dict[int, EmbeddingChunk] = {}
        self._reads: dict[int, asyncio.Task[Embedding]] = {}
        self._returns: set[asyncio.Task[None]] = set()
        self._stalled = False

    @property
    def begun(self) -> bool:
        """The read of every part has begun."""
        return len(self._reads) == len(self._parts)

    @property
    def reads(self) -> dict[int, asyncio.Task[Embedding]]:
        """The reads that have begun, by ``part_idx``."""
        return dict(self._reads)

    def reserve(self, prompt_id: str, sizes: Sequence[int]) -> asyncio.Future[Reservation]:
        """Asks for the memory of all parts, unless that was done; :meth:`offer` goes on when the result is done.

        Raises:
            PoolError: they are larger than the pool.
        """
        if self._space is None:
            self._space = self._client.pool.ask(prompt_id, sizes, self._client.settings.read_timeout, self._stall)
        return self._space

    def offer(self, ready: Iterable[EmbeddingChunk]) -> None:
        """Takes the READY chunks that are new, and begins what can be begun.

        Raises:
            PoolError: no space came free in time.
        """
        for chunk in ready:
            if self._is_new(chunk):
                self._held[chunk.part_idx] = chunk
        if self._space is not None and self._space.done():
            self._begin(self._space.result())
        elif self._stalled:
            self._give_back()

    async def results(self) -> list[Embedding]:
        """The embeddings, in the order of the parts, each of which has begun."""
        return [await self._reads[part] for part in self._parts]

    async def close(self, ready: Iterable[EmbeddingChunk]) -> None:
        """Ends reads that run, and lets go of the memory and of the leases of what nobody will read.

        Args:
            ready: all READY chunks that came.
        """
        # One that is cancelled before its first step releases nothing by itself; a second release does no harm.
        stopped = {part for part, task in self._reads.items() if task.cancel()}
        reads = list(self._reads.values())
        unread = [chunk for chunk in ready if chunk.part_idx in self._held.keys() | stopped or self._is_new(chunk)]
        self._reads.clear()  # a traceback must not keep the memory of what was read
        if self._space is not None and not self._space.cancel() and self._space.exception() is None:
            self._space.result().close()
        if running := [task for task in (*reads, *self._returns) if not task.done()]:
            await asyncio.wait(running)
        if sum(task.exception() is not None for task in reads if not task.cancelled()):
            reads.clear()
            await asyncio.sleep(0)  # until its next turn the loop holds what failed, and with it the memory
        await self._client.abandon(unread)

    def _is_new(self, chunk: EmbeddingChunk) -> bool:
        part = chunk.part_idx
        return part not in self._held and part not in self._given_back and part not in self._reads

    def _stall(self) -> None:
        self._stalled = True
        self._give_back()

    def _give_back(self) -> None:
        if self._held:
            task = asyncio.create_task(self._client.abandon(list(self._held.values())))
            self._returns.add(task)
            task.add_done_callback(self._returns.discard)
            self._given_back |= self._held
            self._held.clear()

    def _begin(self, space: Reservation) -> None:
        for index, part in enumerate(self._parts):
            if (chunk := self._held.pop(part, None)) is not None:
                self._reads[part] = asyncio.create_task(self._read(chunk, space.take(index, chunk.nbytes)))
            elif (chunk := self._given_back.pop(part, None)) is not None:
                self._reads[part] = asyncio.create_task(self._read_again(chunk, index, space))

    async def _read_again(self, chunk: EmbeddingChunk, index: int, space: Reservation) -> Embedding:
        try:
            again = await self._lease_again(chunk)
        except EncoderError:
            again = await self._encode_again(chunk)
        try:
            chunk_checks.check_ready(again)
            chunk_checks.check_same_content(again, chunk)
        except ChunkError:
            await self._client.abandon([again])
            raise
        # Only now: until the embedding is there, others must see that this prompt waits for an encoder.
        return await self._read(again, space.take(index, again.nbytes))

    async def _lease_again(self, chunk: EmbeddingChunk) -> EmbeddingChunk:
        acquiring = asyncio.create_task(self._acquire(chunk))
        try:
            return await asyncio.shield(acquiring)
        except asyncio.CancelledError:
            acquiring.add_done_callback(self._let_go)  # a lease may be on its way that nobody else knows of
            raise

    def _let_go(self, acquiring: asyncio.Task[EmbeddingChunk]) -> None:
        if not acquiring.cancelled() and acquiring.exception() is None:
            task = asyncio.create_task(self._client.abandon([acquiring.result()]))
            self._returns.add(task)
            task.add_done_callback(self._returns.discard)

    async def _acquire(self, chunk: EmbeddingChunk) -> EmbeddingChunk:
        # For the caller of Acquire: what is leased to a named receiver is told on its subscription, too.
        request = AcquireRequest(
            content_key=chunk.content_key,
            receivers=[""],
            prompt_id=chunk.prompt_id,
            part_idx=chunk.part_idx,
            num_parts=chunk.num_parts,
        )
        stub = self._client.connections.stub_of(chunk.encoder)
        try:
            again = (await answer(stub.acquire(request, timeout=self._client.settings.read_timeout))).chunk
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        again.request_id = chunk.request_id
        for lease in again.leases:
            lease.receiver_id = self._client.settings.receiver
        return again


async def gone(chunk: EmbeddingChunk) -> EmbeddingChunk:
    """The ``encode_again`` of whoever does not have the media."""
    raise ReadError(
        f"the embedding of part {chunk.part_idx} is gone: its lease went back while the pool was full, and the encoder "
        "needed the memory; ask for it again, or give the pool more"
    )
