"""What tests of the client share: a server with all transports, and patience with servers that stand still."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from encoder_client import releases
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


@pytest.fixture(autouse=True, scope="module")
def patient_releases() -> Iterator[None]:
    """What is not read is given back, also to a server that this machine keeps from running for seconds.

    A client does not try that for long, since every lease runs out by itself; here leases are longer than any test.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(releases, "ABANDON_SECONDS", 5.0)
        yield
