"""The engine: a process that owns one device, encodes batches, and serves reads of its arena.

``python -m encoder_svc.engine.process ADDRESS``, started by the front.

The main thread owns the link; the forward thread runs the batches. Reports of the second pass through the first::

    front ──RunBatch──► main ──queue──► forward thread
          ◄──reports──       ◄──inproc──
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import zmq

from encoder_svc.child import FrontLink, FrontLostError, attach_to_front
from encoder_svc.engine.forward_thread import ForwardThread
from encoder_svc.shared_memory import SharedMemory
from encoder_svc.telemetry.logging import configure_logging
from epd.internal.v1.engine_pb2 import ConfigureEngine, EngineCommand, EngineReport, SlotVerified, VerifySlot
from epd.internal.v1.media_worker_pb2 import ChildHello

_REPORTS = "inproc://reports"


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
        self._reports: zmq.Socket[bytes] = link.context.socket(zmq.PAIR)
        self._reports.set_hwm(0)
        self._reports.bind(_REPORTS)
        self._forward = ForwardThread(configuration, input_arena, self._arena, self._connect_reports)

    def run(self) -> None:
        """Passes commands and reports on until the forward thread ends."""
        self._forward.start()
        poller = zmq.Poller()
        poller.register(self._link.socket, zmq.POLLIN)
        poller.register(self._reports, zmq.POLLIN)
        while True:
            ready = dict(poller.poll())
            if self._reports in ready:
                report = self._reports.recv()
                if not report:
                    break
                self._link.socket.send(report)
            if self._link.socket in ready:
                self._take(self._link.receive(EngineCommand)[0])
        self._reports.close(linger=0)

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

    def _connect_reports(self) -> Callable[[EngineReport | None], None]:
        """A ZeroMQ socket belongs to one thread: the forward thread makes its own."""
        socket: zmq.Socket[bytes] = self._link.context.socket(zmq.PAIR)
        socket.set_hwm(0)
        socket.connect(_REPORTS)

        def report(message: EngineReport | None) -> None:
            socket.send(b"" if message is None else message.SerializeToString())
            if message is None:
                socket.close()

        return report


def main(arguments: Sequence[str]) -> int:
    """Runs an engine until the front ends it.

    Args:
        arguments: the address of the link.

    Returns:
        1: the engine could not start, or cannot go on.
    """
    (address,) = arguments
    try:
        link = attach_to_front(address)
    except FrontLostError as error:
        print(f"engine: {error}", file=sys.stderr)  # noqa: T201 (there is no level to log at yet)
        return 1
    link.send(EngineReport(hello=ChildHello(pid=os.getpid())))
    configuration = link.receive(EngineCommand)[0].configure
    configure_logging(configuration.log_level or "info", "engine")
    Engine(link, configuration).run()
    link.close()
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
