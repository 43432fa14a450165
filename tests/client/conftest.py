"""What tests of the client share: a server with all transports."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import one_server
from tests.server_process import ServerProcess
from tests.shared_server import SharedServer


@pytest.fixture(scope="session")
def shared_mooncake_server(tiny_checkpoint: Path) -> Iterator[SharedServer]:
    """Where :func:`mooncake_server` comes from."""
    with contextlib.closing(SharedServer(lambda: one_server(tiny_checkpoint, mooncake="on"))) as shared:
        yield shared


@pytest.fixture(scope="module")
def mooncake_server(shared_mooncake_server: SharedServer) -> ServerProcess:
    """A server that serves embeddings by every transport."""
    return shared_mooncake_server.get()
