"""The standard ``grpc.health.v1``, such that nobody who watches holds anybody up.

The servicer of ``grpc_health`` writes to a watcher under the lock that every change needs: one watcher that reads
nothing would keep its server from ever saying NOT_SERVING again, and from stopping.
"""
# gRPC's names are not ours to choose.
# ruff: noqa: N802

from __future__ import annotations

import asyncio
from typing import Any

import grpc
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer


class Health(HealthServicer):  # type: ignore[misc] # its module has no types
    """Tells whether requests are taken, by the service's full name and by the empty one. NOT_SERVING at first.

    It answers from a field; no request and no work is ever before it. Belongs to the event loop's thread.

    Args:
        service: the full name of the service whose health is told.
    """

    def __init__(self, service: str) -> None:
        self._names = ("", service)
        self._status = HealthCheckResponse.NOT_SERVING
        self._changed = asyncio.Event()
        self._stopping = False

    def set_serving(self, serving: bool) -> None:
        """Requests are taken, or not any more. Of no effect after :meth:`stop`."""
        if not self._stopping:
            self._set(HealthCheckResponse.SERVING if serving else HealthCheckResponse.NOT_SERVING)

    def stop(self) -> None:
        """NOT_SERVING from now on. Watches stay open until the server ends them."""
        self._stopping = True
        self._set(HealthCheckResponse.NOT_SERVING)

    async def Check(self, request: HealthCheckRequest, context: Any) -> HealthCheckResponse:
        """Tells it once."""
        if request.service not in self._names:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service; the empty name stands for the server")
        return HealthCheckResponse(status=self._status)

    async def Watch(self, request: HealthCheckRequest, context: Any) -> None:
        """Tells it now and whenever it changes; what a watcher that reads slowly has missed, it never hears."""
        told: int | None = None
        while True:
            known = request.service in self._names
            status = self._status if known else HealthCheckResponse.SERVICE_UNKNOWN
            if status == told:
                await self._changed.wait()
            else:
                await context.write(HealthCheckResponse(status=status))
                told = status

    def _set(self, status: int) -> None:
        self._status = status
        self._changed.set()
        self._changed.clear()
