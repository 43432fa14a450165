"""One ``Encode`` call, from the caller's side."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc

from encoder_client import chunk_checks
from encoder_client.cancellation import Responses
from encoder_client.embedding import Embedding
from encoder_client.errors import ChunkError, EncoderError, PartError, from_rpc_error
from encoder_client.events import (
    Accepted,
    Complete,
    Event,
    Layout,
    PartCancelled,
    PartFailed,
    Ready,
    events_of,
    layout_of,
)
from encoder_client.part_reads import PartReads
from encoder_client.pool.embedding_pool import Reservation
from epd.encoder.v1 import encoder_service_pb2 as service
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2 import Delivery

if TYPE_CHECKING:
    from encoder_client.client import EncoderClient


class EncodeCall:
    """A call that runs while its ``async with`` does: leaving cancels the parts that are not READY.

    Each READY has a LAYOUT before it, also one from the encoder's cache, unless ``skip_layout`` was asked for.

    Iterate over it for the events, or ask for the :meth:`embeddings`, or first one, then the other: what was seen is
    remembered. Every chunk has been checked (it belongs to the call, lies inside its bytes, READY is what LAYOUT said)
    before it is seen. Made by :meth:`EncoderClient.encode`.

    Example:
        >>> async with client.encode([image(photo)], prompt_id="p1") as call:
        ...     async for event in call:
        ...         match event:
        ...             case Layout(chunk): ...
        ...             case Ready(chunk): embedding = await client.read(chunk)
    """

    def __init__(self, client: EncoderClient, request: service.EncodeRequest, timeout: float | None) -> None:
        self._client = client
        self._request = request
        self._timeout = timeout
        self._parts = [item.part_idx for item in request.items]
        self._responses: Responses[service.EncodeResponse] | None = None
        self._events: AsyncGenerator[Event, None] | None = None
        self._accepted: Accepted | None = None
        self._layouts: dict[int, EmbeddingChunk] = {}
        self._ready: dict[int, EmbeddingChunk] = {}
        self._ended: dict[int, PartError] = {}
        self._complete: Complete | None = None
        self._unseen: deque[Event] = deque()
        self._coming: asyncio.Task[None] | None = None
        self._deadline: float | None = None

    @property
    def accepted(self) -> Accepted | None:
        """What the encoder answered, once that event has been seen: the ids that it gave."""
        return self._accepted

    @property
    def layouts(self) -> dict[int, EmbeddingChunk]:
        """The LAYOUT chunks seen so far, by ``part_idx``."""
        return dict(self._layouts)

    @property
    def complete(self) -> Complete | None:
        """The last event, once it has been seen."""
        return self._complete

    async def __aenter__(self) -> Self:
        if self._timeout is not None:
            self._deadline = asyncio.get_running_loop().time() + self._timeout
        self._responses = Responses(self._client.stub.encode(self._request, timeout=self._timeout))
        self._events = self._receive(self._responses)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._responses is not None
        assert self._events is not None
        self._responses.cancel()
        with suppress(RuntimeError):  # another task still waits for an event; it sees the cancelled call
            await self._events.aclose()
        await self._client.abandon([event.chunk for event in self._unseen if isinstance(event, Ready)])

    def __aiter__(self) -> AsyncGenerator[Event, None]:
        if self._events is None:
            raise RuntimeError("an encode call runs inside `async with` only")
        return self._events

    async def _receive(self, responses: Responses[service.EncodeResponse]) -> AsyncGenerator[Event, None]:
        try:
            async for response in responses:
                # All are noted before one is seen: whoever leaves in the middle of them must let all leases go.
                fault: ChunkError | None = None
                try:
                    for event in events_of(response):
                        self._take(event)
                except ChunkError as error:
                    fault = error
                    await self._client.refuse(self._not_taken(response))
                while self._unseen:
                    yield self._unseen.popleft()
                if fault is not None:
                    raise fault
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        if self._complete is None:
            raise EncoderError(grpc.StatusCode.INTERNAL, "the call ended with OK and without Complete")

    def _not_taken(self, response: service.EncodeResponse) -> list[EmbeddingChunk]:
        """The chunks of a message that nobody will see. A lease that is in use is not among theirs."""
        held = {lease.lease_id for chunk in self._ready.values() for lease in chunk.leases}
        chunks = [event.chunk for event in response.events if event.WhichOneof("event") == "chunk"]
        return [chunk for chunk in chunks if held.isdisjoint(lease.lease_id for lease in chunk.leases)]

    def _take(self, event: Event) -> None:
        if isinstance(event, Ready) and not self._request.skip_layout and event.chunk.part_idx not in self._layouts:
            # From the encoder's cache, which sends none: what expands placeholders must not need to know that.
            self._take(Layout(layout_of(event.chunk)))
        self._note(event)
        self._unseen.append(event)

    def _note(self, event: Event) -> None:
        match event:
            case Accepted():
                self._check_accepted(event)
                self._accepted = event
                self._client.note_encoder(event.encoder)
            case Layout(chunk):
                self._check(chunk)
                chunk_checks.check_shape(chunk)
                self._layouts[chunk.part_idx] = chunk
            case Ready(chunk):
                self._check(chunk)
                chunk_checks.check_ready(chunk)
                if (layout := self._layouts.get(chunk.part_idx)) is not None:
                    chunk_checks.check_follows(chunk, layout)
                self._end(chunk.part_idx)
                self._ready[chunk.part_idx] = chunk
            case PartFailed():
                self._end(event.part_idx)
                self._ended[event.part_idx] = PartError(event.prompt_id, event.part_idx, event.error)
            case PartCancelled():
                self._end(event.part_idx)
                cancelled = EncoderError(grpc.StatusCode.CANCELLED, "the part was cancelled")
                self._ended[event.part_idx] = PartError(event.prompt_id, event.part_idx, cancelled)
            case Complete():
                missing = [part for part in self._parts if part not in self._ready and part not in self._ended]
                if missing:
                    raise ChunkError("part_idx", f"the call is complete, and parts {missing} have not ended")
                self._complete = event

    def _check_accepted(self, accepted: Accepted) -> None:
        asked = self._request
        if self._accepted is not None:
            raise ChunkError("request_id", "the call was accepted twice")
        if asked.request_id and accepted.request_id != asked.request_id:
            raise ChunkError("request_id", "another request was accepted than was sent")
        if asked.prompt_id and accepted.prompt_id != asked.prompt_id:
            raise ChunkError("prompt_id", "another prompt was accepted than was sent")
        if accepted.num_parts != (asked.num_parts or len(asked.items)):
            raise ChunkError("num_parts", f"{accepted.num_parts} parts were accepted, another number was sent")

    def _check(self, chunk: EmbeddingChunk) -> None:
        if self._accepted is None:
            raise ChunkError("request_id", "it came before the call was accepted")
        chunk_checks.check_belongs(chunk, self._accepted, self._parts)
        chunk_checks.check_fingerprint(chunk, self._request.expected_fingerprint)

    def _end(self, part_idx: int) -> None:
        if part_idx not in self._parts:
            raise ChunkError("part_idx", f"the call did not ask for part {part_idx}")
        if part_idx in self._ready or part_idx in self._ended:
            raise ChunkError("part_idx", f"part {part_idx} ended twice")

    async def embeddings(self) -> list[Embedding]:
        """Reads the call's embeddings, each as soon as it is READY, and waits for the last.

        Space in the pool is reserved for all of them at once, as soon as the size of each is known. If the pool stalls
        before they have it, leases go back, and these embeddings are asked for again when there is space.

        Returns:
            One for each item, in the order of the items.

        Raises:
            PartError: a part failed or was cancelled. The others are let go.
            EncoderError: the call failed as a whole.
            ChunkError, ReadError, PoolError: an embedding could not be read.
        """
        reads = PartReads(self._client, self._parts, self._client.read_into, self._encode_again)
        space: asyncio.Future[Reservation] | None = None
        try:
            while True:
                self._raise_for_ended()
                if (sizes := self._sizes()) is not None:
                    space = reads.reserve(self._prompt_id(), sizes)
                reads.offer(self._ready.values())
                if reads.begun:
                    break
                await self._go_on(space)
            while self._complete is None:
                await self._go_on(None)
            return await reads.results()
        except BaseException:  # a cancelled wait, too, must leave no task behind
            if self._coming is not None:
                self._coming.cancel()
                await asyncio.wait([self._coming])
            raise
        finally:
            await reads.close(self._ready.values())

    async def _go_on(self, space: asyncio.Future[Reservation] | None) -> None:
        """Waits for the next event, or for the space if that comes first."""
        if self._coming is None and (space is None or space.done()):
            await self._next()
            return
        # A wait for an event must not be cancelled when the space comes first: that would end the call.
        if self._coming is None and self._complete is None:
            self._coming = asyncio.create_task(self._next())
        waits = [wait for wait in (self._coming, space) if wait is not None and not wait.done()]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if self._coming is not None and self._coming.done():
            coming, self._coming = self._coming, None
            coming.result()

    async def _next(self) -> None:
        if await anext(aiter(self), None) is None:
            raise EncoderError(grpc.StatusCode.INTERNAL, "the call is complete without its embeddings")

    async def _encode_again(self, chunk: EmbeddingChunk) -> EmbeddingChunk:
        """Has the part of a READY chunk encoded once more; tries again, within the deadline, if the encoder is full."""
        loop = asyncio.get_running_loop()
        asked, receiver = self._request, self._client.settings.receiver
        request = service.EncodeRequest(
            prompt_id=chunk.prompt_id,
            num_parts=chunk.num_parts,
            delivery=Delivery.DELIVERY_RECEIVERS if receiver else Delivery.DELIVERY_CALLER,
            receivers=[receiver] if receiver else [],
            items=[item for item in asked.items if item.part_idx == chunk.part_idx],
            priority=asked.priority,
            cache_policy=asked.cache_policy,
            cache_salt=asked.cache_salt,
            expected_fingerprint=asked.expected_fingerprint,
            lease_ttl=asked.lease_ttl if asked.HasField("lease_ttl") else None,
            skip_layout=True,
        )
        end = self._deadline
        last_try = loop.time() + self._client.settings.read_timeout if end is None else end
        while True:
            try:
                timeout = None if end is None else max(0.001, end - loop.time())
                return await self._encode_one(EncodeCall(self._client, request, timeout))
            except EncoderError as error:
                if error.retry_after is None or loop.time() + error.retry_after >= last_try:
                    raise
                await asyncio.sleep(error.retry_after)

    async def _encode_one(self, call: EncodeCall) -> EmbeddingChunk:
        """The READY chunk of a call of one part. If the call fails, a lease that it brought goes back."""
        try:
            async with call:
                async for _ in call:
                    call._raise_for_ended()
        except BaseException:  # whoever is cancelled here has told nobody of the lease
            await asyncio.shield(self._client.abandon(list(call._ready.values())))
            raise
        [ready] = call._ready.values()
        return ready

    def _raise_for_ended(self) -> None:
        for error in self._ended.values():
            raise error

    def _sizes(self) -> list[int] | None:
        known = {**self._layouts, **self._ready}
        return [known[part].nbytes for part in self._parts] if len(known) == len(self._parts) else None

    def _prompt_id(self) -> str:
        assert self._accepted is not None
        return self._accepted.prompt_id
