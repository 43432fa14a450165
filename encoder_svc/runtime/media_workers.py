"""The front's side of one media worker: turns its reports into calls of the scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from encoder_svc.errors import Reason, ServiceError, SetupError
from encoder_svc.runtime.scheduler import Scheduler
from encoder_svc.runtime.supervisor import Supervisor
from epd.internal.v1.media_worker_pb2 import ConfigureMedia, MediaCommand, MediaReport

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class MediaWorker:
    """One media worker over all its lives (a :class:`ChildOwner`)."""

    index: int
    configuration: ConfigureMedia
    scheduler: Scheduler
    now: Callable[[], float]
    changed: Callable[[], None]
    """Called after everything that happened."""
    failed: Callable[[SetupError], None]
    """Called when the worker says that it can never start."""
    supervisor: Supervisor | None = None
    ready: bool = False

    def received(self, envelope: bytes) -> None:
        """See :class:`ChildOwner`."""
        assert self.supervisor is not None
        report = MediaReport.FromString(envelope)
        match report.WhichOneof("report"):
            case "hello":
                self.supervisor.greet(MediaCommand(configure=self.configuration))
            case "ready":
                self.ready = True
                self.supervisor.succeed()
                self.scheduler.media_worker_ready(self.index, self.now())
            case "measured":
                measured = report.measured
                self.scheduler.item_measured(self.index, measured.part, measured.layout, measured.input, self.now())
            case "prepared":
                seconds = report.prepared.prepare_nanoseconds / 1e9
                self.scheduler.item_prepared(self.index, report.prepared.part, seconds, self.now())
            case "failed":
                self.scheduler.item_failed(self.index, report.failed.part, _error(report), self.now())
            case "child_failed":
                self.failed(SetupError(report.child_failed.message))
            case unknown:
                raise AssertionError(f"a media worker reported {unknown}")
        self.changed()

    def lost(self) -> None:
        """See :class:`ChildOwner`."""
        self.ready = False
        self.scheduler.media_worker_lost(self.index, self.now())
        self.changed()


def _error(report: MediaReport) -> ServiceError:
    # "DROPPED" answers a drop, whose part has ended already: nobody is told.
    reason = Reason.INTERNAL if report.failed.reason == "DROPPED" else Reason(report.failed.reason)
    return ServiceError(reason, report.failed.message)
