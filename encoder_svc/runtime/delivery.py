"""Hands embeddings out: leases on filled slots, the READY chunks that name them, and what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Protocol

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.chunks import ChunkWriter
from encoder_svc.runtime.commands import AcquireCommand
from encoder_svc.runtime.encoding import EncodedItem
from encoder_svc.runtime.engine_table import Engine
from encoder_svc.runtime.leases import Lease, LeaseState, LeaseTable
from encoder_svc.runtime.parts import Part
from encoder_svc.runtime.slots import Slot, SlotState
from encoder_svc.runtime.timers import Timers
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2 import READ_OUTCOME_CORRUPT, ReadOutcome
from epd.internal.v1.engine_pb2 import EngineReady


class VerifyHands(Protocol):
    """The engines, which can look at a slot again."""

    def verify(self, engine: int, query: int, payload_offset: int, nbytes: int) -> None:
        """Sends ``VerifySlot``."""
        ...


class EmbeddingDelivery:
    """Between the arenas and their readers. Pure; the time is passed in.

    Args:
        engines: whose arenas they are.
        hands: the engines.
        chunks: makes the chunks.
        timers: where the ends of leases are set.
        lease_seconds: the life of a lease when none is asked for.
        max_lease_seconds: the longest.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        hands: VerifyHands,
        chunks: ChunkWriter,
        timers: Timers,
        lease_seconds: float,
        max_lease_seconds: float,
    ) -> None:
        self._engines = engines
        self._hands = hands
        self._chunks = chunks
        self._lease_seconds = lease_seconds
        self._max_lease_seconds = max_lease_seconds
        self.leases = LeaseTable(timers, self._lease_ended)
        self._queries = count(1)
        self._verifying: dict[int, Slot] = {}

    def deliver(self, part: Part, slot: Slot, encoded: EncodedItem | None, now: float) -> EmbeddingChunk:
        """Leases a FILLED slot to the receivers of a part. ``encoded`` tells how it was made; None: it was cached."""
        command = part.request.command
        leases = self._grant(slot, command.receivers, command.lease_ttl, now)
        return self._chunks.ready_for(part, slot, self._ready(slot), leases, encoded, now)

    def acquire(self, command: AcquireCommand, slot: Slot, now: float) -> EmbeddingChunk:
        """Leases a cached slot to whom ``command`` names. Nobody: only tells what is there."""
        leases = self._grant(slot, command.receivers, command.lease_ttl, now)
        chunk = self._chunks.ready(slot, self._ready(slot), leases, now)
        chunk.prompt_id = command.prompt_id
        chunk.part_idx = command.part_idx
        chunk.num_parts = command.num_parts
        chunk.from_cache = True
        return chunk

    def release(
        self, leases: Sequence[tuple[bytes, ReadOutcome]], now: float
    ) -> list[tuple[Lease | LeaseState | None, LeaseState | None]]:
        """Gives leases back. For each: what it was before, and what it is now."""
        answers: list[tuple[Lease | LeaseState | None, LeaseState | None]] = []
        for lease_id, outcome in leases:
            found = self.leases.find(lease_id, now)
            if isinstance(found, Lease):
                if outcome == READ_OUTCOME_CORRUPT:
                    self._doubt(found.slot)
                self.leases.release(found)
                answers.append((found, LeaseState.RELEASED))
            else:
                answers.append((found, found))
        return answers

    def renew(self, lease_id: bytes, ttl: float | None, now: float) -> Lease | LeaseState | None:
        """Extends a lease. Returns it, or how it ended."""
        found = self.leases.find(lease_id, now)
        if isinstance(found, Lease):
            self.leases.renew(found, self._lease_ttl(ttl), now)
        return found

    def live_lease(self, lease_id: bytes, now: float) -> Lease:
        """The lease, for a reader.

        Raises:
            ServiceError: it is not alive.
        """
        found = self.leases.find(lease_id, now)
        if isinstance(found, Lease):
            return found
        raise ServiceError(*_DEAD_LEASE[found])

    def engine_lost(self, index: int) -> None:
        """An engine died: the embeddings in its arena are gone."""
        self._engines[index].slots.forget_all()
        self.leases.revoke_engine(index)
        # What it was asked about slots that are free now, it will not answer.
        self._verifying = {query: slot for query, slot in self._verifying.items() if slot.state is SlotState.FILLED}

    def slot_verified(self, query: int, checksum: int) -> None:
        """An engine has computed a slot's checksum again. A damaged slot is taken from its readers and forgotten."""
        slot = self._verifying.pop(query, None)
        # Its memory may have another use by now: that is another slot.
        if slot is not None and slot.state is SlotState.FILLED and checksum != slot.checksum:
            self._engines[slot.engine].slots.forget(slot)
            self.leases.revoke_slot(slot)

    def _doubt(self, slot: Slot) -> None:
        """A reader saw a wrong checksum: finds out whether the slot is damaged, if anybody else could still read it."""
        if slot.leases > 1 or slot.name is not None:
            query = next(self._queries)
            self._verifying[query] = slot
            self._hands.verify(slot.engine, query, slot.payload_offset, slot.nbytes)

    def _grant(self, slot: Slot, receivers: Sequence[str], ttl: float | None, now: float) -> list[Lease]:
        slots = self._engines[slot.engine].slots
        seconds = self._lease_ttl(ttl)
        leases = []
        for receiver in receivers:
            slots.lease(slot)
            leases.append(self.leases.grant(slot, receiver, seconds, now))
        return leases

    def _lease_ended(self, lease: Lease) -> None:
        self._engines[lease.slot.engine].slots.unlease(lease.slot)

    def _lease_ttl(self, asked: float | None) -> float:
        return min(asked or self._lease_seconds, self._max_lease_seconds)

    def _ready(self, slot: Slot) -> EngineReady:
        ready = self._engines[slot.engine].ready
        assert ready is not None
        return ready


_DEAD_LEASE: dict[LeaseState | None, tuple[Reason, str]] = {
    None: (
        Reason.LEASE_UNKNOWN,
        "no such lease; leases are named in READY chunks and forgotten some time after they end",
    ),
    LeaseState.RELEASED: (Reason.LEASE_RELEASED, "the lease was given back before; ask for the embedding again"),
    LeaseState.EXPIRED: (
        Reason.LEASE_EXPIRED,
        "the lease's time ran out; renew leases in time, or ask for a longer lease_ttl",
    ),
    LeaseState.REVOKED: (
        Reason.LEASE_REVOKED,
        "the encoder took the lease back since its engine died; ask for the embedding again",
    ),
}
