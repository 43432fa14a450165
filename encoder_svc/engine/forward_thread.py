"""The thread that loads the towers and runs the batches, in the order in which they come.

It is a thread of its own so that the link answers during a forward, and it is nicer than the rest of the process so
that the front answers too.
"""

from __future__ import annotations

import logging
import os
import queue
import secrets
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from encoder_svc.child import FrontLink, without_collection
from encoder_svc.engine.slot_places import SlotPlaces
from encoder_svc.errors import SetupError
from encoder_svc.shared_memory import SharedMemory
from epd import slot_header
from epd.internal.v1.engine_pb2 import (
    BatchDone,
    BatchStarted,
    ConfigureEngine,
    EngineReport,
    Loading,
    RunBatch,
)
from epd.internal.v1.media_worker_pb2 import ChildFailed

if TYPE_CHECKING:
    from encoder_svc.engine.loading import LoadedEngine
    from encoder_svc.engine.runner import LaunchedBatch, Runner

log = logging.getLogger(__name__)

# Costs the forward nothing and takes a fifth to a third off the front's tail latency on a machine that they share.
_NICENESS = 10

# Of the progress of loading, as much is told as a person can see.
_VISIBLE_PROGRESS = 0.01


class ForwardThread(threading.Thread):
    """Loads, then runs what :meth:`enqueue` takes, until the process ends.

    Args:
        configuration: what to load.
        input_arena: where the model's inputs are.
        arena: where the slots are.
        link: takes its reports, and is ended with the thread.
    """

    def __init__(
        self,
        configuration: ConfigureEngine,
        input_arena: SharedMemory,
        arena: SharedMemory,
        link: FrontLink,
    ) -> None:
        super().__init__(name="forward", daemon=True)
        self._configuration = configuration
        self._input_arena = input_arena
        self._arena = arena
        self._link = link
        self._batches: queue.SimpleQueue[RunBatch] = queue.SimpleQueue()
        self._loading = Loading()
        self._places = SlotPlaces()

    def enqueue(self, batch: RunBatch) -> None:
        """Runs a batch after those that came before. Called from any thread."""
        for item in batch.items:
            self._places.add(item.payload_offset - slot_header.SIZE, item.nbytes)
        self._batches.put(batch)

    def run(self) -> None:
        """The thread. It ends only when the process must."""
        try:
            self._load_and_run()
        except SetupError as error:
            self._link.send(EngineReport(child_failed=ChildFailed(message=str(error))))
        except Exception:
            log.exception("the engine ends")
        finally:
            self._link.end()

    def _load_and_run(self) -> None:
        asked = self._configuration
        with without_collection():
            engine = self._load(asked)
        self._link.send(EngineReport(ready=engine.ready))
        run_batches(engine.runner, self._batches, self._link.send)

    def _load(self, asked: ConfigureEngine) -> LoadedEngine:
        # Heavy imports happen here: by now the process has said hello and its environment is set.
        from encoder_svc.engine.loading import load_engine
        from encoder_svc.engine.serving import serve_arena

        # Before the thread gets nicer: the threads of Mooncake, which serve readers during a forward, inherit that too.
        boot_id = secrets.token_hex(16)
        service = serve_arena(self._arena, self._places, boot_id, asked)
        if asked.device == "cpu":
            # On Linux niceness belongs to a thread; the OpenMP workers that this one starts inherit it.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
        return load_engine(asked, self._input_arena, self._arena, boot_id, service, self._tell_progress)

    def _tell_progress(self, step: str, fraction: float) -> None:
        told = self._loading
        if step == told.step and fraction < 1.0 and fraction - told.fraction < _VISIBLE_PROGRESS:
            return
        self._loading = Loading(step=step, fraction=fraction)
        self._link.send(EngineReport(loading=self._loading))


def run_batches(runner: Runner, batches: queue.SimpleQueue[RunBatch], report: Callable[[EngineReport], None]) -> None:
    """Runs batches for ever, and reports when one is started and when its slots are written.

    Args:
        runner: of the device.
        batches: in the order in which they run. Nobody else takes from it.
        report: takes what is told.

    Raises:
        DeviceLostError: the device is lost.
    """
    launched: deque[tuple[int, LaunchedBatch]] = deque()
    while True:
        # With nothing to launch, what was launched is finished; else as many stay under way as the device likes.
        while launched and (len(launched) > runner.ahead or batches.empty()):
            number, batch = launched.popleft()
            outcome = runner.finish(batch)
            done = BatchDone(
                batch=number,
                items=outcome.results,
                forward_nanoseconds=outcome.forward_nanoseconds,
                stage_nanoseconds=outcome.stage_nanoseconds,
            )
            report(EngineReport(done=done))
        command = batches.get()
        report(EngineReport(started=BatchStarted(batch=command.batch)))
        launched.append((command.batch, runner.launch(command.items)))
