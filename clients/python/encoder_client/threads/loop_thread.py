"""An event loop in a thread of its own, which ends with its owner, with the program, or when it is told to."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from threading import RLock, Thread, current_thread
from typing import Any, TypeVar

T = TypeVar("T")

EXIT_SECONDS = 2.0
"""That the end of a program waits for a loop that was not closed."""


class LoopThread:
    """Runs coroutines for other threads.

    Whatever it runs must not hold it: its last reference ends the loop, and all that runs there is cancelled. So does
    the end of the program, which waits no longer than ``EXIT_SECONDS``. A forked child has no part in it.

    Args:
        name: the thread's.
    """

    def __init__(self, name: str) -> None:
        self._process = os.getpid()
        # Whoever found it open is done before it ends: else his call could come behind the last look at what runs.
        self._calls = RLock()
        self._loop = asyncio.new_event_loop()
        # A daemon: the interpreter joins all others before it runs what ends this one.
        self._thread = Thread(target=_run, args=(self._loop,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, _end, self._loop, self._thread, self._process)

    def check(self) -> None:
        """Raises unless it can be used here.

        Raises:
            RuntimeError: it is closed, or this process is a fork of the one that made it.
        """
        self._check_process()
        if not self._end.alive:
            raise RuntimeError("this client is closed")

    def soon(self, function: Callable[..., object], *arguments: Any) -> None:
        """Has a function called in the loop, in the order of these calls. Does not wait."""
        with self._kept_open():
            self._loop.call_soon_threadsafe(function, *arguments)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Runs a coroutine in the loop."""
        try:
            with self._kept_open():
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:
            coroutine.close()
            raise

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError("this client belongs to the process that made it; make one after the fork")

    @contextmanager
    def _kept_open(self) -> Iterator[None]:
        self._check_process()  # first: in a fork, a thread that is not there may hold the lock
        with self._calls:
            self.check()
            yield

    def close(self, seconds: float) -> None:
        """Cancels what runs, and waits for its end. Idempotent.

        Args:
            seconds: to wait at most; the thread then ends by itself, or with the program.
        """
        if current_thread() is self._thread:
            raise RuntimeError("a client cannot be closed by its own thread: a future's callback runs there")
        with self._calls:
            first = self._end.detach() is not None
        if first:
            _end(self._loop, self._thread, self._process, seconds)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
    finally:
        loop.close()


def _end(loop: asyncio.AbstractEventLoop, thread: Thread, process: int, seconds: float = EXIT_SECONDS) -> None:
    if os.getpid() == process:
        with suppress(RuntimeError):  # it has closed itself
            loop.call_soon_threadsafe(loop.stop)
        if thread is not current_thread():
            thread.join(seconds)
