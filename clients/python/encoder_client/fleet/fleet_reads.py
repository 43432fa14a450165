"""Reads the embeddings of a prompt at a fleet, as they get READY."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from functools import partial
from typing import TYPE_CHECKING

from encoder_client.client import EncoderClient
from encoder_client.embedding import Embedding
from encoder_client.errors import PartError, ReadError
from encoder_client.events import Layout
from encoder_client.part_reads import PartReads
from encoder_client.pool.embedding_pool import Reservation, Slot
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk

if TYPE_CHECKING:
    from encoder_client.fleet.fleet_call import FleetCall

Result = Layout | Embedding | PartError


class FleetReads:
    """What becomes of the parts of one call, read into the pool.

    Args:
        call: the call.
        client: reads, and has the pool.
    """

    def __init__(self, call: FleetCall, client: EncoderClient) -> None:
        self._call = call
        self._client = client
        self._results: asyncio.Queue[Result | BaseException | None] = asyncio.Queue()
        self._reads: PartReads | None = None
        self._laid_out: set[int] = set()
        self._begun: set[int] = set()
        self._open = set(call.parts)

    async def results(self) -> AsyncGenerator[Result, None]:
        """See :meth:`FleetCall.results`."""
        events = asyncio.create_task(self._follow())
        try:
            while (result := await self._results.get()) is not None:
                if isinstance(result, BaseException) and not isinstance(result, PartError):
                    raise result
                yield result
                del result  # it is the caller's
        finally:
            events.cancel()
            await asyncio.gather(events, return_exceptions=True)
            ready = self._call.chunks.values()
            if self._reads is not None:
                await self._reads.close(ready)
            else:
                await self._client.abandon(list(ready))

    async def _follow(self) -> None:
        try:
            self._step()
            async for _ in self._call:
                self._step()
        except Exception as error:  # whoever waits for results learns it
            self._results.put_nowait(error)

    def _step(self) -> None:
        """Something has happened: tells what is new, and begins what can be begun."""
        for part_idx, chunk in self._call.layouts.items():
            if part_idx not in self._laid_out:
                self._laid_out.add(part_idx)
                self._results.put_nowait(Layout(chunk))
        failures = self._call.failures
        for part_idx in sorted(self._open & set(failures)):
            self._end(part_idx, failures[part_idx])
        if self._reads is None:
            self._reserve([part_idx for part_idx in self._call.parts if part_idx not in failures])
        if self._reads is not None:
            self._reads.offer(self._call.chunks.values())
            for part_idx, read in self._reads.reads.items():
                if part_idx not in self._begun:
                    self._begun.add(part_idx)
                    read.add_done_callback(partial(self._landed, part_idx))

    def _reserve(self, wanted: list[int]) -> None:
        """Asks for the space of all parts at once, as soon as the size of each is known."""
        known = {**self._call.layouts, **self._call.chunks}
        if wanted and set(wanted) <= set(known):
            self._reads = PartReads(self._client, wanted, self._read, self._encode_again)
            space = self._reads.reserve(self._call.prompt_id, [known[part_idx].nbytes for part_idx in wanted])
            space.add_done_callback(self._space_is_there)

    def _space_is_there(self, space: asyncio.Future[Reservation]) -> None:
        if space.cancelled():  # whoever waited has left
            return
        try:
            self._step()
        except Exception as error:  # such as that there is none: whoever waits for results learns it
            self._results.put_nowait(error)

    async def _read(self, chunk: EmbeddingChunk, slot: Slot) -> Embedding:
        try:
            return await self._client.read_into(chunk, slot, deadline=self._call.deadline(chunk.part_idx))
        except ReadError as error:
            lost = str(error)
        del slot  # a transfer that hangs may still write to it
        return await self._call.read(await self._call.again(chunk.part_idx, lost))

    async def _encode_again(self, chunk: EmbeddingChunk) -> EmbeddingChunk:
        return await self._call.again(chunk.part_idx)

    def _landed(self, part_idx: int, read: asyncio.Task[Embedding]) -> None:
        # However it ended: whoever waits for results would wait for ever for one that is not told.
        cancelled = ReadError(f"the read of part {part_idx} was cancelled") if read.cancelled() else None
        self._end(part_idx, cancelled or read.exception() or read.result())

    def _end(self, part_idx: int, result: Embedding | BaseException) -> None:
        self._open.discard(part_idx)
        self._results.put_nowait(result)
        if not self._open:
            self._results.put_nowait(None)
