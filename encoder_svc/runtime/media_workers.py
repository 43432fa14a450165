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

DROPPED = "DROPPED"
"""The reason that answers ``DropItem``, and ends an item that was only to be measured."""


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
                inputs = tuple(measured.inputs)
                self.scheduler.item_measured(self.index, measured.part, measured.layout, inputs, self.now())
            case "prepared":
                seconds = report.prepared.prepare_nanoseconds / 1e9
                self.scheduler.item_prepared(self.index, report.prepared.part, seconds, self.now())
            case "failed" if report.failed.reason == DROPPED:
                self.scheduler.item_dropped(self.index, report.failed.part, self.now())
            case "failed":
                error = ServiceError(Reason(report.failed.reason), report.failed.message)
                self.scheduler.item_failed(self.index, report.failed.part, error, self.now())
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
