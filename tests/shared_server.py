"""A server that many modules of tests share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

import grpc

from tests.rpc.calls import is_idle
from tests.server_process import ServerProcess
from tests.waiting import eventually

IDLE_SECONDS = 10.0
"""What a module's last calls may still take to end."""


class SharedServer:
    """Serves the next module as well if the last one left it as it was; else a new one is started.

    A caller that leaves while READY is on its way leaves a lease behind, which ends by its time only. A module must not
    fail for what another one left.

    Args:
        serve: a context manager that starts a server and ends it.
    """

    def __init__(self, serve: Callable[[], AbstractContextManager[ServerProcess]]) -> None:
        self._serve = serve
        self._life = contextlib.ExitStack()
        self._server: ServerProcess | None = None

    def get(self) -> ServerProcess:
        """A server that holds nothing of anybody."""
        if self._server is None or not asyncio.run(_soon_idle(self._server)):
            self.close()
            self._server = self._life.enter_context(self._serve())
        return self._server

    def close(self) -> None:
        """Ends the server, if there is one."""
        self._server = None
        self._life.close()


async def _soon_idle(server: ServerProcess) -> bool:
    try:
        await eventually(lambda: is_idle(server), IDLE_SECONDS)
    except (AssertionError, TimeoutError, grpc.aio.AioRpcError):
        return False
    return True
