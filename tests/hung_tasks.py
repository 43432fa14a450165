"""Where the tasks of a loop wait, for a test that took too long: a loop that waits shows nothing in its own stack."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def report(loop: asyncio.AbstractEventLoop) -> str:
    """The tasks that have not ended, each with the line in each of its coroutines where it waits, and the threads.

    Of the threads are told name, state and where in the kernel they wait. Those of gRPC's own (``event_engine``) are in
    no other report; if none of them waits for sockets (``do_epoll_wait``), no call ends, nor does its deadline.
    """
    tasks = sorted(asyncio.all_tasks(loop), key=lambda task: task.get_name())
    return "\n".join([*map(_task, tasks), *_threads()])


def _threads() -> Iterator[str]:
    for thread in sorted(Path("/proc/self/task").glob("*")):
        with contextlib.suppress(OSError):  # it has just ended
            state = (thread / "stat").read_text().rpartition(") ")[2][0]
            yield f"thread {(thread / 'comm').read_text().strip()}: {state} {(thread / 'wchan').read_text()}"


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
