"""Keeps one child process running: starts it, gives it its configuration, notices its death, starts it again."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from google.protobuf.message import Message

from encoder_svc.runtime.links import Link

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_SECONDS = 30.0
_LAST_WORDS_SECONDS = 1.0
"""They are there already: longer only if something else has the child's end of the link."""


_DEATH_SECONDS = 10.0
"""From SIGKILL on. A large process takes a second or two."""


class ChildOwner(Protocol):
    """Who speaks with a child."""

    def received(self, envelope: bytes) -> None:
        """A message of the child, on the event loop."""
        ...

    def lost(self) -> None:
        """The child is dead. Another life follows after a pause."""
        ...


@dataclass(frozen=True)
class ChildProgram:
    """What to start."""

    name: str
    """For logs, such as `engine 0`."""
    module: str
    """Run as ``python -m module DESCRIPTOR``, with the descriptor of its link."""
    descriptors: tuple[int, ...]
    """Inherited, at the same numbers."""
    start_seconds: float
    """Time from its start until it takes work."""


class Supervisor:
    """One child over all its lives.

    Args:
        program: what to start.
        owner: who speaks with it.
        pause_seconds: the pause before the second life; it doubles while lives end without success.
    """

    def __init__(
        self,
        program: ChildProgram,
        owner: ChildOwner,
        pause_seconds: float,
    ) -> None:
        self._program = program
        self._owner = owner
        self._pause_seconds = pause_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._link: Link | None = None
        self._succeeded = asyncio.Event()
        self.restarts = 0

    def send(self, message: Message, files: Sequence[bytes] = ()) -> None:
        """Sends to the current life; without one the message goes nowhere, and its loss is about to be reported."""
        if self._link is not None:
            self._link.send(message, files)

    def kill(self) -> None:
        """Ends the current life at once, whatever it does."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)

    async def run(self) -> None:
        """Runs one life after another until it is cancelled; then no process is left."""
        pause = self._pause_seconds
        while True:
            self._succeeded.clear()
            try:
                end = _tell(await self._live())
            except OSError as error:
                # The machine is out of processes, descriptors or memory, perhaps only for a moment.
                end = f"{error.strerror}, before it ran"
            if self._succeeded.is_set():
                pause = self._pause_seconds
            logger.warning("%s ended with %s; it starts again in %.1f s", self._program.name, end, pause)
            try:
                self._owner.lost()
            except Exception:
                logger.exception("the death of %s was not taken well", self._program.name)
            self.restarts += 1
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def _live(self) -> int:
        """One life, from start to death. Returns its exit status."""
        link = self._link = await Link.open(self._received)
        try:
            # Popen from this, the main thread: the child asks to be killed when the thread that made it ends.
            process = self._process = subprocess.Popen(  # noqa: ASYNC220 # returns at once: vfork
                [sys.executable, "-m", self._program.module, str(link.far)],
                stdin=subprocess.DEVNULL,
                pass_fds=(link.far, *self._program.descriptors),
            )
            link.handed_over()
            with _Exit(process) as exit_:
                try:
                    async with asyncio.timeout(self._program.start_seconds):
                        await self._first_of_success_and(exit_.future)
                except TimeoutError:
                    logger.error(  # noqa: TRY400 # nothing to trace
                        "%s was not ready in %g s; it is stopped", self._program.name, self._program.start_seconds
                    )
                    process.kill()
                status = await exit_.future
            # Its last words may say why.
            await link.drain(_LAST_WORDS_SECONDS)
            return status
        finally:
            if self._process is not None:
                self._process.kill()
                self._see_dead(self._process)
            link.close()
            self._link = self._process = None

    def _see_dead(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(_DEATH_SECONDS)
        except subprocess.TimeoutExpired:
            # The kernel holds it, such as in the driver of a device. It may not hold the end of the server.
            logger.error("%s does not die; process %d is left to the kernel", self._program.name, process.pid)  # noqa: TRY400

    async def _first_of_success_and(self, exit_: asyncio.Future[int]) -> None:
        success = asyncio.create_task(self._succeeded.wait())
        exit_.add_done_callback(lambda _: success.cancel())
        await asyncio.wait([success])

    def _received(self, envelope: bytes) -> None:
        try:
            self._owner.received(envelope)
        except Exception:
            # What it said makes no sense, or we have half done what it asked for: a new life begins from a known state.
            logger.exception("a message of %s was not understood; it is stopped", self._program.name)
            self.kill()

    def greet(self, configuration: Message) -> None:
        """The child said hello: it gets its configuration."""
        assert self._link is not None
        self._link.send(configuration)

    def succeed(self) -> None:
        """The child takes work: its life is a success."""
        self._succeeded.set()


class _Exit:
    """Tells the event loop when a process ends, through a pidfd."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[int] = self._loop.create_future()
        self._descriptor = os.pidfd_open(process.pid)

    def __enter__(self) -> Self:
        self._loop.add_reader(self._descriptor, self._ended)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        self.future.cancel()

    def _ended(self) -> None:
        if not self.future.done():
            self._loop.remove_reader(self._descriptor)
            self.future.set_result(self._process.wait())


def _tell(status: int) -> str:
    if status >= 0:
        return f"status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:  # Most real-time signals have no name.
        return f"signal {-status}"
