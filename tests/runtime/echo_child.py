"""A child that does what its configuration says, to try the supervisor and its link with a real process.

``ConfigureMedia.model`` says how it lives:

* ``echo``: it is ready, and answers each item with its part and the bytes of its files.
* ``end``: it ends with status 3 before it is ready. ``ready-end``: after it was.
* ``signal-N``: it dies of signal N.
* ``hang``: it never becomes ready.
"""

from __future__ import annotations

import os
import sys

from encoder_svc.child import attach_to_front
from epd.internal.v1.media_worker_pb2 import ChildHello, MediaCommand, MediaReady, MediaReport, Prepared


def main(descriptor: str) -> int:
    link = attach_to_front(descriptor)
    link.send(MediaReport(hello=ChildHello(pid=os.getpid())))
    life = link.receive(MediaCommand)[0].configure.model
    if life.startswith("signal-"):
        os.kill(os.getpid(), int(life.removeprefix("signal-")))
    if life in {"echo", "ready-end"}:
        link.send(MediaReport(ready=MediaReady()))
    while life in {"echo", "hang"}:
        command, files = link.receive(MediaCommand)
        prepared = Prepared(part=command.prepare.part, prepare_nanoseconds=sum(map(len, files)))
        link.send(MediaReport(prepared=prepared))
    return 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
