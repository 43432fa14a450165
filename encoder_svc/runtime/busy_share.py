"""How much of the last seconds something was busy."""

from __future__ import annotations

import math

MEMORY_SECONDS = 5.0
"""What was so long ago counts 1/e of what is now."""


class BusyShare:
    """A mean over the time, in which the past fades exponentially. Idle until it is told otherwise.

    Example:
        >>> share = BusyShare()
        >>> share.tell(True, 10.0)
        >>> round(share.at(15.0), 2)
        0.63
    """

    def __init__(self) -> None:
        self._share = 0.0
        self._busy = False
        self._told_at = 0.0

    def tell(self, busy: bool, now: float) -> None:
        """From now on it is busy, or idle."""
        self._share = self.at(now)
        self._busy = busy
        self._told_at = now

    def at(self, now: float) -> float:
        """The share, from 0 to 1."""
        kept = math.exp((self._told_at - now) / MEMORY_SECONDS)
        return self._share * kept + self._busy * (1 - kept)
