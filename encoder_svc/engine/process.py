"""The engine: a process that owns one device, encodes batches, and serves reads of its arena.

``python -m encoder_svc.engine.process DESCRIPTOR``, started by the front.

The main thread takes commands; the forward thread runs the batches and reports::

    front ──RunBatch──► main ──queue──► forward thread ──reports──► front
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from encoder_svc.child import FrontLink, attach_to_front
from encoder_svc.engine.forward_thread import ForwardThread
from encoder_svc.shared_memory import SharedMemory
from encoder_svc.telemetry.logging import configure_logging
from epd.internal.v1.engine_pb2 import ConfigureEngine, EngineCommand, EngineReport, SlotVerified, VerifySlot
from epd.internal.v1.media_worker_pb2 import ChildHello


class Engine:
    """The main thread's loop.

    Args:
        link: the link to the front.
        configuration: what to load and where the arenas are.
    """

    def __init__(self, link: FrontLink, configuration: ConfigureEngine) -> None:
        self._link = link
        self._arena = SharedMemory(configuration.arena_fd, configuration.arena_bytes)
        input_arena = SharedMemory(configuration.input_arena_fd, configuration.input_arena_bytes)
        self._forward = ForwardThread(configuration, input_arena, self._arena, link)

    def run(self) -> NoReturn:
        """Takes commands until the forward thread ends the link."""
        self._forward.start()
        while True:
            self._take(self._link.receive(EngineCommand)[0])

    def _take(self, command: EngineCommand) -> None:
        match command.WhichOneof("command"):
            case "run":
                self._forward.enqueue(command.run)
            case "verify":
                self._link.send(EngineReport(verified=self._verify(command.verify)))
            case other:
                raise ValueError(f"unexpected command {other}")

    def _verify(self, question: VerifySlot) -> SlotVerified:
        from encoder_svc.engine.checksum import slot_checksum

        return SlotVerified(
            query=question.query, checksum=slot_checksum(self._arena, question.payload_offset, question.nbytes)
        )


def main(arguments: Sequence[str]) -> NoReturn:
    """Runs an engine until the front ends it, or it cannot start or go on: then with status 1.

    Args:
        arguments: the descriptor of the link.
    """
    (descriptor,) = arguments
    link = attach_to_front(descriptor)
    link.send(EngineReport(hello=ChildHello(pid=os.getpid())))
    configuration = link.receive(EngineCommand)[0].configure
    configure_logging(configuration.log_level or "info", "engine")
    Engine(link, configuration).run()


if __name__ == "__main__":
    main(sys.argv[1:])
