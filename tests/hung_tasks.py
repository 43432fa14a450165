"""Where the tasks of a loop wait, for a test that took too long: a loop that waits shows nothing in its own stack."""

from __future__ import annotations

import asyncio
from typing import Any


def report(loop: asyncio.AbstractEventLoop) -> str:
    """The tasks that have not ended, each with the line in each of its coroutines where it waits."""
    return "\n".join(_task(task) for task in sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name()))


def _task(task: asyncio.Task[Any]) -> str:
    lines = [f"{task.get_name()}:"]
    waiting: Any = task.get_coro()
    while waiting is not None:
        frame = next((found for name in _FRAMES if (found := getattr(waiting, name, None)) is not None), None)
        if frame is not None:
            lines.append(f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}")
        waiting = next((found for name in _AWAITS if (found := getattr(waiting, name, None)) is not None), None)
    return "\n".join(lines)


_FRAMES = ("cr_frame", "ag_frame", "gi_frame")
_AWAITS = ("cr_await", "ag_await", "gi_yieldfrom")
