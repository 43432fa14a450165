"""The page that Prometheus reads. It takes threads of the front, so it holds few connections, and none for long."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
from collections.abc import Callable
from socketserver import ThreadingMixIn
from threading import Lock, Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import make_wsgi_app

from encoder_svc.errors import SetupError
from encoder_svc.telemetry.metrics import Metrics

CONNECTIONS = 16
"""That are open at once. One more closes the oldest, so that those who hold them keep nobody out."""
IDLE_SECONDS = 10.0
"""How long a connection may say nothing."""

logger = logging.getLogger(__name__)


def serve_metrics(metrics: Metrics, host: str, port: int) -> tuple[int, Callable[[], None]]:
    """Serves the metrics over HTTP from threads of its own.

    Returns:
        The port, a free one if 0 was asked for, and a function that stops serving.

    Raises:
        SetupError: the address cannot be listened on.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        server_class = _IPv6Server if family == socket.AF_INET6 else _Server
        server = make_server(str(address[0]), port, make_wsgi_app(metrics.registry), server_class, _Handler)
    except OSError as error:
        raise SetupError(
            f"cannot serve metrics on {host}:{port}: {error.strerror}; give --metrics-listen another address"
        ) from None
    thread = Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return server.server_port, stop


class _Handler(WSGIRequestHandler):
    timeout = IDLE_SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 # the name is not ours
        """Says nothing: who reads the page, does so every few seconds."""


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *args: Any, **options: Any) -> None:
        self._open: list[socket.socket] = []
        self._lock = Lock()
        super().__init__(*args, **options)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Gives a connection a thread."""
        with self._lock:
            self._open.append(request)
            oldest = self._open.pop(0) if len(self._open) > CONNECTIONS else None
        if oldest is not None:
            with contextlib.suppress(OSError):  # its thread may just have closed it
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        with self._lock, contextlib.suppress(ValueError):
            self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Somebody went away, said nothing, or sent something else than HTTP."""
        logger.debug("a reader of the metrics page was left: %r", sys.exception())


class _IPv6Server(_Server):
    address_family = socket.AF_INET6
