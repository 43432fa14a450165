"""The gRPC server: its address, credentials, options, and the services on it."""

from __future__ import annotations

import socket
from typing import Any

import grpc.aio
from grpc_channelz.v1 import channelz, channelz_pb2
from grpc_health.v1 import health
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from grpc_reflection.v1alpha import reflection

from encoder_svc.errors import SetupError
from encoder_svc.rpc.callers import EncoderCallers
from encoder_svc.rpc.errors import ErrorInterceptor
from encoder_svc.rpc.generic_handlers import GenericHandlers
from encoder_svc.rpc.servicer import SERVICE, EncoderServicer, add_encoder_servicer
from encoder_svc.runtime.service import EncoderRuntime
from encoder_svc.settings import Settings
from encoder_svc.telemetry.metrics import Metrics
from epd.grpc_server import OPTIONS, bind
from epd.health import Health

WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 # compared with, not bound
"""Hosts that mean every address of the machine."""


class RpcServer:
    """A server that is bound when it is made, and serves between ``start`` and ``stop``.

    It is bound first because the runtime puts the address into every chunk.

    Args:
        settings: where and how to listen.
        metrics: counts calls.

    Raises:
        SetupError: the address cannot be listened on, or a TLS file or the file of callers cannot be used.

    Example::

        server = RpcServer(settings, metrics)
        async with Front(settings, Serving(server.target, ...), metrics, lag.worst) as front:
            await server.start(front)
            ...
            await server.stop(grace=1.0)
    """

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self._settings = settings
        self._callers = EncoderCallers(settings)
        self._health = Health(SERVICE)
        self._server = grpc.aio.server(interceptors=[ErrorInterceptor(SERVICE, metrics)], options=_options(settings))
        try:
            self.port = bind(self._server, settings.listening)
        except ValueError as error:
            raise SetupError(str(error)) from None
        self.address = settings.listening.at(self.port)
        """Where it listens, with the real port."""
        self.target = settings.advertise or _reachable(settings.listening.host, self.port, self.address)
        """Where clients reach it."""

    async def start(self, runtime: EncoderRuntime) -> None:
        """Begins to answer; health follows the runtime."""
        handlers: Any = GenericHandlers(self._server)
        add_encoder_servicer(EncoderServicer(runtime, self._settings, self._callers), handlers)
        add_HealthServicer_to_server(self._health, handlers)
        names = [SERVICE, health.SERVICE_NAME]
        if self._settings.channelz:
            channelz.add_channelz_servicer(handlers)
            names.append(channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name)
        if self._settings.reflection:
            reflection.enable_server_reflection([*names, reflection.SERVICE_NAME], handlers)
        runtime.on_readiness(self._health.set_serving)
        await self._server.start()

    def stop_serving(self) -> None:
        """Tells health checks NOT_SERVING; calls are still answered."""
        self._health.stop()

    async def stop(self, grace: float) -> None:
        """Takes no more calls, and aborts those that have not ended after ``grace`` seconds."""
        self.stop_serving()
        await self._server.stop(grace)


def _options(settings: Settings) -> list[tuple[str, int]]:
    return [
        *OPTIONS,
        ("grpc.max_receive_message_length", int(settings.max_message_bytes)),
        ("grpc.max_send_message_length", int(settings.max_message_bytes)),
        ("grpc.enable_channelz", int(settings.channelz)),
    ]


def _reachable(host: str, port: int, address: str) -> str:
    # Nobody can connect to a wildcard; the host's own name is what other hosts most likely know.
    return f"{socket.gethostname()}:{port}" if host in WILDCARDS else address
