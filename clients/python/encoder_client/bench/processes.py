"""Servers that a measurement starts, and their memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from time import monotonic

import psutil
from aiohttp import ClientError, ClientSession, ClientTimeout

from encoder_client.errors import EncoderClientError

START_SECONDS = 600.0
"""vLLM loads a large checkpoint within it."""
STOP_SECONDS = 30.0
ANSWER_SECONDS = 10.0
"""For a server that starts to say how it is. One that takes the question and stays silent is asked again."""
_LOOK_SECONDS = 0.2
_TOLD = 4000
"""Characters of what a server said last."""


class Server:
    """One command that serves, with its children.

    Args:
        name: what it is, for people.
        command: with its arguments.
    """

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 # closed in close()
        try:
            # A group of its own: Ctrl-C is for this process, which then ends its servers.
            self._process = psutil.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            self._log.close()
            raise EncoderClientError(f"cannot start {command[0]}: {error.strerror}") from None

    def said(self) -> str:
        """What it has printed."""
        # By position: the server writes through the same open file, and would go on wherever a seek had left it.
        log = self._log.fileno()
        return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")

    async def printed(self, pattern: str) -> str:
        """Waits for a line, and gives its first group.

        Raises:
            EncoderClientError: the server has ended, or took too long.
        """
        async for _ in self._looks():
            if found := re.search(pattern, self.said(), re.MULTILINE):
                return found[1]
        raise self._silent()

    async def answers(self, session: ClientSession, url: str) -> None:
        """Waits until an address is answered well.

        Raises:
            EncoderClientError: the server has ended, or took too long.
        """
        async for _ in self._looks():
            with contextlib.suppress(ClientError, TimeoutError):
                async with session.get(url, timeout=ClientTimeout(total=ANSWER_SECONDS)) as answer:
                    if answer.ok:
                        return
        raise self._silent()

    def memory(self) -> int:
        """Bytes of the server and its children: their proportional set size (PSS), which counts a shared page once."""
        total = 0
        with contextlib.suppress(psutil.Error):  # it ends
            for process in [self._process, *self._process.children(recursive=True)]:
                with contextlib.suppress(psutil.Error):  # that one has ended
                    total += process.memory_full_info().pss
        return total

    async def close(self) -> None:
        """Ends it and its children, and waits until they are gone."""
        await asyncio.to_thread(self._end)
        self._log.close()

    async def _looks(self) -> AsyncIterator[None]:
        # Not by asyncio.timeout: its end would cancel whoever looks, in the middle of a look.
        end = monotonic() + START_SECONDS
        while self._process.poll() is None and monotonic() < end:
            yield
            await asyncio.sleep(_LOOK_SECONDS)

    def _silent(self) -> EncoderClientError:
        return EncoderClientError(f"{self.name} does not serve; it said:\n{self.said()[-_TOLD:].strip()}")

    def _end(self) -> None:
        family = [self._process]
        with contextlib.suppress(psutil.Error):
            family += self._process.children(recursive=True)
            self._process.send_signal(signal.SIGTERM)
        psutil.wait_procs([self._process], timeout=STOP_SECONDS)
        with contextlib.suppress(ProcessLookupError):  # a server ends its children; this is for one that did not
            os.killpg(self._process.pid, signal.SIGKILL)
        psutil.wait_procs(family, timeout=STOP_SECONDS)


@asynccontextmanager
async def started(name: str, command: Sequence[str]) -> AsyncIterator[Server]:
    """A server that runs for as long as the block.

    Raises:
        EncoderClientError: there is no such command.
    """
    server = Server(name, command)
    try:
        yield server
    finally:
        await server.close()


class MemoryWatch:
    """The greatest memory of each server since :meth:`begin`.

    Args:
        servers: by the names that :attr:`peaks` has.
        every: seconds between two looks.
    """

    def __init__(self, servers: Mapping[str, Server], every: float = 1.0) -> None:
        self._servers = servers
        self._every = every
        self.peaks: dict[str, int] = {}

    def begin(self) -> None:
        """Forgets what was seen."""
        self.peaks = {}

    def look(self) -> None:
        """Looks now."""
        for name, server in list(self._servers.items()):
            self.peaks[name] = max(self.peaks.get(name, 0), server.memory())

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        """Looks again and again while the block runs, in a thread."""

        async def watch() -> None:
            while True:
                await asyncio.to_thread(self.look)
                await asyncio.sleep(self._every)

        task = asyncio.create_task(watch())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
