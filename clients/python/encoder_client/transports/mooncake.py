"""By a Mooncake transfer engine, over TCP or RDMA: the receiver reads the encoder's arena.

Mooncake has no authentication: whoever reaches a port of it can read and write the memory that is registered there, the
receiver's pool too. Use it in a network where only the serving hosts are, or leave it out of the client's transports.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from queue import Empty, SimpleQueue
from threading import Thread
from time import monotonic, sleep
from typing import Any

from encoder_client.checksums import RunningChecksum
from encoder_client.pool.embedding_pool import EmbeddingPool, Slot
from encoder_client.transports import TransferStuckError, TransportError
from encoder_client.transports.mooncake_transfer import MOST_PIECES, MooncakeTransfer
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, LeaseGrant, Locator
from epd.rdma_devices import rdma_fault

logger = logging.getLogger("encoder_client")

MOST_AT_ONCE = 64
"""Transfers that are under way: each read has one, or one for each of its pieces. Other reads wait."""

# Between two looks at the transfers that are under way. Mooncake's blocking read looks without a pause: that keeps a
# core busy, often the one that the bytes need.
_SHORTEST_PAUSE, _LONGEST_PAUSE = 30e-6, 1e-3
_PAUSE_SHARE = 1 / 32
"""Of the time that the youngest transfer has taken: so much longer a read takes at most."""

QUICK_BYTES, QUICK_SECONDS = 2 << 20, 2e-3
"""What is so small, and was so fast the last time, the event loop reads itself: to wake the thread, and to be woken by
it, takes a quarter of the read of a MiB. Other work of the loop has its turns meanwhile."""
_MOST_SESSIONS = 1024

QUICK_PIECE_BYTES, PIECE_BYTES = 256 << 10, 4 << 20
"""By TCP, the pieces of a read by the loop and by the thread are at least so large. The loop looks all the time. The
thread pauses between, and what it does for a piece takes the processor from the bytes: smaller ones are slower."""


class MooncakeReader:
    """Reads by Mooncake into one pool, whose arena is registered once, at the first read.

    Transfers cannot be stopped. One thread begins them and looks after them; the event loop does so itself with a small
    read that is alone, as long as the encoder answers quickly. A read that is given up keeps its slot until nothing of
    it is under way, so that late bytes hit nobody else's.

    By TCP a read is begun in pieces, two at a time: what has come is summed while the next ones come, out of the
    processor's cache. Whoever looks after a read sums it, so the thread sums large ones and the loop is free meanwhile.

    Args:
        pool: where it reads to.
        host: the address of this host that encoders can connect back to (RDMA does). Empty: the one that this host
            reaches the first encoder from.
        devices: RDMA devices, with commas between them. Empty: all.

    Raises:
        ImportError: no Mooncake package can be loaded here; the extra ``mooncake`` has the CPU's.
    """

    name = "mooncake"
    needs_checksum = True

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
        self._rdma_fault = ""
        self._transfers: SimpleQueue[MooncakeTransfer | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._stuck: MooncakeTransfer | None = None
        self._seconds: dict[str, float] = {}
        """What the last small read of each session took."""
        self._reads = 0
        """That have not ended."""

    @property
    def engine(self) -> Any:
        """Mooncake's ``TransferEngine``, of which a process has one; set up by the first read."""
        return self._engine

    def reaches(self, locator: Locator) -> bool:
        """See :class:`~encoder_client.transports.Reader`: not by RDMA where this host has no device for it."""
        protocol = locator.mooncake.protocol
        if self._protocol:
            return protocol == self._protocol
        fault = rdma_fault(self._devices) if protocol == "rdma" else ""
        if fault and fault != self._rdma_fault:
            logger.warning("encoders that serve Mooncake by RDMA are read otherwise: %s", fault)
        self._rdma_fault = fault
        return not fault

    async def read(
        self,
        chunk: EmbeddingChunk,
        locator: Locator,
        lease: LeaseGrant,
        slot: Slot,
        checksum: RunningChecksum,
        timeout: float,
    ) -> None:
        """See :class:`~encoder_client.transports.Reader`."""
        if self._stuck is not None and not self._stuck.ended:
            raise TransportError("an earlier transfer still hangs, and may hold all others up")
        if self._thread is None:
            self._thread = Thread(target=self._work, name="mooncake-reader", daemon=True)
            self._thread.start()
        loop = asyncio.get_running_loop()
        transfer = MooncakeTransfer(self._engine, locator.mooncake, slot, chunk.nbytes, checksum, loop)
        timer = loop.call_later(timeout, self._overdue, transfer, timeout)
        self._reads += 1
        try:
            if self._is_quick(transfer):
                await self._hurry(transfer)
            else:
                self._transfers.put(transfer)
            fault = await transfer.answer
        except asyncio.CancelledError:
            transfer.claim.acquire(blocking=False)
            transfer.give_up("it was cancelled")
            raise
        finally:
            self._reads -= 1
            timer.cancel()
        if transfer.hangs:
            raise TransferStuckError(fault)
        if fault:
            raise TransportError(fault)

    def close(self) -> None:
        """Ends the thread after the transfers that are under way; the pool's arena is no longer registered then."""
        self._transfers.put(None)

    def _is_quick(self, transfer: MooncakeTransfer) -> bool:
        """It is alone, and will be over soon. Nothing is set up for it any more, which would hold the loop up.

        To begin one by TCP takes less than a millisecond also if the peer is cut off or dead; by RDMA nobody has tried.
        """
        seconds = self._seconds.get(transfer.place.session, QUICK_SECONDS)
        alone = self._reads == 1 and self._protocol == "tcp"
        return alone and transfer.nbytes <= QUICK_BYTES and seconds < QUICK_SECONDS

    async def _hurry(self, transfer: MooncakeTransfer) -> None:
        """Begins a read here, and looks at it all the time.

        If it is not over soon, or has failed with a piece still under way, the thread goes on with it.
        """
        transfer.claim.acquire()
        until = monotonic() + QUICK_SECONDS
        try:
            self._begin(transfer, QUICK_PIECE_BYTES)
            while transfer.flying and not transfer.fault and monotonic() < until:
                await asyncio.sleep(0)
                transfer.look()
            if not transfer.flying:
                self._note(transfer)
                transfer.let_go()
                transfer.tell()
        finally:
            if not transfer.ended:
                self._transfers.put(transfer)

    def _overdue(self, transfer: MooncakeTransfer, timeout: float) -> None:
        if transfer.claim.acquire(blocking=False):
            transfer.give_up(f"other transfers took longer than {timeout:g} s")
        else:
            self._stuck = transfer
            transfer.hangs = True
            transfer.give_up(f"the transfer took longer than {timeout:g} s")

    def _set_up(self, session: str, protocol: str) -> None:
        host = self._host or _address_towards(session)
        if self._engine.initialize(host, "P2PHANDSHAKE", protocol, self._devices):
            raise TransportError(f"the transfer engine cannot be set up for {protocol} on {host}")
        if self._engine.register_memory(self._pool.address, self._pool.capacity):
            raise TransportError("the transfer engine cannot register the pool's memory")
        self._protocol = protocol

    def _work(self) -> None:
        flying: list[MooncakeTransfer] = []
        goes_on = True
        while goes_on or flying:
            while goes_on and sum(transfer.flying for transfer in flying) <= MOST_AT_ONCE - MOST_PIECES:
                try:
                    transfer = self._transfers.get(block=not flying)
                except Empty:
                    break
                if transfer is None:
                    goes_on = False
                elif transfer.begun:
                    flying.append(transfer)
                elif transfer.claim.acquire(blocking=False):
                    self._begin(transfer, PIECE_BYTES)
                    if transfer.flying:
                        flying.append(transfer)
                    else:
                        transfer.end()
                # A slot must not wait for the next transfer to be let go.
                del transfer
            if flying:
                age = monotonic() - max(transfer.youngest for transfer in flying)
                sleep(min(max(age * _PAUSE_SHARE, _SHORTEST_PAUSE), _LONGEST_PAUSE))
                flying = [transfer for transfer in flying if self._goes_on(transfer)]
        if self._protocol:
            self._engine.unregister_memory(self._pool.address)

    def _begin(self, transfer: MooncakeTransfer, piece_bytes: int) -> None:
        """Begins a read, unless it has a fault at once. By RDMA it is one piece: nobody has measured more."""
        place = transfer.place
        try:
            if not self._protocol:
                self._set_up(place.session, place.protocol)
            if place.protocol != self._protocol:
                raise TransportError(f"this process reads by {self._protocol}, the encoder serves {place.protocol}")
        except Exception as error:  # whatever it is, whoever waits learns it, and the thread goes on
            transfer.fault = str(error)
        transfer.begin(piece_bytes if self._protocol == "tcp" else transfer.nbytes)

    def _goes_on(self, transfer: MooncakeTransfer) -> bool:
        """Looks at a read. If it has ended, whoever waits is told."""
        transfer.look()
        if not transfer.flying:
            self._note(transfer)
            transfer.end()
        return not transfer.ended

    def _note(self, transfer: MooncakeTransfer) -> None:
        """Remembers how fast a small read was that has ended."""
        session = transfer.place.session
        if transfer.fault:
            self._seconds.pop(session, None)
        elif transfer.nbytes <= QUICK_BYTES:
            if len(self._seconds) >= _MOST_SESSIONS:
                self._seconds.clear()
            self._seconds[session] = monotonic() - transfer.begun


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
