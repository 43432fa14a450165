"""Giving leases back, many in one call.

A ``Release`` of its own for every read costs more than the read of a small embedding. So there is one call at a time:
a lease goes at once if none went shortly before; those that end while a call is under way go together in the next.

Leases that nobody will read have calls of their own. Who lets go of one waits for a moment only, and the call goes on
behind him: a server that stands still for some seconds gets it back when it goes on, and no read waits for it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from encoder_client.cancellation import answer
from encoder_client.errors import EncoderError, from_rpc_error
from encoder_client.stub import EncoderStub
from epd.encoder.v1 import encoder_service_pb2 as service
from epd.encoder.v1.encoder_service_pb2 import LeaseState, ReadOutcome

logger = logging.getLogger("encoder_client")

SPACING_SECONDS = 0.002
"""Between the beginnings of two calls, at least."""
LONGEST_PAUSE_SECONDS = 1.0
"""Between two tries of a call."""
UNREAD_WAIT_SECONDS = 0.5
"""That who gives back an unread lease waits for it: he may want to try elsewhere."""
UNREAD_SECONDS = 30.0
"""That a call with unread leases may take behind him: half of a lease's time, by the default of servers."""
MOST_UNREAD = 4096
"""Unread leases on their way to one server. Those beyond them run out by themselves."""
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
        channel: of the stub.
        timeout: seconds that a call may take, with its retries. It is idempotent, so a lost answer does no harm. It is
            not tried again where nobody listens any more: the leases went with the server.
    """

    def __init__(self, stub: EncoderStub, channel: grpc.aio.Channel, timeout: float) -> None:
        self._stub = stub
        self._channel = channel
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

    async def close(self, patience: float | None = None) -> None:
        """Sends what is pending and waits for the answers, not for those to what is given back meanwhile.

        Args:
            patience: seconds to wait; what is under way then fails. None: as long as the calls take.
        """
        self._flush()
        flights = set(self._flights)
        if flights:
            _, late = await asyncio.wait(flights, timeout=patience)
            for flight in late:
                flight.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    def give_up(self) -> None:
        """It is known that the server does not answer: whoever waits for it is told so."""
        wishes, self._pending = self._pending, []
        _fail(wishes, EncoderError(grpc.StatusCode.UNAVAILABLE, "the server was given up, it does not answer"))
        for flight in self._flights:
            flight.cancel()

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
            if isinstance(error, EncoderError):
                _fail(wishes, error)
            else:  # gRPC was closed, or the server given up
                message = f"the lease was not given back: {error!r}"
                _fail(wishes, EncoderError(grpc.StatusCode.CANCELLED, message))
            if not isinstance(error, Exception):
                raise
            return
        for wish, state in zip(wishes, states, strict=True):
            if not wish.answer.done():
                wish.answer.set_result(state)

    async def _call(self, request: service.ReleaseRequest) -> service.ReleaseResponse:
        loop = asyncio.get_running_loop()
        end = loop.time() + self._timeout
        pause = 0.01
        while True:
            try:
                return await answer(self._stub.release(request, timeout=max(0.001, end - loop.time())))
            except grpc.aio.AioRpcError as error:
                unreachable = self._channel.get_state() is grpc.ChannelConnectivity.TRANSIENT_FAILURE
                if error.code() not in _RETRIED or unreachable or loop.time() + pause >= end:
                    raise from_rpc_error(error) from None
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)


def _fail(wishes: Iterable[_Wish], error: EncoderError) -> None:
    for wish in wishes:
        if not wish.answer.done():
            wish.answer.set_exception(error)


class Releases:
    """The leases of one server, given back: those whose read must be confirmed, and those that nobody will read.

    Args:
        stub: the server.
        channel: of the stub.
        timeout: seconds that a confirmation may take.
    """

    def __init__(self, stub: EncoderStub, channel: grpc.aio.Channel, timeout: float) -> None:
        self._timeout = timeout
        self._read = ReleaseBatcher(stub, channel, timeout)
        self._unread = ReleaseBatcher(stub, channel, UNREAD_SECONDS)
        self._returns: set[asyncio.Task[LeaseState]] = set()

    async def confirm(self, lease_id: bytes, outcome: ReadOutcome, patience: float | None = None) -> LeaseState:
        """Gives back the lease of what was read: see :meth:`ReleaseBatcher.release`.

        Args:
            lease_id: the lease.
            outcome: how its read ended.
            patience: seconds to wait for the answer, if that is less than it may take.
        """
        try:
            async with asyncio.timeout(patience):
                return await self._read.release(lease_id, outcome)
        except TimeoutError:
            raise EncoderError(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer came in {patience:.1f} s") from None

    async def give_back(self, lease_id: bytes, outcome: ReadOutcome) -> None:
        """Gives back a lease that nobody reads by. Cancelling this does not cancel that.

        It waits for a moment. What has not gone back by then goes on, until the server has answered, cannot be reached,
        takes too long, or :meth:`close` has waited for it; then the lease runs out by itself.
        """
        if len(self._returns) >= MOST_UNREAD:
            logger.info("a lease is not given back, it will run out by itself: too many are on their way")
            return
        task = asyncio.create_task(self._unread.release(lease_id, outcome))
        self._returns.add(task)
        task.add_done_callback(self._returned)
        await asyncio.wait([task], timeout=UNREAD_WAIT_SECONDS)

    def give_up(self) -> None:
        """It is known that the server does not answer: nobody waits for a confirmation any more."""
        self._read.give_up()

    async def close(self) -> None:
        """Sends what is pending, and waits for the answers as long as a confirmation may take."""
        await asyncio.gather(self._read.close(), self._unread.close(self._timeout))
        late = list(self._returns)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def _returned(self, task: asyncio.Task[LeaseState]) -> None:
        self._returns.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.info("a lease could not be given back, it will run out by itself: %s", error)
