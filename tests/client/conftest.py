"""One server with all transports for all tests of the client that leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server_process import ServerProcess


@pytest.fixture(scope="package")
def mooncake_server(tiny_checkpoint: Path) -> Iterator[ServerProcess]:
    """A server that serves embeddings by every transport."""
    server = ServerProcess(tiny_checkpoint, mooncake="on")
    try:
        yield server.wait_ready()
    finally:
        server.close()
