"""Giving leases back, many in one call.

A ``Release`` of its own for every read costs more than the read of a small embedding. So there is one call at a time:
a lease goes at once if none went shortly before; those that end while a call is under way go together in the next.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc

from encoder_client.cancellation import answer
from encoder_client.errors import EncoderError, from_rpc_error
from encoder_client.stub import EncoderStub
from epd.encoder.v1 import encoder_service_pb2 as service
from epd.encoder.v1.encoder_service_pb2 import LeaseState, ReadOutcome

SPACING_SECONDS = 0.002
"""Between the beginnings of two calls, at least."""
ABANDON_SECONDS = 0.5
"""That giving back a lease may take whose read came to nothing: it runs out by itself, and somebody may wait to try
elsewhere."""
MAX_LEASES = 1024
"""Of one ``ReleaseRequest``, by the contract."""

_RETRIED = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED}


@dataclass(frozen=True)
class _Wish:
    lease_id: bytes
    outcome: ReadOutcome
    answer: asyncio.Future[LeaseState]


class ReleaseBatcher:
    """Collects releases for one server.

    Args:
        stub: the server.
        timeout: seconds that a release may take, with its retries. It is idempotent, so a lost answer does no harm.
    """

    def __init__(self, stub: EncoderStub, timeout: float) -> None:
        self._stub = stub
        self._timeout = timeout
        self._pending: list[_Wish] = []
        self._timer: asyncio.TimerHandle | None = None
        self._sent_at = 0.0
        self._flights: set[asyncio.Task[None]] = set()

    async def release(self, lease_id: bytes, outcome: ReadOutcome) -> LeaseState:
        """Gives a lease back.

        Args:
            lease_id: the lease.
            outcome: how its read ended.

        Returns:
            Its state: what was read is good only if that is HELD or ALREADY_RELEASED.

        Raises:
            EncoderError: the server did not answer in time; nothing is known of the lease.
        """
        loop = asyncio.get_running_loop()
        wish = _Wish(lease_id, outcome, loop.create_future())
        self._pending.append(wish)
        if len(self._pending) >= MAX_LEASES:
            self._flush()
        elif not self._flights:
            self._plan(loop)
        return await wish.answer

    async def close(self) -> None:
        """Sends what is pending and waits for the answers, not for those to what is given back meanwhile."""
        self._flush()
        if self._flights:
            await asyncio.wait(self._flights)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._pending:
            wishes, self._pending = self._pending, []
            loop = asyncio.get_running_loop()
            self._sent_at = loop.time()
            flight = loop.create_task(self._send(wishes))
            self._flights.add(flight)
            flight.add_done_callback(self._landed)

    def _landed(self, flight: asyncio.Task[None]) -> None:
        self._flights.discard(flight)
        if self._pending and not self._flights:
            self._plan(asyncio.get_running_loop())

    def _plan(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._timer is None:
            self._timer = loop.call_at(self._sent_at + SPACING_SECONDS, self._flush)

    async def _send(self, wishes: list[_Wish]) -> None:
        request = service.ReleaseRequest(
            leases=[service.LeaseRelease(lease_id=wish.lease_id, outcome=wish.outcome) for wish in wishes]
        )
        try:
            response = await self._call(request)
            states = [status.state for status in response.leases]
            if len(states) != len(wishes):
                raise EncoderError(
                    grpc.StatusCode.INTERNAL, f"{len(wishes)} leases were released and {len(states)} answers came"
                )
        except BaseException as error:
            told = error
            if not isinstance(error, EncoderError):  # gRPC was closed, or this task's loop ends
                told = EncoderError(grpc.StatusCode.CANCELLED, f"the lease was not given back: {error!r}")
            for wish in wishes:
                if not wish.answer.done():
                    wish.answer.set_exception(told)
            if not isinstance(error, Exception):
                raise
            return
        for wish, state in zip(wishes, states, strict=True):
            if not wish.answer.done():
                wish.answer.set_result(state)

    async def _call(self, request: service.ReleaseRequest) -> service.ReleaseResponse:
        loop = asyncio.get_running_loop()
        good = any(lease.outcome == ReadOutcome.READ_OUTCOME_OK for lease in request.leases)
        end = loop.time() + (self._timeout if good else min(self._timeout, ABANDON_SECONDS))
        pause = 0.01
        while True:
            try:
                return await answer(self._stub.release(request, timeout=max(0.001, end - loop.time())))
            except grpc.aio.AioRpcError as error:
                if error.code() not in _RETRIED or loop.time() + pause >= end:
                    raise from_rpc_error(error) from None
            await asyncio.sleep(pause)
            pause *= 2
