"""The events of one prompt, merged from the calls to several encoders."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace

import grpc

from encoder_client import chunk_checks
from encoder_client.errors import EncoderError, PartError
from encoder_client.events import Accepted, Complete, Event, Layout, PartCancelled, PartFailed, Ready
from encoder_client.fleet.fleet_prompt import Prompt
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk

LEFT = "the call was left"


class FleetEvents:
    """A :class:`~encoder_client.fleet.fleet_prompt.Sink` that gives what it is told the order of one call.

    ``Accepted`` comes once, for each part at most one ``Layout`` and exactly one end, and ``Complete`` last. A part
    that was READY and is asked for again has no second event: whoever asked gets its chunk.

    Args:
        prompt: whose events they are.
    """

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._loop = asyncio.get_running_loop()
        self._begun = self._loop.time()
        self.first: Accepted | None = None
        self.layouts: dict[int, EmbeddingChunk] = {}
        self.chunks: dict[int, EmbeddingChunk] = {}
        """READY, the newest of each part."""
        self.failures: dict[int, PartError] = {}
        self.complete: Complete | None = None
        self.unseen: deque[Event] = deque()
        self.orphans: list[EmbeddingChunk] = []
        """READY, and nobody waits for them any more."""
        self._counts = dict.fromkeys(("ready", "failed", "cancelled", "from_cache"), 0)
        self._refusal: EncoderError | None = None
        self._left = False
        self._news = asyncio.Event()
        self._replacements: dict[int, asyncio.Future[EmbeddingChunk]] = {}

    async def next(self) -> Event:
        """The next event.

        Raises:
            StopAsyncIteration: there was the last one.
            EncoderError: nothing can be asked of the fleet, or the call was left before all was told.
        """
        while not self.unseen:
            if self._refusal is not None:
                raise self._refusal
            if self.complete is not None:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self.unseen.popleft()

    def check_not_left(self, part_idx: int) -> None:
        """Somebody is about to ask for a part once more.

        Raises:
            PartError: the call was left, so nobody would answer.
        """
        if self._left:
            raise self._left_open(part_idx)

    async def replacement(self, part_idx: int) -> EmbeddingChunk:
        """The next READY of a part that has been READY.

        Raises:
            PartError: there will be none, also because the call was left.
        """
        waiter: asyncio.Future[EmbeddingChunk] = self._loop.create_future()
        self._replacements[part_idx] = waiter
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.orphans.append(waiter.result())
            raise
        finally:
            # Another may have asked for the part once more, after the answer came and before this went on.
            if self._replacements.get(part_idx) is waiter:
                del self._replacements[part_idx]

    def close(self) -> None:
        """Nothing more will be told: the call was left. Whoever still waits in another task learns it.

        What was READY and not seen joins the orphans.
        """
        self._left = True
        if self.unseen or self.complete is None:
            self.refused(EncoderError(grpc.StatusCode.CANCELLED, LEFT))
        self.orphans += [event.chunk for event in self.unseen if isinstance(event, Ready)]
        self.unseen.clear()
        for part_idx in list(self._replacements):
            if (waiter := self._waiter(part_idx)) is not None:
                waiter.set_exception(self._left_open(part_idx))

    def accepted(self, accepted: Accepted) -> None:
        """See :class:`~encoder_client.fleet.fleet_prompt.Sink`, as for the methods below."""
        if self.first is None:
            self.first = replace(accepted, request_id=self._prompt.request_id)
            self._tell(self.first)

    def check(self, chunk: EmbeddingChunk) -> None:
        """Compares a chunk with what an earlier try told of its part."""
        earlier = self.chunks.get(chunk.part_idx) or self.layouts.get(chunk.part_idx)
        if earlier is not None:
            chunk_checks.check_replaces(chunk, earlier)

    def layout(self, chunk: EmbeddingChunk) -> None:
        """The first is told."""
        if chunk.part_idx not in self.layouts:
            self.layouts[chunk.part_idx] = chunk
            self._tell(Layout(chunk))

    def ready(self, chunk: EmbeddingChunk) -> None:
        """The first is told; a later one goes to whoever waits for it."""
        part_idx = chunk.part_idx
        again = part_idx in self.chunks
        self.chunks[part_idx] = chunk
        if not again:
            self._counts["from_cache"] += chunk.from_cache
            self._end("ready", Ready(chunk))
        elif (waiter := self._waiter(part_idx)) is not None:
            waiter.set_result(chunk)
        else:
            self.orphans.append(chunk)

    def failed(self, part_idx: int, error: EncoderError) -> None:
        """The part's end, unless it was READY before."""
        event = PartFailed(self._prompt.prompt_id, self._prompt.request_id, part_idx, error)
        self._lose(part_idx, error, "failed", event)

    def cancelled(self, part_idx: int) -> None:
        """The part's end, unless it was READY before."""
        error = EncoderError(grpc.StatusCode.CANCELLED, "the part was cancelled")
        event = PartCancelled(self._prompt.prompt_id, self._prompt.request_id, part_idx)
        self._lose(part_idx, error, "cancelled", event)

    def refused(self, error: EncoderError) -> None:
        """Ends the events."""
        self._refusal = error
        self._news.set()

    def _lose(self, part_idx: int, error: EncoderError, how: str, event: Event) -> None:
        failure = PartError(self._prompt.prompt_id, part_idx, error)
        if part_idx not in self.chunks:
            self.failures[part_idx] = failure
            self._end(how, event)
        elif (waiter := self._waiter(part_idx)) is not None:
            waiter.set_exception(failure)

    def _left_open(self, part_idx: int) -> PartError:
        return PartError(self._prompt.prompt_id, part_idx, EncoderError(grpc.StatusCode.CANCELLED, LEFT))

    def _waiter(self, part_idx: int) -> asyncio.Future[EmbeddingChunk] | None:
        waiter = self._replacements.get(part_idx)
        return None if waiter is None or waiter.done() else waiter

    def _end(self, how: str, event: Event) -> None:
        self._counts[how] += 1
        self._tell(event)
        if len(self.chunks) + len(self.failures) == len(self._prompt.items):
            self.complete = Complete(**self._counts, total_seconds=self._loop.time() - self._begun)
            self._tell(self.complete)

    def _tell(self, event: Event) -> None:
        self.unseen.append(event)
        self._news.set()
