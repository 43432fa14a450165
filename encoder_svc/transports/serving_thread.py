"""A thread that serves others: what one of them brings about does not end it, and if it ends, that is noticed."""

from __future__ import annotations

import logging
import os
import threading
import time
from abc import ABC, abstractmethod
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

_SILENCE_SECONDS = 60.0
"""Between two faults that are logged: others may bring them about as often as they like."""

Received = TypeVar("Received")


class ServingThread(threading.Thread, ABC, Generic[Received]):
    """Receives and handles, for the life of the process.

    If it cannot receive any more, the process ends with status 1, since nobody else would notice: an engine is then
    started again, and what it offers is served again. Readers that it kept waiting would learn nothing.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._silent_until = 0.0

    @abstractmethod
    def receive(self) -> Received:
        """Waits for the next thing that others ask or tell. What it raises ends the process."""

    @abstractmethod
    def handle(self, received: Received) -> None:
        """Does what follows from it. What it raises is logged, and costs who asked his answer."""

    def run(self) -> None:
        """The thread."""
        try:
            while True:
                received = self.receive()
                try:
                    self.handle(received)
                except Exception as error:
                    self._note(error)
        except BaseException:
            log.exception("the thread %s cannot go on, and the process ends for it", self.name)
            logging.shutdown()
            os._exit(1)

    def _note(self, fault: Exception) -> None:
        now = time.monotonic()
        if now >= self._silent_until:
            self._silent_until = now + _SILENCE_SECONDS
            log.error("unexpected fault in the thread %s; it goes on", self.name, exc_info=fault)
