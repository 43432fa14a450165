"""Waiting for something that can be seen, never for a time."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Awaitable, Callable

Condition = Callable[[], bool] | Callable[[], Awaitable[bool]]


async def eventually(condition: Condition, seconds: float = 20.0) -> None:
    """Waits until a condition holds.

    Args:
        condition: called again and again; it may be a coroutine function.
        seconds: fail after so long.
    """
    deadline = time.monotonic() + seconds
    while True:
        held = condition()
        if inspect.isawaitable(held):
            held = await held
        if held:
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"{condition} did not hold within {seconds} s")
        await asyncio.sleep(0.01)
