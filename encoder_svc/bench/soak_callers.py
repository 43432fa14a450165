"""The callers of a soak: they read, cancel, or leave, and count how each request ended."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from enum import Enum
from time import monotonic

import grpc

from encoder_client import ChunkError, EncoderClient, EncoderClientError, EncoderError
from encoder_svc.bench.load import USE, PartCancelledError, encode_one
from encoder_svc.bench.photographs import Photographs

LEASE_SECONDS = 5.0
REPEATED_SHARE = 0.1
"""Of the requests: for one image that the encoder may hold. The others are for new ones."""
BACK_OFF_SECONDS = 0.02
"""After a failure, so that callers do not use up their requests while an engine starts."""
_EXPLAINED_BY_KILL = {"ENGINE_LOST", "NOT_READY", "LEASE_REVOKED", "READ"}


class Way(Enum):
    """What a caller means to do with a request."""

    READ = "read"
    """Wait and read."""
    CANCEL = "cancel"
    """Name it in a ``Cancel`` some time later, and see it end."""
    LEAVE = "leave"
    """Leave the call some time later, and see no end."""


class SoakCallers:
    """Sends requests and counts their ends.

    Args:
        client: of the server.
        photographs: what is sent.
        cancel_share: of the requests that are cancelled, half in either way.
        seed: of what is done with each, and when.
    """

    def __init__(self, client: EncoderClient, photographs: Photographs, cancel_share: float, seed: int) -> None:
        self._client = client
        self._photographs = photographs
        self._cancel_share = cancel_share
        self._random = random.Random(seed)  # noqa: S311 (no secret)
        self._repeated = photographs.next()
        self._typical_seconds = 0.05
        self.ended = 0
        self.from_cache = 0
        self.wrong_ends = 0
        self.ends: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()

    async def send(self, number: int) -> None:
        """One request, whatever becomes of it."""
        file = self._repeated if self._random.random() < REPEATED_SHARE else self._photographs.next()
        way = self._way()
        # From at once to later than it takes: cancels meet requests in every state.
        delay = self._random.uniform(0, 1.2 * self._typical_seconds)
        try:
            match way:
                case Way.READ:
                    await self._read(file, f"soak-{number}")
                case Way.CANCEL:
                    await self._cancel(file, f"soak-{number}", delay)
                case Way.LEAVE:
                    async with asyncio.timeout(delay):
                        await self._read(file, f"soak-{number}")
        except TimeoutError:
            self.ends["left"] += 1
        except PartCancelledError:
            self.ends["cancelled"] += 1
        except ChunkError:
            self.wrong_ends += 1
            self._fail("CHUNK")
        except EncoderError as error:
            # One whose time ran out has not ended, and is counted nowhere: the sum of the ends tells.
            if error.code is not grpc.StatusCode.DEADLINE_EXCEEDED:
                self._fail(error.reason or error.code.name)
            await asyncio.sleep(error.retry_after or BACK_OFF_SECONDS)
        except EncoderClientError:
            self._fail("READ")
        self.ended += 1

    def unexpected_failures(self, killed: bool) -> int:
        """Failures that nothing explains.

        Args:
            killed: an engine was killed, which explains some.
        """
        explained = _EXPLAINED_BY_KILL if killed else set()
        return sum(count for reason, count in self.failures.items() if reason not in explained)

    def _way(self) -> Way:
        draw = self._random.random()
        if draw >= self._cancel_share:
            return Way.READ
        return Way.CANCEL if draw < self._cancel_share / 2 else Way.LEAVE

    async def _read(self, file: bytes, request_id: str) -> None:
        begun = monotonic()
        sample = await encode_one(self._client, file, policy=USE, request_id=request_id, lease_ttl=LEASE_SECONDS)
        self.ends["ready"] += 1
        self.from_cache += sample.from_cache
        self._typical_seconds += 0.05 * (monotonic() - begun - self._typical_seconds)

    async def _cancel(self, file: bytes, request_id: str, delay: float) -> None:
        async def cancel() -> None:
            await asyncio.sleep(delay)
            await self._client.cancel(request_id=request_id)

        cancelling = asyncio.create_task(cancel())
        try:
            await self._read(file, request_id)
        finally:
            cancelling.cancel()
            await asyncio.gather(cancelling, return_exceptions=True)

    def _fail(self, reason: str) -> None:
        self.ends["failed"] += 1
        self.failures[reason] += 1
