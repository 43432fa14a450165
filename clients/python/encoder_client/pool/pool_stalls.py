"""When a pool stalls: who has space waits for an encoder, and others wait for that space. Pure: time is passed in.

Those others may hold leases of embeddings that they have no space to read, and the encoder's memory below these may be
what the first wait for. So after some patience they are told, once each, to give such leases back.

A pool does not stall while slots that were granted are filled now and then, nor while all are filled: then it waits for
nobody but the users of its embeddings.
"""

from __future__ import annotations

from encoder_client.pool.pool_ledger import Ticket


class StallWatch:
    """Watches one pool.

    Args:
        patience: seconds without any progress after which the pool has stalled.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.total = 0
        """So many were told until now."""
        self._unfilled: set[int] = set()
        self._progress = 0.0
        self._waiting: dict[Ticket, float] = {}

    def waits(self, ticket: Ticket, now: float) -> None:
        """A wish is in the queue, and whoever has it wants to be told."""
        self._waiting[ticket] = now

    def leaves(self, ticket: Ticket) -> None:
        """A wish has left the queue. Does nothing if it is not watched."""
        self._waiting.pop(ticket, None)

    def granted(self, ticket: Ticket, now: float) -> None:
        """The slots of a wish are taken for it; nothing is read into them yet."""
        self._unfilled.update(ticket.offsets)
        self._progress = now

    def filled(self, offset: int, now: float) -> None:
        """An embedding is there for the slot, or the slot was given back. Does nothing if that was known."""
        if offset in self._unfilled:
            self._unfilled.remove(offset)
            self._progress = now

    def told(self, now: float) -> list[Ticket]:
        """The wishes, the oldest first, whose owners are to give leases back. Each is told once."""
        due = [ticket for ticket, asked in self._waiting.items() if self._due(asked) <= now]
        for ticket in due:
            del self._waiting[ticket]
        self.total += len(due)
        return due

    def next_time(self) -> float | None:
        """When the next is to be told, if nothing happens until then."""
        if not self._waiting or not self._unfilled:
            return None
        return min(map(self._due, self._waiting.values()))

    def _due(self, asked: float) -> float:
        return max(asked, self._progress) + self.patience if self._unfilled else float("inf")
