"""The embeddings that the scheduler's side holds, and how much memory they may take. Pure bookkeeping.

An embedding is *pinned* while a request still needs it, and *idle* afterwards: idle ones serve the next request with
the same content, until their memory is needed. Memory is promised before an embedding is asked for, so that what is
under way fits into the pool.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field

from encoder_client.embedding import Embedding

User = tuple[str, int]
"""A media item of a request: the request's id, the item's index."""


@dataclass
class _Held:
    embedding: Embedding
    users: set[User] = field(default_factory=set)


class Stock:
    """Embeddings by their content keys.

    Args:
        budget: bytes that all together may take.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._promised: dict[str, int] = {}
        self._used = 0

    @property
    def used(self) -> int:
        """Bytes that are held or promised."""
        return self._used

    def get(self, key: str) -> Embedding | None:
        """The embedding, if it is here."""
        held = self._held.get(key)
        return None if held is None else held.embedding

    def pin(self, key: str, user: User) -> bool:
        """Keeps an embedding for a user. False: it is not here."""
        held = self._held.get(key)
        if held is None:
            return False
        held.users.add(user)
        self._held.move_to_end(key)
        return True

    def unpin(self, key: str, user: User) -> None:
        """The user needs it no more."""
        if (held := self._held.get(key)) is not None:
            held.users.discard(user)

    def promise(self, sizes: Mapping[str, int]) -> bool:
        """Takes memory for embeddings that are about to be asked for; idle ones go for it, the longest unused first.

        Args:
            sizes: bytes by content key, of embeddings that are neither here nor promised.

        Returns:
            False: there is not enough, and nothing was taken.
        """
        wanted = sum(sizes.values())
        pinned = sum(held.embedding.nbytes for held in self._held.values() if held.users)
        if wanted + pinned + sum(self._promised.values()) > self.budget:
            return False
        for key in [key for key, held in self._held.items() if not held.users]:
            if self._used + wanted <= self.budget:
                break
            self._drop(key)
        self._promised.update(sizes)
        self._used += wanted
        return True

    def withdraw(self, key: str) -> None:
        """What was promised does not come."""
        self._used -= self._promised.pop(key)

    def keep(self, key: str, embedding: Embedding, users: set[User]) -> None:
        """What was promised is here, and pinned for its users."""
        self.withdraw(key)
        self._held[key] = _Held(embedding, set(users))
        self._used += embedding.nbytes

    def drop_idle(self) -> None:
        """Lets go of all that nobody needs."""
        for key in [key for key, held in self._held.items() if not held.users]:
            self._drop(key)

    def _drop(self, key: str) -> None:
        self._used -= self._held.pop(key).embedding.nbytes
