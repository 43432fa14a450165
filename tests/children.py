"""Plays the front for one child process: the other end of its link, and the owner of its shared memory."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Generic, TypeVar

from encoder_svc.link_messages import PREFIX_BYTES, header, read_prefix
from encoder_svc.shared_memory import SharedMemory
from epd.internal.v1.engine_pb2 import EngineCommand, EngineReport
from epd.internal.v1.media_worker_pb2 import MediaCommand, MediaReport

PATIENCE_MILLISECONDS = 90_000
"""After this a report does not come any more. Never reached by a test that passes."""

Report = TypeVar("Report", MediaReport, EngineReport)


class Child(Generic[Report]):
    """A child process and the front's end of its link.

    Args:
        module: what ``python -m`` runs.
        reports: the envelope of its reports.
        memory: descriptors that it inherits.
        environment: variables beside those of this process.
        stderr: where its log goes. None: where that of this process does.
    """

    def __init__(
        self,
        module: str,
        reports: type[Report],
        memory: list[SharedMemory],
        environment: Mapping[str, str] | None = None,
        stderr: IO[bytes] | None = None,
    ) -> None:
        self._reports: type[Report] = reports
        self._socket, far = socket.socketpair()
        with far:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(far.fileno())],
                pass_fds=[far.fileno(), *(block.descriptor for block in memory)],
                stderr=stderr,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {}),
            )

    def send(self, command: MediaCommand | EngineCommand, *files: bytes) -> None:
        envelope = command.SerializeToString()
        self._socket.sendall(b"".join((header(envelope, files), envelope, *files)))

    def receive(self) -> Report:
        self._socket.settimeout(PATIENCE_MILLISECONDS / 1000)
        envelope_bytes, files = read_prefix(self._read(PREFIX_BYTES))
        assert files == 0, "reports have no files"
        report: Report = self._reports.FromString(self._read(envelope_bytes))
        return report

    def receive_kind(self, kind: str) -> Report:
        """The next report, which must be of this kind."""
        report = self.receive()
        assert report.WhichOneof("report") == kind, report
        return report

    def silent(self, milliseconds: int = 0) -> bool:
        """No report is there."""
        return not select.select([self._socket], [], [], milliseconds / 1000)[0]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._socket.close()

    def _read(self, nbytes: int) -> bytes:
        data = b""
        while len(data) < nbytes:
            more = self._socket.recv(nbytes - len(data))
            assert more, "the child has ended"
            data += more
        return data


@contextmanager
def media_worker(
    checkpoint: Path,
    arena: SharedMemory,
    *,
    max_image_pixels: int = 64_000_000,
    memory_bytes: int = 0,
    environment: Mapping[str, str] | None = None,
    stderr: IO[bytes] | None = None,
) -> Iterator[Child[MediaReport]]:
    """A media worker that is configured and ready."""
    child = Child("encoder_svc.media.worker", MediaReport, [arena], environment, stderr)
    try:
        child.receive_kind("hello")
        command = MediaCommand()
        command.configure.model = str(checkpoint)
        command.configure.dtype = "float32"
        command.configure.input_arena_fd = arena.descriptor
        command.configure.input_arena_bytes = arena.size
        command.configure.threads = 1
        command.configure.limits.image_pixels = max_image_pixels
        command.configure.memory_bytes = memory_bytes
        child.send(command)
        child.receive_kind("ready")
        yield child
    finally:
        child.close()


def configure_engine(
    checkpoint: Path, input_arena: SharedMemory, arena: SharedMemory, *, mooncake: bool = True, device: str = "cpu"
) -> EngineCommand:
    """What an engine is told first."""
    command = EngineCommand()
    configure = command.configure
    configure.model = str(checkpoint)
    configure.device = device
    configure.dtype = "float32"
    configure.threads = 1
    configure.input_arena_fd = input_arena.descriptor
    configure.input_arena_bytes = input_arena.size
    configure.arena_fd = arena.descriptor
    configure.arena_bytes = arena.size
    if mooncake:
        configure.mooncake.host = "127.0.0.1"
        configure.mooncake.protocol = "tcp"
    return command


@contextmanager
def engine(
    configuration: EngineCommand,
    input_arena: SharedMemory,
    arena: SharedMemory,
    environment: Mapping[str, str] | None = None,
) -> Iterator[tuple[Child[EngineReport], EngineReport]]:
    """An engine that is configured, and its first report that is not about loading."""
    child = Child("encoder_svc.engine.process", EngineReport, [input_arena, arena], environment)
    try:
        child.receive_kind("hello")
        child.send(configuration)
        report = child.receive()
        while report.WhichOneof("report") == "loading":
            report = child.receive()
        yield child, report
    finally:
        child.close()


@contextmanager
def held(child: Child[Report]) -> Iterator[None]:
    """The child is stopped by the kernel (SIGSTOP), in whatever it is doing, until the block ends.

    So a test holds a decode or a forward by an event, not by the clock, and without a hook in the code that is tested.
    """
    os.kill(child.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, child.process.pid, os.WSTOPPED)
    try:
        yield
    finally:
        os.kill(child.process.pid, signal.SIGCONT)


def await_death(pid: int) -> None:
    """Waits until a process has ended, whose parent need not be this process."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        assert select.select([descriptor], [], [], PATIENCE_MILLISECONDS / 1000)[0], f"process {pid} lives on"
    finally:
        os.close(descriptor)
