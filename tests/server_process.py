"""A real ``encoder-svc serve`` and what a test may ask of it as a process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil

from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.encoder_service_pb2_grpc import EncoderServiceStub
from tests.waiting import PATIENCE_SECONDS

START_SECONDS = 150.0
STOP_SECONDS = 60.0
ANSWER_SECONDS = 60.0
LEASE_SECONDS = 600.0
"""Longer than a test may take: what is not leased any more was given back."""
SHARED_MEMORY = "/dev/shm/"
_LISTENING = re.compile(r"listening on (\S+)")
_READY = re.compile(r"encoder-svc ready target=(\S+)")
_METRICS = re.compile(r"metrics on (\S+)")


class ServerProcess:
    """A server process and its children.

    Args:
        model: the folder of the checkpoint.
        prefix: what runs its command, such as in another network namespace; it must become that command.
        settings: other settings by their names in :class:`encoder_svc.settings.Settings`.

    It listens on a free port of the loopback unless told otherwise, computes with one thread, keeps small arenas, and
    sends no canaries of its own: what a test counts is its own doing. Parts wait as long as a child may take to start,
    and no lease ends by time.
    """

    def __init__(self, model: Path, prefix: tuple[str, ...] = (), **settings: Any) -> None:
        values = {
            "model": model,
            "listen": "127.0.0.1:0",
            "device": "cpu",
            "mooncake": "off",
            "engine_threads": 1,
            "arena_bytes": "64MiB",
            "input_arena_bytes": "64MiB",
            "drain_seconds": 2.0,
            "restart_seconds": 0.1,
            "canary_seconds": 3600,
            "space_seconds": START_SECONDS,
            "lease_seconds": LEASE_SECONDS,
            "metrics_listen": "127.0.0.1:0",
            **settings,
        }
        arguments = [part for name, value in values.items() for part in _option(name, value)]
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 # closed in close()
        self._lines: list[str] = []
        self._listening = threading.Event()
        self._ready = threading.Event()
        self.target = ""
        self.metrics_address = ""
        """Of its Prometheus page."""
        self.process = psutil.Popen(
            [*prefix, sys.executable, "-m", "encoder_svc.cli.main", "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._family: set[psutil.Process] = set()
        self._named_memory: set[Path] = set()

    def wait_listening(self) -> ServerProcess:
        """Waits until calls are answered, if only by NOT_READY."""
        return self._wait(self._listening)

    def wait_ready(self) -> ServerProcess:
        """Waits until requests are taken."""
        return self._wait(self._ready)

    @property
    def stdout(self) -> str:
        """What it printed until now."""
        return "".join(self._lines)

    @property
    def stderr(self) -> str:
        """What it logged until now."""
        # By position: the server writes through the same open file, and would go on wherever a seek had left it.
        log = self._errors.fileno()
        return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")

    def children(self) -> list[psutil.Process]:
        """Its live children."""
        children: list[psutil.Process] = self.process.children(recursive=True)
        self._family.update(children)
        for process in (self.process, *children):
            self._named_memory |= named_memory(process.pid)
        return children

    def left_memory(self) -> set[Path]:
        """Files of /dev/shm that it or a child mapped whenever :meth:`children` looked, and that are still there."""
        return {file for file in self._named_memory if file.exists()}

    def engines(self) -> list[psutil.Process]:
        """Its live engine processes, the oldest first."""
        return self._alive("encoder_svc.engine.process")

    def media_workers(self) -> list[psutil.Process]:
        """Its live media worker processes, the oldest first."""
        return self._alive("encoder_svc.media.worker")

    def engine(self) -> psutil.Process:
        """Its only engine process."""
        (engine,) = self.engines()
        return engine

    def media_worker(self) -> psutil.Process:
        """Its only media worker process."""
        (worker,) = self.media_workers()
        return worker

    @contextlib.contextmanager
    def held(self, child: psutil.Process) -> Iterator[None]:
        """Holds a child where it is, until the block ends: whatever it does takes as long as the test wants."""
        child.suspend()
        try:
            patience = time.monotonic() + PATIENCE_SECONDS
            while not _is_held(child.pid):
                assert time.monotonic() < patience, f"{child} does not stand still"
                time.sleep(0.001)
            yield
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.resume()

    def channel(self) -> grpc.aio.Channel:
        """A new channel to it."""
        return grpc.aio.insecure_channel(self.target)

    async def info(self) -> pb.GetServerInfoResponse:
        """What it tells of itself."""
        async with self.channel() as channel:
            stub: Any = EncoderServiceStub(channel)
            info: pb.GetServerInfoResponse = await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=ANSWER_SECONDS)
            return info

    def stop(self, how: signal.Signals = signal.SIGTERM, seconds: float = STOP_SECONDS) -> int:
        """Ends it unless it has ended, and waits until it and its children are gone.

        Returns:
            Its exit code.
        """
        if self.process.poll() is None:
            self.children()
            self.process.send_signal(how)
        try:
            code: int = self.process.wait(seconds)
        except psutil.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not stop in {seconds} s; it said:\n{self.stderr}") from None
        finally:
            _, alive = psutil.wait_procs(list(self._family), timeout=STOP_SECONDS)
            for child in alive:
                child.kill()
        self._reader.join()
        assert not alive, f"children outlived the server: {alive}; it said:\n{self.stderr}"
        return code

    def close(self) -> None:
        """Ends it however it is, and closes what this object holds."""
        try:
            self.stop()
        finally:
            self._reader.join()
            self.process.stdout.close()
            self._errors.close()

    def _wait(self, event: threading.Event) -> ServerProcess:
        if not event.wait(START_SECONDS) or self.process.poll() is not None:
            raise AssertionError(f"the server does not serve; it said:\n{self.stdout}\n{self.stderr}")
        self.children()
        return self

    def _alive(self, module: str) -> list[psutil.Process]:
        found = []
        for child in self.children():
            with contextlib.suppress(psutil.NoSuchProcess):
                if module in child.cmdline():
                    found.append(child)
        return sorted(found, key=lambda child: float(child.create_time()))

    def _read(self) -> None:
        for line in self.process.stdout:
            self._lines.append(line)
            if found := _LISTENING.match(line):
                self.target = found[1]
                self._listening.set()
            elif found := _METRICS.match(line):
                self.metrics_address = found[1]
            elif _READY.match(line):
                self._ready.set()
        self._listening.set()
        self._ready.set()


def named_memory(pid: int) -> set[Path]:
    """The files of /dev/shm that a process maps; none if it is gone."""
    try:
        maps = Path(f"/proc/{pid}/maps").read_text()
    except OSError:
        return set()
    return {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if SHARED_MEMORY in line}


def _is_held(pid: int) -> bool:
    """Every thread of it has stopped, or it has ended."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        states = [task.read_text().rpartition(") ")[2][0] for task in Path(f"/proc/{pid}/task").glob("*/stat")]
        return set(states) <= set("TtZX")
    return not Path(f"/proc/{pid}").exists()


def _option(name: str, value: Any) -> list[str]:
    option = name.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{option}" if value else f"--no-{option}"]
    return [f"--{option}", str(value)]
