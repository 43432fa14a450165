"""One prompt at a fleet of encoders, from the caller's side."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from types import TracebackType
from typing import Self

import grpc

from encoder_client.client import EncoderClient
from encoder_client.embedding import Embedding
from encoder_client.errors import EncoderError, PartError, ReadError
from encoder_client.events import Accepted, Complete, Event, Layout
from encoder_client.fleet.dispatcher import Dispatcher
from encoder_client.fleet.fleet_events import FleetEvents
from encoder_client.fleet.fleet_prompt import Prompt, Sink
from encoder_client.fleet.fleet_reads import FleetReads
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk

Begin = Callable[[Prompt, Sink], Dispatcher]
"""Begins to have a prompt encoded."""


class FleetCall:
    """A prompt that is encoded while its ``async with`` runs: leaving cancels the parts that are not READY.

    Another task that waits for it meanwhile is told ``CANCELLED``: by a :class:`PartError` if it asked for one part.

    It tells the events of an :class:`EncodeCall`, in the same order: ``Accepted`` when the first encoder has taken
    something, for each part at most one ``Layout`` and exactly one end, ``Complete`` at last. What an encoder refuses
    is told as the failure of the parts that were sent to it. Chunks carry the ids of the calls that made them, which
    begin with that of this one. Made by :meth:`EncoderFleet.encode`.

    Example:
        >>> async with fleet.encode([image(a), image(b)], timeout=20) as call:
        ...     async for result in call.results():
        ...         match result:
        ...             case Layout(chunk): ...  # expand placeholders
        ...             case Embedding(): ...  # prefill this part
        ...             case PartError(): ...
    """

    def __init__(self, client: EncoderClient, prompt: Prompt, begin: Begin, end: Callable[[Dispatcher], None]) -> None:
        self._client = client
        self._prompt = prompt
        self._begin = begin
        self._end = end
        self._events = FleetEvents(prompt)
        self._dispatcher: Dispatcher | None = None

    @property
    def prompt_id(self) -> str:
        """The prompt's id, given or made."""
        return self._prompt.prompt_id

    @property
    def parts(self) -> list[int]:
        """The ``part_idx`` of the items, in their order."""
        return list(self._prompt.items)

    def deadline(self, part_idx: int) -> float:
        """When nobody wants a part any more, in the time of the event loop; ``inf`` for never."""
        return self._prompt.deadlines[part_idx]

    @property
    def accepted(self) -> Accepted | None:
        """Who took the first parts, once it is known."""
        return self._events.first

    @property
    def layouts(self) -> dict[int, EmbeddingChunk]:
        """The LAYOUT chunks so far, by ``part_idx``."""
        return dict(self._events.layouts)

    @property
    def chunks(self) -> dict[int, EmbeddingChunk]:
        """The READY chunks so far, by ``part_idx``; of a part that was asked for again the newest."""
        return dict(self._events.chunks)

    @property
    def failures(self) -> dict[int, PartError]:
        """Why parts failed or were cancelled, by ``part_idx``."""
        return dict(self._events.failures)

    @property
    def complete(self) -> Complete | None:
        """The last event, once every part has ended."""
        return self._events.complete

    async def __aenter__(self) -> Self:
        self._dispatcher = self._begin(self._prompt, self._events)
        self._dispatcher.wake()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._dispatcher is not None
        self._end(self._dispatcher)
        self._events.close()  # before anything is waited for: a cancel may end this here
        await self._dispatcher.close()
        await self._client.abandon(self._events.orphans)

    def __aiter__(self) -> Self:
        if self._dispatcher is None:
            raise RuntimeError("a call to a fleet runs inside `async with` only")
        return self

    async def __anext__(self) -> Event:
        return await self._events.next()

    async def embeddings(self) -> list[Embedding]:
        """Reads all embeddings, each as soon as it is READY, and waits for the last.

        Returns:
            One for each item, in the order of the items.

        Raises:
            PartError: a part failed or was cancelled, also after other encoders were asked. The others are let go.
            EncoderError: the fleet cannot serve the prompt.
            ReadError, PoolError: an embedding could not be read.
        """
        found: dict[int, Embedding] = {}
        async with aclosing(self.results()) as results:
            async for result in results:
                match result:
                    case Embedding():
                        found[result.chunk.part_idx] = result
                    case PartError():
                        raise result
        return [found[part_idx] for part_idx in self.parts]

    async def results(self) -> AsyncGenerator[Layout | Embedding | PartError, None]:
        """Tells the layouts, reads the embeddings, and tells both and the failures as they come.

        Space in the pool is reserved for all parts at once, as soon as the size of each is known. If the pool stalls
        before they have it, leases go back, and these embeddings are asked for again when there is space.

        Raises:
            EncoderError: the fleet cannot serve the prompt.
            ReadError, PoolError: an embedding could not be read.
        """
        async with aclosing(FleetReads(self, self._client).results()) as results:
            async for result in results:
                yield result

    async def read(self, chunk: EmbeddingChunk) -> Embedding:
        """Reads a READY chunk of this call, as :meth:`EncoderClient.read`. If it is lost, it is made once more.

        Raises:
            PartError: nobody could make it once more.
            ChunkError, PoolError: as there.
        """
        while True:
            try:
                return await self._client.read(chunk, deadline=self.deadline(chunk.part_idx))
            except ReadError as error:
                lost = str(error)
            chunk = await self.again(chunk.part_idx, lost)

    async def again(self, part_idx: int, lost: str = "") -> EmbeddingChunk:
        """Asks once more for a part that is READY, of the encoder that has it or another.

        Args:
            part_idx: the part.
            lost: why it cannot be read; empty: its lease was given back.

        Returns:
            The new READY chunk.

        Raises:
            PartError: it could not be made again, or the call was left.
        """
        assert self._dispatcher is not None
        self._events.check_not_left(part_idx)
        error = EncoderError(grpc.StatusCode.UNAVAILABLE, f"the embedding was lost before it was read: {lost}")
        if not self._dispatcher.again(part_idx, error if lost else None):
            raise PartError(self.prompt_id, part_idx, error)
        return await self._events.replacement(part_idx)
