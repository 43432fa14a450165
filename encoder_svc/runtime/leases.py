"""The lease table: GRANTED → RELEASED | EXPIRED | REVOKED, with the time passed in."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

from encoder_svc.runtime.slots import Slot
from encoder_svc.runtime.timers import Timer, Timers


class LeaseState(StrEnum):
    """What a lease is worth."""

    GRANTED = "granted"
    """Its receiver may read."""
    RELEASED = "released"
    """Its receiver gave it back in time: what was read is good."""
    EXPIRED = "expired"
    """Its time ran out: what was read may be anything."""
    REVOKED = "revoked"
    """The encoder took it back: what was read may be anything."""


TRANSITIONS: dict[LeaseState, frozenset[LeaseState]] = {
    LeaseState.GRANTED: frozenset({LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.REVOKED}),
    LeaseState.RELEASED: frozenset(),
    LeaseState.EXPIRED: frozenset(),
    LeaseState.REVOKED: frozenset(),
}


@dataclass(eq=False, slots=True)
class Lease:
    """The right of one receiver to read one slot."""

    id: bytes = field(repr=False)
    receiver: str
    slot: Slot
    expires_at: float
    state: LeaseState = LeaseState.GRANTED
    timer: Timer | None = None


class LeaseTable:
    """All leases of a server. Ended ones are remembered for a while, so that a repeated release gets the same answer.

    Args:
        timers: where expiry is set.
        on_end: called with a lease when it has ended, and the time.
        memory: how many ended leases are remembered.
    """

    def __init__(self, timers: Timers, on_end: Callable[[Lease, float], None], memory: int = 65_536) -> None:
        self._timers = timers
        self._on_end = on_end
        self._live: dict[bytes, Lease] = {}
        self._ended: dict[bytes, LeaseState] = {}
        self._order: deque[bytes] = deque()
        self._memory = memory

    def __len__(self) -> int:
        return len(self._live)

    def grant(self, slot: Slot, receiver: str, ttl: float, now: float) -> Lease:
        """Makes a lease of ``ttl`` seconds on a FILLED slot, which the caller counts there."""
        lease = Lease(secrets.token_bytes(16), receiver, slot, now + ttl)
        lease.timer = self._timers.at(lease.expires_at, lambda at: self._end(lease, LeaseState.EXPIRED, at))
        self._live[lease.id] = lease
        return lease

    def find(self, lease_id: bytes, now: float) -> Lease | LeaseState | None:
        """The live lease; else how it ended; None if it is not known or was forgotten."""
        lease = self._live.get(lease_id)
        if lease is None:
            return self._ended.get(lease_id)
        if lease.expires_at <= now:
            # Its timer has not run yet, but its time is over: nobody may believe a read that ends now.
            self._end(lease, LeaseState.EXPIRED, now)
            return LeaseState.EXPIRED
        return lease

    def release(self, lease: Lease, now: float) -> None:
        """Its receiver gives a live lease back."""
        self._end(lease, LeaseState.RELEASED, now)

    def revoke(self, lease: Lease, now: float) -> None:
        """Takes a live lease back."""
        self._end(lease, LeaseState.REVOKED, now)

    def renew(self, lease: Lease, ttl: float, now: float) -> None:
        """Lets a live lease end ``ttl`` seconds from now, but not earlier than it would have."""
        lease.expires_at = max(lease.expires_at, now + ttl)
        assert lease.timer is not None
        lease.timer.cancel()
        lease.timer = self._timers.at(lease.expires_at, lambda at: self._end(lease, LeaseState.EXPIRED, at))

    def revoke_slot(self, slot: Slot, now: float) -> list[Lease]:
        """Takes back all leases on a slot and returns them."""
        revoked = [lease for lease in self._live.values() if lease.slot is slot]
        for lease in revoked:
            self.revoke(lease, now)
        return revoked

    def revoke_engine(self, engine: int, now: float) -> list[Lease]:
        """Takes back all leases on slots of an engine and returns them."""
        revoked = [lease for lease in self._live.values() if lease.slot.engine == engine]
        for lease in revoked:
            self.revoke(lease, now)
        return revoked

    def _end(self, lease: Lease, state: LeaseState, now: float) -> None:
        if state not in TRANSITIONS[lease.state]:
            raise AssertionError(f"a lease cannot go from {lease.state} to {state}")
        lease.state = state
        assert lease.timer is not None
        lease.timer.cancel()
        del self._live[lease.id]
        self._ended[lease.id] = state
        self._order.append(lease.id)
        if len(self._order) > self._memory:
            del self._ended[self._order.popleft()]
        self._on_end(lease, now)
