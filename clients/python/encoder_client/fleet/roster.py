"""The encoders of a fleet: where they are, what they are doing, and whether they get calls."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random

import grpc

from encoder_client.client import EncoderClient
from encoder_client.errors import EncoderError
from encoder_client.fleet.balancing import Candidate
from encoder_client.fleet.encoder_health import EncoderHealth, HealthState
from encoder_client.fleet.failure_kinds import kind_of
from encoder_client.fleet.media_cost import UNKNOWN
from epd.encoder.v1 import encoder_service_pb2 as service
from epd.encoder.v1.encoder_service_pb2 import EngineState

logger = logging.getLogger("encoder_client")

Poll = tuple[bool, service.GetServerInfoResponse] | EncoderError

DNS = "dns:"
POLL_SECONDS_AT_MOST = 5.0
"""That an answer to a poll may take. A server answers in milliseconds, whatever it is doing."""


class Member:
    """One address of a fleet, and what is known of the encoder behind it.

    Args:
        client: for calls to it.
    """

    def __init__(self, client: EncoderClient) -> None:
        self.client = client
        self.health = EncoderHealth()
        self.info: service.GetServerInfoResponse | None = None
        """What it told last."""
        self.trouble = "it has not answered yet"
        """Why it gets no calls, for people."""
        self.calls: set[asyncio.Task[None]] = set()
        """Those that are under way, to be cancelled if it falls silent."""
        self._sent: dict[tuple[object, int], float] = {}
        self._others = 0

    @property
    def target(self) -> str:
        """Where it is."""
        return self.client.target

    @property
    def instance_id(self) -> str:
        """Which server was there when it was asked last."""
        return self.info.encoder.instance_id if self.info else ""

    @property
    def fingerprint(self) -> bytes:
        """The compatibility fingerprint of what it makes, 32 bytes; empty while it is not known."""
        return self.info.model.compatibility_fingerprint if self.info else b""

    def candidate(self) -> Candidate:
        """It, for the choice of an encoder."""
        assert self.info is not None
        engines = sum(engine.state == EngineState.ENGINE_STATE_READY for engine in self.info.engines)
        backlog = sum(self._sent.values()) + self._others * UNKNOWN
        return Candidate(self.target, self.instance_id, backlog, max(engines, 1))

    def sent(self, call: object, part_idx: int, cost: float) -> None:
        """It has a part of this client to do."""
        self._sent[call, part_idx] = cost

    def ended(self, call: object, part_idx: int) -> None:
        """It has done that part, one way or the other."""
        self._sent.pop((call, part_idx), None)

    def failed(self, error: EncoderError, now: float) -> None:
        """A call or a part of it failed."""
        if error.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            self.health.left()  # a short deadline and a slow encoder look the same
            return
        if error.reason == "FETCH_FAILED":
            self.health.succeeded()  # an address that gives no file says nothing of the encoder
            return
        self.health.failed(kind_of(error), error.retry_after, now)
        self.trouble = str(error)

    async def poll(self, timeout: float) -> Poll:
        """Asks how it is.

        Args:
            timeout: seconds that each of two answers may take.

        Returns:
            Whether it says that it serves, and what it says of itself; or why it did not answer.
        """
        try:
            # One after the other: `asyncio.gather` forgets a cancel that comes when one of its own has just failed.
            return await self.client.health(timeout), await self.client.server_info(timeout)
        except EncoderError as error:
            return error
        except Exception as error:  # whatever it is, the next poll may do better, and the member must not be lost
            logger.exception("the poll of %s failed here", self.target)
            return EncoderError(grpc.StatusCode.UNKNOWN, f"it cannot be polled: {error!r}")

    def learn(self, poll: Poll, now: float) -> None:
        """Takes what a poll told. If it was one too many without an answer, calls and releases get none either."""
        if isinstance(poll, EncoderError):
            before = self.health.state
            self.health.poll_failed(now)
            self.trouble = str(poll)
            if self.health.state is HealthState.EJECTED and before is not HealthState.EJECTED:
                for call in list(self.calls):
                    call.cancel()
                self.client.connections.give_up(self.target)
            return
        serving, info = poll
        if info.encoder.instance_id != self.instance_id:
            self.health.poll_succeeded(False, now)  # another server: what the last one did says nothing of it
        self.info = info
        # What others have it do: this client's own parts are known better here.
        self._others = max(0, sum(info.load.parts.values()) - len(self._sent))
        self.health.poll_succeeded(serving, now)
        if not serving:
            self.trouble = "it says that it does not serve: it starts, or it stops"


class Roster:
    """The members of a fleet.

    Args:
        client: makes the clients of the members.
        targets: gRPC targets, each one member; ``dns:NAME:PORT`` stands for every address that the name has.
        poll_seconds: between two polls of a member.
        resolve_seconds: between two looks at the names.
        random: spreads the polls of many clients.
        on_change: called after something was learned of a member.
    """

    def __init__(
        self,
        client: EncoderClient,
        targets: Sequence[str],
        poll_seconds: float,
        resolve_seconds: float,
        random: Random,
        on_change: Callable[[], None],
    ) -> None:
        self.members: dict[str, Member] = {}
        self._client = client
        self._names = [_split(target) for target in targets if target.startswith(DNS)]
        self._poll_seconds = poll_seconds
        self._resolve_seconds = resolve_seconds
        self._random = random
        self._on_change = on_change
        self._polls: dict[str, asyncio.Task[None]] = {}
        self._resolving: asyncio.Task[None] | None = None
        self._static = [target for target in targets if not target.startswith(DNS)]

    def open(self) -> None:
        """Begins to look after the members."""
        for target in self._static:
            self._join(target)
        if self._names:
            self._resolving = asyncio.create_task(self._resolve())

    async def close(self) -> None:
        """Ends that."""
        tasks = [*self._polls.values(), *([self._resolving] if self._resolving else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def available(self, now: float) -> list[Member]:
        """The members that may get a call now; of several addresses of one server only one."""
        found: dict[str, Member] = {}
        for member in self.members.values():
            if member.health.available(now):
                found.setdefault(member.instance_id, member)
        return list(found.values())

    def available_at(self) -> float | None:
        """When a member that is not available now may be, if nothing else is learned until then."""
        times = [member.health.available_at() for member in self.members.values()]
        return min((time for time in times if time is not None), default=None)

    def troubles(self) -> str:
        """Why the members get no calls, for people."""
        if not self.members:
            return "no address is known; look at the names that the fleet was given"
        return "; ".join(f"{member.target}: {member.trouble}" for member in self.members.values())

    def report(self, member: Member, error: EncoderError | None) -> None:
        """Tells how a call to a member, or a part of it, ended. Its other calls go on: their connection may be well."""
        with self._looking_at(member):
            if error is None:
                member.health.succeeded()
            else:
                member.failed(error, asyncio.get_running_loop().time())

    def left(self, member: Member) -> None:
        """Tells that a call to a member ended, and nothing of the member by that."""
        with self._looking_at(member):
            member.health.left()

    @contextmanager
    def _looking_at(self, member: Member) -> Iterator[None]:
        """Tells of what has changed by the end. Most calls change nothing, and wake nobody."""
        loop = asyncio.get_running_loop()
        state, available = member.health.state, member.health.available(loop.time())
        server = member.instance_id, member.fingerprint
        yield
        now = member.health.state
        if now is not state:
            reason = f": {member.trouble}" if now in {HealthState.EJECTED, HealthState.UNKNOWN} else ""
            logger.info("the encoder at %s is %s%s", member.target, now.value, reason)
        told = (now, member.health.available(loop.time()), (member.instance_id, member.fingerprint))
        if told != (state, available, server):
            self._on_change()

    def _join(self, target: str, host: str = "") -> None:
        if target not in self.members:
            member = self.members[target] = Member(self._client.at(target, host=host))
            self._polls[target] = asyncio.create_task(self._watch(member))

    def _leave(self, target: str) -> None:
        member = self.members.pop(target)
        self._polls.pop(target).cancel()
        logger.info("the encoder at %s has left the fleet", target)
        if member.calls:
            # They end where they are; the channels close behind them.
            waiter = asyncio.gather(*member.calls, return_exceptions=True)
            waiter.add_done_callback(lambda _: self._close_channels(target))
        else:
            self._close_channels(target)

    def _close_channels(self, target: str) -> None:
        if target not in self.members:  # it may have come back
            self._client.forget(target)

    async def _watch(self, member: Member) -> None:
        while True:
            poll = await member.poll(min(max(self._poll_seconds, 1.0), POLL_SECONDS_AT_MOST))
            with self._looking_at(member):
                member.learn(poll, asyncio.get_running_loop().time())
            await asyncio.sleep(self._poll_seconds * self._random.uniform(0.75, 1.25))

    async def _resolve(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            found: dict[str, str] = {}
            complete = True
            for host, port in self._names:
                try:
                    for *_, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                        ip = str(address[0])
                        found[f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}"] = host
                except (OSError, UnicodeError) as error:  # the latter: it cannot be a name at all
                    complete = False
                    logger.warning("the name %s cannot be resolved: %s", host, error)
            for target, host in found.items():
                self._join(target, host)
            # A name server that fails must not empty the fleet.
            for target in set(self.members) - set(found) - set(self._static) if complete else ():
                self._leave(target)
            self._on_change()
            await asyncio.sleep(self._resolve_seconds)


def _split(target: str) -> tuple[str, int]:
    """Takes ``dns:NAME:PORT`` or ``dns:///NAME:PORT`` apart.

    Raises:
        ValueError: it is neither.
    """
    host, _, port = target.removeprefix(DNS).removeprefix("///").rpartition(":")
    if not host or "/" in host or not port.isdecimal():
        raise ValueError(f"{target!r} is no name to resolve: write dns:NAME:PORT, such as dns:encoders.internal:50051")
    return host.strip("[]"), int(port)
