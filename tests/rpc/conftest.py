"""Servers that several tests of this folder share, each for one kind of circumstance."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.conftest import one_server
from tests.server_process import START_SECONDS, ServerProcess
from tests.shared_server import SharedServer


class FileServer(ThreadingHTTPServer):
    """A web server on the loopback, whose files a test sets."""

    daemon_threads = True
    request_queue_size = 128
    """Connections that come at once wait here. The kernel drops those beyond it, and then they come seconds later."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _FileHandler)
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.answers = threading.Event()
        """While it is clear, nothing is answered."""
        self.answers.set()

    def serve(self, path: str, file: bytes) -> str:
        """Offers a file; returns its address."""
        self.files[path] = file
        return f"http://127.0.0.1:{self.server_port}{path}"


class _FileHandler(BaseHTTPRequestHandler):
    server: FileServer

    def do_GET(self) -> None:  # the base class names it so
        self.server.asked.append(self.path)
        self.server.answers.wait()
        file = self.server.files.get(self.path)
        self.send_response(404 if file is None else 200)
        self.send_header("Content-Length", str(len(file or b"")))
        self.end_headers()
        self.wfile.write(file or b"")

    def handle(self) -> None:
        # Whoever asked may have left: that is what some tests are about.
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 # the base class's name
        """Says nothing."""


@pytest.fixture(scope="session")
def file_server() -> Iterator[FileServer]:
    """A web server that :func:`small_server` may fetch from."""
    with FileServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        yield server
        server.answers.set()
        server.shutdown()
        thread.join()


@pytest.fixture(scope="session")
def shared_small_server(tiny_checkpoint: Path, file_server: FileServer) -> Iterator[SharedServer]:
    """Where :func:`small_server` comes from."""

    def serve() -> AbstractContextManager[ServerProcess]:
        return one_server(
            tiny_checkpoint,
            max_queued_parts=24,
            max_inline_bytes="64KiB",
            max_upload_bytes="512KiB",
            max_uploads_bytes="1MiB",
            upload_seconds=START_SECONDS,
            fetch_schemes="data,http",
            fetch_private_networks="127.0.0.0/8",
            fetch_ports=file_server.server_port,
            fetch_max_bytes="256KiB",
            fetch_seconds=START_SECONDS,
        )

    with contextlib.closing(SharedServer(serve)) as shared:
        yield shared


@pytest.fixture(scope="module")
def small_server(shared_small_server: SharedServer) -> ServerProcess:
    """A server with little room, which fetches from :func:`file_server` and waits as long as it takes."""
    return shared_small_server.get()


@pytest.fixture(scope="session")
def hasty_server(tiny_checkpoint: Path, file_server: FileServer) -> Iterator[ServerProcess]:
    """A server that soon gives up what it fetches from :func:`file_server`, and soon forgets what was uploaded."""
    with one_server(
        tiny_checkpoint,
        upload_seconds=0.5,
        fetch_schemes="http",
        fetch_private_networks="127.0.0.0/8",
        fetch_ports=file_server.server_port,
        fetch_seconds=0.5,
    ) as server:
        yield server
