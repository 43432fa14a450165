"""Waiting for a gRPC call such that the wait can be cancelled and leaves no memory behind.

``grpc.aio`` frees what a batch of operations holds where the coroutine that waits for the batch goes on. If a task is
cancelled there, by a timeout say, it never goes on: half a kilobyte and more stays for ever, and with a message that
had just come the 8 KiB that were read from the connection with it (https://github.com/grpc/grpc/issues/43360). So here
gRPC is waited for by tasks that nobody cancels, and callers wait for these.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import Any, Generic, TypeVar

import grpc

Response = TypeVar("Response")


class Responses(Generic[Response]):
    """The responses of a streaming call. A wait that is cancelled loses none of them, nor does it end the call.

    Args:
        call: just begun. Nobody else reads from it.

    Example:
        >>> responses = Responses(stub.encode(request))
        >>> try:
        ...     async for response in responses: ...
        ... finally:
        ...     responses.cancel()
    """

    def __init__(self, call: grpc.aio.UnaryStreamCall[Any, Response]) -> None:
        self._call = call
        self._responses: AsyncIterator[Response] = call.__aiter__()
        self._coming: asyncio.Task[Response | None] | None = None

    def __aiter__(self) -> Responses[Response]:
        return self

    async def __anext__(self) -> Response:
        """The next response.

        Raises:
            grpc.aio.AioRpcError: the call failed.
            asyncio.CancelledError: this wait was cancelled, or the call was.
        """
        if self._coming is None:
            self._coming = asyncio.create_task(self._next())
        try:
            response = await asyncio.shield(self._coming)
        except BaseException:
            # If the call has ended, what it raised holds the frames of all who waited, with the embeddings in them:
            # held from here in turn, they would live until the garbage is collected.
            if self._coming.done() and (self._coming.cancelled() or self._coming.exception() is not None):
                self._coming = None
            raise
        self._coming = None
        if response is None:
            raise StopAsyncIteration
        return response

    def cancel(self) -> None:
        """Ends the call, unless it has ended."""
        self._call.cancel()

    async def _next(self) -> Response | None:
        return await anext(self._responses, None)


async def answer(call: Awaitable[Response]) -> Response:
    """The response of a unary call, which goes on to its end if this is cancelled. It should have a deadline.

    Raises:
        grpc.aio.AioRpcError: the call failed.
    """
    return await asyncio.shield(call)
