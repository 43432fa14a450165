"""The threads that read files of this host, a few at a time: a read that hangs in the kernel can be ended by nobody."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from encoder_svc.errors import Reason, ServiceError

log = logging.getLogger(__name__)


class FileReads:
    """Has files read in threads. A read waits here for a thread, and costs nothing more once nobody waits for it.

    If each thread has been at one file for longer than any file may take, as on a network file system whose server is
    gone, reads are refused at once until one of them comes back.

    Args:
        threads: how many.
        seconds: that a file may take.
    """

    def __init__(self, threads: int, seconds: float) -> None:
        self._seconds = seconds
        self._number = threads
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="file-uri")
        self._free = asyncio.Semaphore(threads)
        self._begun: dict[Future[bytes], float] = {}
        self._told = False

    async def read(self, work: Callable[[], bytes]) -> bytes:
        """What ``work`` gives, in a thread. Cancelling it ends the wait, not the thread.

        Raises:
            ServiceError: FETCH_FAILED: the threads hang; or what ``work`` raises.
        """
        self._check_not_stuck()
        await self._free.acquire()
        loop = asyncio.get_running_loop()
        # A thread is free, so nothing ever waits in the executor, where what was given up would stay behind it.
        reading = self._threads.submit(work)
        self._begun[reading] = loop.time()
        reading.add_done_callback(partial(self._ended, loop))
        return await asyncio.wrap_future(reading)

    def close(self) -> None:
        """Takes no more; it waits for no thread."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _check_not_stuck(self) -> None:
        now = asyncio.get_running_loop().time()
        stuck = len(self._begun) == self._number and all(
            not reading.done() and now - at > self._seconds for reading, at in self._begun.items()
        )
        if stuck:
            if not self._told:
                log.error("no file can be read: all %d threads that do it hang in a file system", self._number)
            self._told = True
            raise ServiceError(
                Reason.FETCH_FAILED, "files of the server cannot be read now: their file system hangs; send the bytes"
            )
        self._told = False

    def _ended(self, loop: asyncio.AbstractEventLoop, reading: Future[bytes]) -> None:
        """A thread is free again. Called by the thread."""
        try:
            loop.call_soon_threadsafe(self._take_back, reading)
        except RuntimeError:
            log.debug("a file was read after the end of the event loop")

    def _take_back(self, reading: Future[bytes]) -> None:
        del self._begun[reading]
        self._free.release()
