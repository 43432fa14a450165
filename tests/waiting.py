"""Waiting for something that can be seen, never for a time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

PATIENCE_SECONDS = 60.0
"""After this it does not come any more, on the slowest machine. A test that passes never waits so long."""

Condition = Callable[[], bool] | Callable[[], Awaitable[bool]]


async def eventually(condition: Condition, seconds: float = PATIENCE_SECONDS) -> None:
    """Waits until a condition holds.

    Args:
        condition: called again and again; it may be a coroutine function.
        seconds: fail after so long.
    """
    deadline = time.monotonic() + seconds
    while True:
        held = condition()
        if inspect.isawaitable(held):
            # A condition that never answers does not hold either.
            held = await asyncio.wait_for(held, max(deadline - time.monotonic(), 1.0))
        if held:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"{condition} did not hold within {seconds} s")
        await asyncio.sleep(0.01)
