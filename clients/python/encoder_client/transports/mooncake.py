"""By a Mooncake transfer engine, over TCP or RDMA: the receiver reads the encoder's arena.

Mooncake has no authentication: whoever reaches a port of it can read and write the memory that is registered there, the
receiver's pool too. Use it in a network where only the serving hosts are, or leave it out of the client's transports.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any

from encoder_client.pool import EmbeddingPool, Slot
from encoder_client.transports import TransferStuckError, TransportError
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, LeaseGrant, Locator

_Job = tuple[Callable[[], int], "Future[int]"]


class MooncakeReader:
    """Reads by Mooncake into one pool, whose arena is registered once, at the first read.

    Transfers block and cannot be stopped: one thread makes them, one after the other. A read that is given up keeps its
    slot until the transfer has ended, so that late bytes hit nobody else's.

    Args:
        pool: where it reads to.
        host: the address of this host that encoders can connect back to (RDMA does). Empty: the one that this host
            reaches the first encoder from.
        devices: RDMA devices, with commas between them. Empty: all.

    Raises:
        ImportError: no Mooncake package can be loaded here; the extra ``mooncake`` has the CPU's.
    """

    name = "mooncake"

    def __init__(self, pool: EmbeddingPool, host: str = "", devices: str = "") -> None:
        # glog reads these when the library is loaded; by default it writes every connection to stderr.
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        os.environ.setdefault("GLOG_minloglevel", "2")
        from mooncake.engine import TransferEngine

        self._pool = pool
        self._host = host
        self._devices = devices
        self._engine: Any = TransferEngine()
        self._protocol = ""
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._stuck: Future[int] | None = None

    async def read(
        self, chunk: EmbeddingChunk, locator: Locator, lease: LeaseGrant, slot: Slot, timeout: float
    ) -> None:
        """See :class:`~encoder_client.transports.Reader`."""
        if self._stuck is not None and not self._stuck.done():
            raise TransportError("an earlier transfer still hangs, and transfers are made one after the other")
        place = locator.mooncake
        nbytes = chunk.nbytes

        def transfer() -> int:
            if not self._protocol:
                self._set_up(place.session, place.protocol)
            if place.protocol != self._protocol:
                raise TransportError(f"this process reads by {self._protocol}, the encoder serves {place.protocol}")
            # `slot` is held by this function until the transfer has ended, whoever waits for it.
            answer: int = self._engine.transfer_sync_read(place.session, slot.address, place.address, nbytes)
            return answer

        if self._thread is None:
            self._thread = Thread(target=self._work, name="mooncake-reader", daemon=True)
            self._thread.start()
        job: Future[int] = Future()
        self._jobs.put((transfer, job))
        try:
            async with asyncio.timeout(timeout):
                answer = await asyncio.shield(asyncio.wrap_future(job))
        except TimeoutError:
            if job.cancel():
                raise TransportError(f"other transfers took longer than {timeout:g} s") from None
            self._stuck = job
            raise TransferStuckError(f"the transfer took longer than {timeout:g} s") from None
        except asyncio.CancelledError:
            job.cancel()
            raise
        if answer:
            raise TransportError(f"the transfer engine answered {answer}: the encoder is gone or not reachable")

    def close(self) -> None:
        """Ends the thread after the transfer that runs; the pool's arena is no longer registered then."""
        self._jobs.put(None)

    def _set_up(self, session: str, protocol: str) -> None:
        host = self._host or _address_towards(session)
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, self._devices):
            raise TransportError(f"the transfer engine cannot be set up for {protocol} on {host}")
        if self._engine.register_memory(self._pool.address, self._pool.capacity):
            raise TransportError("the transfer engine cannot register the pool's memory")
        self._protocol = protocol

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            transfer, future = job
            # A slot must not wait for the next job to be let go.
            del job
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(transfer())
            except Exception as error:  # whatever it is, whoever waits learns it, and the thread goes on
                future.set_exception(error)
            del transfer, future
        if self._protocol:
            self._engine.unregister_memory(self._pool.address)


def _address_towards(session: str) -> str:
    """The address of this host from which ``session`` (HOST:PORT) is reached. No packet is sent."""
    host, _, port = session.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, int(port)))
            return str(probe.getsockname()[0])
    except (OSError, ValueError):
        raise TransportError("the encoder's Mooncake session is no address that this host can reach") from None
