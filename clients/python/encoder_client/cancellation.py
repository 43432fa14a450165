"""Waiting for a gRPC call such that the wait can be cancelled and leaves no memory behind.

``grpc.aio`` frees what a batch of operations holds where the coroutine that waits for the batch goes on. If a task is
cancelled there, by a timeout say, it never goes on: half a kilobyte and more stays for ever, and with a message that
had just come the 8 KiB that were read from the connection with it (https://github.com/grpc/grpc/issues/43360). So here
gRPC is waited for by tasks that nobody cancels, and callers wait for these.

A call that gRPC does not end at its deadline is given up a little later: whatever the reason, nobody waits for ever.
One that is cancelled here, by whoever closes its channel say, fails for those who wait for it like any other, with
``CANCELLED``. ``grpc.aio`` itself raises ``asyncio.CancelledError`` then, as if they had been cancelled; a task that
ends so is taken for one that nobody waits for any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Generic, TypeVar

import grpc

logger = logging.getLogger("encoder_client")

LATE_SECONDS = 10.0
"""After its deadline gRPC ends a call at once, if its threads get a core and the loop its turn."""

Response = TypeVar("Response")
Call = grpc.aio.UnaryUnaryCall[Any, Any] | grpc.aio.UnaryStreamCall[Any, Any]


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
            grpc.aio.AioRpcError: the call failed, or was cancelled.
            asyncio.CancelledError: this wait was cancelled.
        """
        if self._coming is None:
            self._coming = _unheard(self._next(), self._call)
        try:
            response = await _result(self._coming, self._call)
        except BaseException:
            # If the call has ended, what it raised holds the frames of all who waited, with the embeddings in them:
            # held from here in turn, they would live until the garbage is collected.
            if _failed(self._coming):
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


async def take_all(call: grpc.aio.UnaryStreamCall[Any, Response], take: Callable[[Response], None]) -> None:
    """Hands over every response of a call, and ends it. For long ones: :class:`Responses` has a task for each response.

    Args:
        call: just begun. Nobody else reads from it.
        take: called with each response, as long as this is waited for. What it raises ends the call.

    Raises:
        grpc.aio.AioRpcError: the call failed, or was cancelled by others.
    """
    wanted = True

    async def follow() -> None:
        async for response in call:
            if not wanted:
                break
            take(response)

    try:
        await _result(_unheard(follow(), call), call)
    finally:
        wanted = False
        call.cancel()


async def answer(call: grpc.aio.UnaryUnaryCall[Any, Response]) -> Response:
    """The response of a unary call, which goes on to its end if this is cancelled. It should have a deadline.

    Raises:
        grpc.aio.AioRpcError: the call failed, or was cancelled by others.
    """
    return await _result(_unheard(_response(call), call), call)


async def _response(call: grpc.aio.UnaryUnaryCall[Any, Response]) -> Response:
    return await call


def _unheard(waiting: Coroutine[Any, Any, Response], call: Call) -> asyncio.Task[Response]:
    """A task that waits for a call, and may fail without anybody hearing of it: whoever waited for it has left."""
    task = asyncio.create_task(waiting)
    task.add_done_callback(_failed)
    if (remaining := call.time_remaining()) is not None:
        _Clock(task, remaining)
    return task


class _Clock:
    """Gives a task up that waits for a call beyond its deadline.

    Args:
        task: waits for the call.
        remaining: seconds to the deadline.
    """

    def __init__(self, task: asyncio.Task[Any], remaining: float) -> None:
        self._task = task
        self._timer = asyncio.get_running_loop().call_later(remaining + LATE_SECONDS, self._look_again)
        task.add_done_callback(self._stop)

    def _look_again(self) -> None:
        # If the loop was held up until now, the end of the call may be what it comes to next.
        self._timer = asyncio.get_running_loop().call_later(LATE_SECONDS, self._give_up)

    def _give_up(self) -> None:
        logger.error("gRPC did not end a call in %g s after its deadline; nobody waits for it any more", LATE_SECONDS)
        self._task.cancel()

    def _stop(self, _: asyncio.Task[Any]) -> None:
        self._timer.cancel()


def _failed(task: asyncio.Task[Response]) -> bool:
    return task.done() and (task.cancelled() or task.exception() is not None)


async def _result(task: asyncio.Task[Response], call: Call) -> Response:
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        this = asyncio.current_task()
        if not task.cancelled() or (this is not None and this.cancelling()):
            raise
    finally:
        del task  # what it raised must not hold it through this frame: it holds what it raised
    code, details = grpc.StatusCode.CANCELLED, "the call was cancelled on this side"
    if call.time_remaining() == 0:
        code, details = grpc.StatusCode.DEADLINE_EXCEEDED, "the call did not end at its deadline"
    raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), details, None)
