"""Log lines: one format for the front and its children, on stderr."""

from __future__ import annotations

import logging
import sys


def configure_logging(level: str, process: str) -> None:
    """Sends the log of this process to stderr.

    A log never holds media bytes, leases or slot keys.

    Args:
        level: the least severity: ``debug``, ``info``, ``warning`` or ``error``.
        process: what this process is, such as ``engine``; it stands in every line.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        logging.Formatter(
            f"%(asctime)s.%(msecs)03d %(levelname)-7s {process}[%(process)d] %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
        )
    )
    handler.addFilter(_is_worth_telling)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Pillow tells every PNG chunk at DEBUG, and gRPC every call; nobody looks for that in a server's log.
    for chatty in ("PIL", "grpc"):
        logging.getLogger(chatty).setLevel(logging.INFO)


def _is_worth_telling(record: logging.LogRecord) -> bool:
    # gRPC traces, as an error of ours, a status that it could not send because the caller left as the call ended.
    error = record.exc_info[1] if record.exc_info else None
    return not (record.name.startswith("grpc.") and "SendStatusFromServerOperation" in str(error))
