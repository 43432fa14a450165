"""The media worker: a process that turns media files into a model's input, one at a time.

``python -m encoder_svc.media.worker DESCRIPTOR``, started by the front. It is a process because codecs crash and hang:
one that does is the front's to kill, and costs one item.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from encoder_svc.child import attach_to_front, without_collection
from encoder_svc.errors import SetupError
from encoder_svc.telemetry.logging import configure_logging
from epd.internal.v1.media_worker_pb2 import ChildFailed, ChildHello, MediaCommand, MediaReady, MediaReport


def main(arguments: Sequence[str]) -> int:
    """Runs a worker until the front ends it.

    Args:
        arguments: the descriptor of the link.
    """
    (descriptor,) = arguments
    link = attach_to_front(descriptor)
    link.send(MediaReport(hello=ChildHello(pid=os.getpid())))
    configuration = link.receive(MediaCommand)[0].configure
    configure_logging(configuration.log_level or "info", "media")
    try:
        with without_collection():
            # Heavy imports wait for the hello, and for the environment that attach_to_front sets.
            from encoder_svc.media.preparer import Preparer

            preparer = Preparer(link, configuration)
    except SetupError as error:
        link.send(MediaReport(child_failed=ChildFailed(message=str(error))))
        link.close()
        return 1
    link.send(MediaReport(ready=MediaReady()))
    preparer.run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
