"""Hands embeddings out: leases on filled slots, the READY chunks that name them, and what their receivers are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.chunks import ChunkWriter
from encoder_svc.runtime.commands import AcquireCommand, SubscribeCommand
from encoder_svc.runtime.encoding import EncodedItem
from encoder_svc.runtime.engine_table import Engine
from encoder_svc.runtime.leases import Lease, LeaseState, LeaseTable
from encoder_svc.runtime.parts import Part
from encoder_svc.runtime.rules import Rules
from encoder_svc.runtime.slots import Slot, SlotState
from encoder_svc.runtime.subscriptions import Subscription, Subscriptions
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
        rules: the lives of leases, and the limits of named receivers.
    """

    def __init__(
        self,
        engines: Sequence[Engine],
        hands: VerifyHands,
        chunks: ChunkWriter,
        timers: Timers,
        rules: Rules,
    ) -> None:
        self._engines = engines
        self._hands = hands
        self._chunks = chunks
        self._rules = rules
        self.leases = LeaseTable(timers, self._lease_ended)
        self.subscriptions = Subscriptions(
            timers, rules.max_known_receivers, rules.max_receiver_parts, rules.lease_seconds
        )
        self._queries = count(1)
        self._verifying: dict[int, Slot] = {}

    def deliver(self, part: Part, slot: Slot, encoded: EncodedItem | None, now: float) -> EmbeddingChunk:
        """Leases a FILLED slot to the receivers of a part. ``encoded`` tells how it was made; None: it was cached."""
        command = part.request.command
        leases = self._grant(slot, command.receivers, command.lease_ttl, now)
        chunk = self._chunks.ready_for(part, slot, self._ready(slot), leases, encoded, now)
        self.subscriptions.ready(part, chunk, leases)
        return chunk

    def acquire(self, command: AcquireCommand, slot: Slot, now: float) -> EmbeddingChunk:
        """Leases a cached slot to whom ``command`` names. Nobody: only tells what is there.

        Raises:
            ServiceError: a receiver has more than it may already.
        """
        self.subscriptions.check_room(command.identity, command.receivers, 1)
        leases = self._grant(slot, command.receivers, command.lease_ttl, now)
        chunk = self._chunks.ready(slot, self._ready(slot), leases, now)
        chunk.prompt_id = command.prompt_id
        chunk.part_idx = command.part_idx
        chunk.num_parts = command.num_parts
        chunk.from_cache = True
        self.subscriptions.acquired(command.identity, chunk, leases)
        return chunk

    def subscribe(self, command: SubscribeCommand, wake: Callable[[], None], now: float) -> Subscription:
        """Begins to tell a named receiver. A new life of it takes the leases of the one before.

        Raises:
            ServiceError: it may not.
        """
        subscription, revoked = self.subscriptions.subscribe(command, wake, now)
        for lease in revoked:
            self.leases.revoke(lease, now)
        return subscription

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
                self.leases.release(found, now)
                answers.append((found, LeaseState.RELEASED))
            else:
                answers.append((found, found))
        return answers

    def take_back(self, chunk: EmbeddingChunk, now: float) -> None:
        """The caller was never told of a chunk: ends its own lease. Named receivers may know theirs, or will."""
        for grant in chunk.leases:
            found = None if grant.receiver_id else self.leases.find(grant.lease_id, now)
            if isinstance(found, Lease):
                self.leases.revoke(found, now)

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

    def engine_lost(self, index: int, now: float) -> None:
        """An engine died: the embeddings in its arena are gone."""
        self._engines[index].slots.forget_all()
        self.leases.revoke_engine(index, now)
        # What it was asked about slots that are free now, it will not answer.
        self._verifying = {query: slot for query, slot in self._verifying.items() if slot.state is SlotState.FILLED}

    def slot_verified(self, query: int, checksum: int, now: float) -> None:
        """An engine has computed a slot's checksum again. A damaged slot is taken from its readers and forgotten."""
        slot = self._verifying.pop(query, None)
        # Its memory may have another use by now: that is another slot.
        if slot is not None and slot.state is SlotState.FILLED and checksum != slot.checksum:
            self._engines[slot.engine].slots.forget(slot)
            self.leases.revoke_slot(slot, now)

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

    def _lease_ended(self, lease: Lease, now: float) -> None:
        self._engines[lease.slot.engine].slots.unlease(lease.slot)
        error = None if lease.state is LeaseState.RELEASED else ServiceError(*_DEAD_LEASE[lease.state])
        self.subscriptions.lease_ended(lease, error, now)

    def _lease_ttl(self, asked: float | None) -> float:
        return min(asked or self._rules.lease_seconds, self._rules.max_lease_seconds)

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
        "the encoder took the lease back: its engine died, its slot was damaged, or its receiver began a new life",
    ),
}
