"""The standard ``grpc.health.v1``: whether requests are taken, by the service's full name and by the empty one.

It answers from a table in the front; no request and no forward is ever before it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self

from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckResponse

SERVING = HealthCheckResponse.SERVING
NOT_SERVING = HealthCheckResponse.NOT_SERVING


class HealthReporter:
    """Keeps the health service at what the runtime says.

    Use it as an async context manager around the life of the server.

    Args:
        service: the full name of the service whose health is told.
    """

    def __init__(self, service: str) -> None:
        self.servicer: Any = health.aio.HealthServicer()  # type: ignore[attr-defined] # the stubs know only threads
        self._names = ("", service)
        self._ready = False
        self._changed = asyncio.Event()
        self._changed.set()
        self._task: asyncio.Task[None] | None = None

    def set_ready(self, ready: bool) -> None:
        """Takes the newest readiness; made to be given to ``EncoderRuntime.on_readiness``."""
        self._ready = ready
        self._changed.set()

    async def stop_serving(self) -> None:
        """NOT_SERVING from now on, whatever the runtime says."""
        await self.servicer.enter_graceful_shutdown()

    async def __aenter__(self) -> Self:
        for name in self._names:
            await self.servicer.set(name, NOT_SERVING)
        self._task = asyncio.create_task(self._follow(), name="health")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _follow(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            status = SERVING if self._ready else NOT_SERVING
            for name in self._names:
                await self.servicer.set(name, status)
