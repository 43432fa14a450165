"""What is addressed to a named receiver, from the receiver's side."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

import grpc

from encoder_client.cancellation import Responses
from encoder_client.errors import EncoderError, from_rpc_error
from encoder_client.events import SubscriptionEvent
from encoder_client.subscriptions.received_parts import ReceivedParts
from epd.encoder.v1.encoder_service_pb2 import SubscribeRequest, SubscribeResponse

if TYPE_CHECKING:
    from encoder_client.client import EncoderClient

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Seconds before the first try to subscribe again, and between two at most."""

_RETRIED = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.CANCELLED,
}


class Subscription:
    """The parts that are addressed to one named receiver of an encoder, for as long as its ``async with`` lasts.

    A lost connection is made again, and then what was missed comes; what has been seen does not come twice. Of each
    part there is a :class:`Layout`, then one of :class:`Ready`, :class:`PartFailed`, :class:`PartCancelled`; after
    :class:`Ready` there can be a :class:`LeaseRevoked`. A part that the encoder has forgotten meanwhile, since it was
    started again or was out of reach for too long, fails with ``UNAVAILABLE``. :class:`Synced` comes after each
    connection, when all has been told that waited.

    Every chunk has been checked before it is seen. One that must not be used is given back, and its part fails with
    ``DATA_LOSS``. READY chunks that nobody has seen when the context is left keep their leases for the next life of
    the receiver, or until their time runs out.

    Made by :meth:`EncoderClient.subscribe`.

    Example:
        >>> settings = ClientSettings(receiver="lm-3")
        >>> async with EncoderClient("encoder:50051", settings) as client, client.subscribe() as subscription:
        ...     async for event in subscription:
        ...         match event:
        ...             case Ready(chunk): embedding = await client.read(chunk)
    """

    def __init__(self, client: EncoderClient, incarnation: int, patience: float | None) -> None:
        self.incarnation = incarnation
        self.connected = False
        """The encoder has answered, and that call has not ended."""
        self._client = client
        self._patience = patience
        self._parts = ReceivedParts(client.settings.receiver, client.settings.expected_fingerprint)
        self._responses: Responses[SubscribeResponse] | None = None
        self._events: AsyncGenerator[SubscriptionEvent, None] | None = None
        self._left = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._events = self._receive()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._events is not None
        self._left.set()
        if self._responses is not None:
            self._responses.cancel()
        with suppress(RuntimeError):  # another task still waits for an event; it sees the cancelled call
            await self._events.aclose()

    def __aiter__(self) -> AsyncGenerator[SubscriptionEvent, None]:
        """The events.

        Raises:
            EncoderError: the receiver may not subscribe; or another process took over (``ABORTED``); or there was no
                connection for longer than the patience.
        """
        if self._events is None:
            raise RuntimeError("a subscription runs inside `async with` only")
        return self._events

    async def _receive(self) -> AsyncGenerator[SubscriptionEvent, None]:
        loop = asyncio.get_running_loop()
        request = SubscribeRequest(receiver_id=self._client.settings.receiver, incarnation=self.incarnation)
        pause, alive_at = FIRST_PAUSE, loop.time()
        while True:
            self._parts.connected()
            responses = self._responses = Responses(self._client.stub.subscribe(request))
            try:
                async for response in responses:
                    self.connected, pause = True, FIRST_PAUSE
                    if response.HasField("chunk"):
                        self._client.note_encoder(response.chunk.encoder)
                    events = list(self._parts.take(response))
                    await self._give_back_refused()
                    for event in events:
                        yield event
                lost = EncoderError(grpc.StatusCode.INTERNAL, "a subscription ended with OK, which none ever does")
            except grpc.aio.AioRpcError as error:
                lost = from_rpc_error(error)
            finally:
                responses.cancel()
            if self.connected:
                self.connected, alive_at = False, loop.time()
            impatient = self._patience is not None and loop.time() - alive_at >= self._patience
            if lost.code not in _RETRIED or impatient:
                raise lost
            # Receivers that lost the same encoder must not all come back at once.
            seconds = max(lost.retry_after or 0.0, pause * random.uniform(0.5, 1.0))  # noqa: S311
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._left.wait()
            if self._left.is_set():  # another task still waits here for an event, and nobody would end a further call
                raise lost
            pause = min(2 * pause, LONGEST_PAUSE)

    async def _give_back_refused(self) -> None:
        refused, self._parts.refused = self._parts.refused, []
        if refused:
            await self._client.refuse(refused)
