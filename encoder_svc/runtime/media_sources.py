"""Brings media to the front: from where their URI says, and through the hash that names them."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.scheduler import Scheduler
from epd.content_key import frames_digest, media_digest
from epd.encoder.v1.media_pb2 import MediaItem

logger = logging.getLogger(__name__)

_HASHED_AT_ONCE_BYTES = 128 << 10
"""In one turn of the event loop. SHA-256 of so much takes less than 0.1 ms; more goes to a thread."""
_HASHING_NICENESS = 10
"""Of that thread. Beside 16 streams of 5 MB it takes a third off the time in which other calls are answered."""


class UriFetcher(Protocol):
    """Gets the file behind a URI."""

    async def fetch(self, uri: str) -> bytes:
        """The file.

        Raises:
            ServiceError: it is forbidden, not there, too large, or too slow.
        """
        ...


class MediaSources:
    """Brings media for parts (the :class:`SourceHands` of the scheduler).

    Args:
        fetcher: gets files.
        now: the runtime's clock.
        changed: called after the scheduler was told something.
    """

    def __init__(self, fetcher: UriFetcher, now: Callable[[], float], changed: Callable[[], None]) -> None:
        self._fetcher = fetcher
        self._now = now
        self._changed = changed
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._hashed_bytes = 0
        # One is enough, since it hashes as fast as media can come in. Several would take the cores from the loop
        # whenever large files come together.
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="hashing", initializer=_be_nice)

    def bring(self, scheduler: Scheduler, part: int, item: MediaItem, files: tuple[bytes, ...]) -> None:
        """Reports to ``scheduler``, at once if that is cheap."""
        nbytes = sum(map(len, files))
        if files and self._hashed_bytes + nbytes <= _HASHED_AT_ONCE_BYTES:
            if not self._hashed_bytes:
                asyncio.get_running_loop().call_soon(self._next_turn)
            self._hashed_bytes += nbytes
            self._tell(scheduler, part, files, _digest(item, files), 0.0)
            return
        task = asyncio.create_task(self._bring(scheduler, part, item, files), name=f"media of part {part}")
        self._tasks[part] = task
        task.add_done_callback(lambda _: self._tasks.pop(part, None))

    def stop_bringing(self, part: int) -> None:
        """The part has ended."""
        task = self._tasks.get(part)
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def close(self) -> None:
        """Stops everything."""
        for task in self._tasks.values():
            task.cancel()
        self._hashing.shutdown(wait=False, cancel_futures=True)

    async def _bring(self, scheduler: Scheduler, part: int, item: MediaItem, files: tuple[bytes, ...]) -> None:
        begin = self._now()
        try:
            if not files:
                files = (await self._fetcher.fetch(item.uri),)
            digest = await asyncio.get_running_loop().run_in_executor(self._hashing, _digest, item, files)
        except ServiceError as error:
            scheduler.source_failed(part, error, self._now())
        except (Exception, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise  # its part has ended
            # A cancel that came from within the fetch is a fault like another: nobody else would end the part.
            logger.exception("fetching media failed in a way that was not foreseen")
            scheduler.source_failed(part, _fault(), self._now())
        else:
            self._tell(scheduler, part, files, digest, self._now() - begin)
        self._changed()

    def _tell(self, scheduler: Scheduler, part: int, files: tuple[bytes, ...], digest: bytes, seconds: float) -> None:
        try:
            scheduler.sourced(part, files, digest, seconds, self._now())
        except Exception:
            # Nobody else would end the part before its deadline.
            logger.exception("media that had come were not taken")
            scheduler.source_failed(part, _fault(), self._now())

    def _next_turn(self) -> None:
        self._hashed_bytes = 0


def _be_nice() -> None:
    # On Linux niceness belongs to a thread.
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _HASHING_NICENESS)


def _fault() -> ServiceError:
    return ServiceError(Reason.INTERNAL, "the media could not be fetched by a fault of the server")


def _digest(item: MediaItem, files: tuple[bytes, ...]) -> bytes:
    if item.WhichOneof("source") == "frames":
        return frames_digest(files, item.frames.fps)
    return media_digest(files[0])
