"""The front's side of one engine: turns its reports into calls of the scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from encoder_svc.errors import SetupError
from encoder_svc.runtime.scheduler import Scheduler
from encoder_svc.runtime.supervisor import Supervisor
from epd.internal.v1.engine_pb2 import ConfigureEngine, EngineCommand, EngineReport

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class EngineProcess:
    """One engine over all its lives (a :class:`ChildOwner`)."""

    index: int
    configuration: ConfigureEngine
    scheduler: Scheduler
    now: Callable[[], float]
    changed: Callable[[], None]
    """Called after everything that happened."""
    failed: Callable[[SetupError], None]
    """Called when the engine says that it can never start."""
    supervisor: Supervisor | None = None
    _told: tuple[str, int] = ("", 0)
    """The step of loading that was told last, and how many quarters of it were done."""

    def received(self, envelope: bytes) -> None:
        """See :class:`ChildOwner`."""
        assert self.supervisor is not None
        report = EngineReport.FromString(envelope)
        match report.WhichOneof("report"):
            case "hello":
                self.supervisor.greet(EngineCommand(configure=self.configuration))
                self.scheduler.engine_starting(self.index)
            case "loading":
                self._tell_progress(report.loading.step, report.loading.fraction)
            case "ready":
                self.supervisor.succeed()
                self.scheduler.engine_ready(self.index, report.ready, self.now())
                self._tell_transports(report)
            case "started":
                self.scheduler.batch_started(self.index, report.started.batch)
            case "done":
                self.scheduler.batch_done(self.index, report.done, self.now())
            case "verified":
                verified = report.verified
                self.scheduler.slot_verified(verified.query, verified.checksum.value, self.now())
            case "child_failed":
                self.failed(SetupError(report.child_failed.message))
            case unknown:
                raise AssertionError(f"an engine reported {unknown}")
        self.changed()

    def lost(self) -> None:
        """See :class:`ChildOwner`."""
        self.scheduler.engine_lost(self.index, self.now())
        self.changed()

    def _tell_progress(self, step: str, fraction: float) -> None:
        """Logs each step, and each quarter of it."""
        told = (step, int(4 * fraction))
        if told != self._told:
            self._told = told
            logger.info("engine %d: %s (%.0f %%)", self.index, step, 100 * fraction)

    def _tell_transports(self, report: EngineReport) -> None:
        for transport in report.ready.transports:
            if not transport.available:
                logger.warning("engine %d serves without a transport: %s", self.index, transport.reason)
