"""How late the event loop is: the one number that shows that something blocks it."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Self


class LoopLag:
    """Measures by a timer: how late it comes is how long the loop was busy with something else.

    Use it as a context manager on the running loop.

    Args:
        interval: seconds between measurements.
        window: how many seconds :meth:`worst` looks back.
        clock: seconds, monotonic. Not the loop's own clock, which uvloop reads once an iteration.
    """

    def __init__(
        self, interval: float = 0.05, window: float = 5.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._interval = interval
        self._clock = clock
        self._delays: deque[float] = deque(maxlen=max(1, round(window / interval)))
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def worst(self) -> float:
        """The greatest delay, in seconds, of the last ``window`` seconds; a timer that is late now counts already."""
        if self._timer is None:
            return 0.0
        return max(0.0, self._clock() - self._due, max(self._delays, default=0.0))

    def __enter__(self) -> Self:
        self._set()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self) -> None:
        self._due = self._clock() + self._interval
        self._timer = asyncio.get_running_loop().call_later(self._interval, self._fire)

    def _fire(self) -> None:
        self._delays.append(max(0.0, self._clock() - self._due))
        self._set()
