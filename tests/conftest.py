"""Fixtures that more than one concept needs: a tiny checkpoint, and real servers on it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests import hung_tasks
from tests.server_process import ServerProcess
from tests.shared_server import SharedServer

# Before torch is imported: two test processes share the cores, and OpenMP's threads wait by spinning. On two cores the
# tests of models take twice the time otherwise.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Property tests look for new examples wherever a person runs them; in CI the same commit gives the same answer. No
# deadlines, and no judgement of how fast examples are drawn: the machine may be busy.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeat", settings.get_profile("search"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE") or ("repeat" if os.environ.get("CI") else "search"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Shows where the tasks of a test wait that failed by its limit of time: its stack shows a loop that waits."""
    try:
        return (yield)
    except pytest.fail.Exception as failure:
        runner = getattr(item, "funcargs", {}).get("_function_scoped_runner")
        if runner is not None and "pytest-timeout" in str(failure):
            print(f"--- what the tasks wait for ---\n{hung_tasks.report(runner.get_loop())}")
        raise


StartServer = Callable[..., ServerProcess]
"""Starts a server: ``start_server(wait=True, **settings)``."""


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Qwen2.5-VL checkpoint that a forward of takes milliseconds."""
    from encoder_svc.checkpoints import write_checkpoint

    folder = tmp_path_factory.mktemp("checkpoints") / "tiny-qwen2_5_vl"
    write_checkpoint("qwen2_5_vl", folder, preset="tiny")
    return folder


@pytest.fixture
def start_server(tiny_checkpoint: Path) -> Iterator[StartServer]:
    """Starts servers with settings of the test's own; they are gone, with all they left, when it ends."""
    with servers(tiny_checkpoint) as start:
        yield start


@pytest.fixture(scope="session")
def shared_server(tiny_checkpoint: Path) -> Iterator[SharedServer]:
    """Where :func:`server` comes from."""
    with contextlib.closing(SharedServer(lambda: one_server(tiny_checkpoint))) as shared:
        yield shared


@pytest.fixture(scope="module")
def server(shared_server: SharedServer) -> ServerProcess:
    """One server for all tests that leave it as it was: starting one takes the time of many tests."""
    return shared_server.get()


@contextlib.contextmanager
def one_server(model: Path, **settings: Any) -> Iterator[ServerProcess]:
    """A server that is ready, and gone with all it left when the block ends."""
    with servers(model) as start:
        yield start(**settings)


@contextlib.contextmanager
def servers(model: Path) -> Iterator[StartServer]:
    """Starts servers, and sees to it that nothing of them is left: no process, no file in /dev/shm."""
    started: list[ServerProcess] = []

    def start(*, wait: bool = True, **settings: Any) -> ServerProcess:
        server = ServerProcess(**{"model": model, **settings})
        started.append(server)
        return server.wait_ready() if wait else server

    try:
        yield start
    finally:
        for server in started:
            print(f"--- log of the server {server.target} ---\n{server.stderr}")
            server.close()
    left = {file for server in started for file in server.left_memory()}
    assert not left, left
