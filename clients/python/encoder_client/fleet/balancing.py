"""Which encoder gets which item of a prompt. Pure: what is random is passed in.

In this order:

1. An encoder that is known to have the content: it costs no forward there.
2. The encoder that the content key prefers (rendezvous hashing: the one with the greatest hash of key and instance, so
   all clients agree without a word, and a change of the fleet moves only the contents of those that come or go), if it
   has not much more to do than the others (consistent hashing with bounded loads: at most ``BOUND`` times the mean,
   Mirrokni, Thorup and Zadimoghaddam 2018).
3. The one with less to do of two that are drawn at random (the power of two choices, Mitzenmacher 2001): never far from
   the best one, and many clients that see the same old figures do not all run to the same encoder.

The large items of a prompt are placed first, each on top of what was placed before.

There is no question to an encoder whether it has a content (``Acquire`` without receivers would be one): it would cost
a round trip for each item, to learn from the preferred encoder, mostly, what sending it the item tells as well.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from random import Random

BOUND = 1.25


@dataclass(frozen=True)
class Candidate:
    """An encoder that may get calls."""

    target: str
    """Where to call it."""
    instance_id: str
    """Which server it is."""
    backlog: float
    """The estimated cost, in patches, of what it has to do."""
    engines: int = 1
    """How many share that."""


@dataclass(frozen=True)
class Wish:
    """An item that wants an encoder."""

    part_idx: int
    cost: float
    """Estimated, in patches."""
    content_key: bytes = b""
    """32 bytes, or empty: no encoder is preferred."""
    holder: str = ""
    """The instance that is known to have the content; empty: none is."""
    avoided: Collection[str] = ()
    """Instances that failed on the item: they get it only if there is no other."""


def preferred(content_key: bytes, candidates: Sequence[Candidate]) -> Candidate:
    """The candidate that the content prefers, by rendezvous hashing."""

    def score(candidate: Candidate) -> bytes:
        return hashlib.blake2b(candidate.instance_id.encode(), key=content_key, digest_size=8).digest()

    return max(candidates, key=lambda candidate: (score(candidate), candidate.instance_id))


def assign(wishes: Sequence[Wish], candidates: Sequence[Candidate], random: Random) -> dict[int, str]:
    """Finds an encoder for each item.

    Args:
        wishes: the items.
        candidates: the encoders that may get calls, at least one, each instance once.
        random: draws the two.

    Returns:
        The target for each ``part_idx``.
    """
    waits = {candidate.target: candidate.backlog / candidate.engines for candidate in candidates}
    places: dict[int, str] = {}
    for wish in sorted(wishes, key=lambda wish: (-wish.cost, wish.part_idx)):
        allowed = [candidate for candidate in candidates if candidate.instance_id not in wish.avoided] or candidates
        place = _choose(wish, allowed, waits, random)
        places[wish.part_idx] = place.target
        if place.instance_id != wish.holder:
            waits[place.target] += wish.cost / place.engines
    return places


def _choose(wish: Wish, candidates: Sequence[Candidate], waits: Mapping[str, float], random: Random) -> Candidate:
    for candidate in candidates:
        if wish.holder and candidate.instance_id == wish.holder:
            return candidate
    if wish.content_key:
        first = preferred(wish.content_key, candidates)
        mean = sum(waits[candidate.target] for candidate in candidates) / len(candidates)
        cost = wish.cost / first.engines
        if waits[first.target] + cost <= BOUND * (mean + cost):
            return first
    drawn = random.sample(candidates, 2) if len(candidates) > 2 else candidates
    return min(drawn, key=lambda candidate: (waits[candidate.target], candidate.instance_id))


class KnownContents:
    """Which encoder gave which content last.

    Args:
        capacity: how many contents are remembered; those that were used least recently go first.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._holders: OrderedDict[bytes, str] = OrderedDict()

    def note(self, content_key: bytes, instance_id: str) -> None:
        """The instance has the content."""
        self._holders[content_key] = instance_id
        self._holders.move_to_end(content_key)
        if len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def forget(self, content_key: bytes) -> None:
        """Its holder has it no more."""
        self._holders.pop(content_key, None)

    def holder(self, content_key: bytes) -> str:
        """The instance that had it last, or nothing."""
        return self._holders.get(content_key, "")
