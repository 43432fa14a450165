"""One run: what is measured, how it is started, and what its result begins with."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from encoder_client import ClientSettings, EmbeddingPool, EncoderClient
from encoder_client.transports import TRANSPORTS
from encoder_svc.bench.display import Display
from encoder_svc.bench.machine import describe_machine
from encoder_svc.bench.service import Service

if TYPE_CHECKING:
    from encoder_svc.bench.large_requests import LargeRequests
    from encoder_svc.bench.plain_loop import PlainLoop
    from encoder_svc.bench.transport_peer import TransportPeer

Process = TypeVar("Process", "Service", "PlainLoop", "LargeRequests", "TransportPeer")

POOL_BYTES = 256 << 20


@dataclass(frozen=True)
class Subject:
    """What is measured."""

    model: Path
    dtype: str
    """As torch names it."""
    device: str
    threads: int
    """Of a forward, in the server and in the plain loop."""
    transport: str
    """How rows are read: ``auto`` (the fastest that works), or one by its name."""
    settings: Mapping[str, str]
    """Other settings of the server, by their names."""


class Measurement:
    """What every sub-command is given.

    Args:
        command_line: as it was called.
        parameters: of the sub-command, by name.
        display: shows how far it is.
        threads: of a forward.
    """

    def __init__(
        self, command_line: str, parameters: Mapping[str, str | int | float | bool], display: Display, threads: int
    ) -> None:
        self.display = display
        self._command_line = command_line
        self._parameters = dict(parameters)
        self._started = datetime.now(UTC)
        self._clock = time.monotonic()
        self._machine = describe_machine(threads)

    def start(self, stack: ExitStack, name: str, process: Process) -> Process:
        """Enters a process that takes seconds to start, and shows that.

        Args:
            stack: whose end is the end of the process.
            name: what it is, for people.
            process: a context manager that gives itself.
        """
        with self.display.stage(f"starting {name}"):
            return stack.enter_context(process)

    def heading(self) -> dict[str, Any]:
        """What every result begins with."""
        return {
            "command_line": self._command_line,
            "started_at": self._started.isoformat(timespec="seconds"),
            "seconds": round(time.monotonic() - self._clock, 1),
            "machine": self._machine,
            "parameters": self._parameters,
        }


class Run(Measurement):
    """One run of a sub-command that measures a server.

    Args:
        subject: what is measured.
        command_line: as it was called.
        parameters: of the sub-command, by name.
        display: shows how far it is.
    """

    def __init__(
        self,
        subject: Subject,
        command_line: str,
        parameters: Mapping[str, str | int | float | bool],
        display: Display,
    ) -> None:
        self.subject = subject
        of_subject: dict[str, str | int | float | bool] = {
            "model": subject.model.name,
            "dtype": subject.dtype,
            "device": subject.device,
            "threads": subject.threads,
            "transport": subject.transport,
            **{f"set.{name}": value for name, value in subject.settings.items()},
        }
        super().__init__(command_line, of_subject | dict(parameters), display, subject.threads)

    def service(self, **settings: str) -> Service:
        """A server for the subject.

        Args:
            settings: beside those of the subject, which win.
        """
        subject = self.subject
        return Service(
            {
                "model": str(subject.model),
                "dtype": subject.dtype,
                "device": subject.device,
                "engine_threads": str(subject.threads),
                "mooncake": "auto" if subject.transport in ("auto", "mooncake") else "off",
                **settings,
                **subject.settings,
            }
        )

    @property
    def transports(self) -> tuple[str, ...]:
        """By which rows are read, the preferred first."""
        return TRANSPORTS if self.subject.transport == "auto" else (self.subject.transport,)

    def client(self, service: Service) -> EncoderClient:
        """A caller of a server."""
        return EncoderClient(service.target, ClientSettings(transports=self.transports), pool=EmbeddingPool(POOL_BYTES))
