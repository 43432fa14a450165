"""The worker's process: its subscriptions, its gRPC server, and how it stops."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from grpc_health.v1 import health
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from encoder_client.client import EncoderClient
from encoder_client.client_settings import ClientSettings
from encoder_client.errors import EncoderClientError
from encoder_client.pool.embedding_pool import EmbeddingPool
from encoder_client.worker.assembly import give_back
from encoder_client.worker.inbox import Inbox
from encoder_client.worker.servicer import SERVICE, LanguageModel, LanguageServicer
from epd.addresses import is_loopback, split_address
from epd.language.v1.language_service_pb2_grpc import add_LanguageServiceServicer_to_server

logger = logging.getLogger("encoder_client")


@dataclass(frozen=True)
class WorkerSettings:
    """How a worker is set up."""

    encoders: tuple[str, ...]
    """gRPC targets of its encoders."""
    client: ClientSettings
    """How they are reached. No other process may have its receiver's name."""
    listen: str = "127.0.0.1:0"
    """``HOST:PORT``; port 0 takes a free one."""
    pool_bytes: int = 256 << 20
    """Memory that embeddings are read into."""
    max_prompts: int = 64
    """Prompts that are answered at once; the model takes one after another."""
    max_tokens: int = 4096
    """Tokens of an answer at most."""
    space_seconds: float = 30.0
    """How long a prompt waits for space in the pool."""
    allow_insecure: bool = False
    """Serve other hosts in plain text."""

    def __post_init__(self) -> None:
        if not self.encoders or not self.client.receiver:
            raise EncoderClientError("a worker needs the targets of its encoders, and a receiver's name of its own")
        try:
            host, _ = split_address(self.listen)
        except ValueError as error:
            raise EncoderClientError(f"cannot listen there: {error}") from None
        if not self.allow_insecure and not is_loopback(host):
            raise EncoderClientError(
                f"listening on {self.listen} would serve other hosts in plain text; listen on 127.0.0.1, or allow it "
                "by --allow-insecure if the network is trusted"
            )


class WorkerServer:
    """Follows the encoders and answers prompts, for as long as its ``async with`` lasts.

    Args:
        settings: how.
        model: who answers.

    Raises:
        EncoderClientError: the address cannot be listened on.

    Example:
        >>> async with WorkerServer(settings, model) as worker:
        ...     print(worker.target)
        ...     await worker.lost()
    """

    def __init__(self, settings: WorkerSettings, model: LanguageModel) -> None:
        self._settings = settings
        self._pool = EmbeddingPool(settings.pool_bytes)
        self._inbox = Inbox(settings.max_prompts)
        self._servicer = LanguageServicer(
            model, self._inbox, self._pool, settings.client.receiver,
            max_tokens=settings.max_tokens, space_timeout=settings.space_seconds,
        )  # fmt: skip
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._health: Any = health.aio.HealthServicer()  # type: ignore[attr-defined] # the stubs know only threads
        self._clients = AsyncExitStack()
        self._subscriptions: list[asyncio.Task[None]] = []
        host = settings.listen.rpartition(":")[0]
        try:
            port = self._server.add_insecure_port(settings.listen)
        except RuntimeError:
            raise EncoderClientError(
                f"cannot listen on {settings.listen}: the port is in use, or the address is not this host's"
            ) from None
        self.target = f"{host}:{port}"
        """Where it listens, with the real port."""

    async def __aenter__(self) -> Self:
        for target in self._settings.encoders:
            client = EncoderClient(target, self._settings.client, pool=self._pool)
            await self._clients.enter_async_context(client)
            self._subscriptions.append(asyncio.create_task(self._follow(client), name=f"encoder {target}"))
        add_LanguageServiceServicer_to_server(self._servicer, self._server)
        add_HealthServicer_to_server(self._health, self._server)
        await self._server.start()
        for service in ("", SERVICE):
            await self._health.set(service, HealthCheckResponse.SERVING)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._server.stop(None)
        for task in self._subscriptions:
            task.cancel()
        await asyncio.gather(*self._subscriptions, return_exceptions=True)
        await self._clients.aclose()
        self._servicer.close()

    async def lost(self) -> None:
        """Waits until the worker is of no use any more.

        Raises:
            EncoderError: an encoder refuses its subscription, such as when another process took the receiver's name.
        """
        done, _ = await asyncio.wait(self._subscriptions, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def drain(self, seconds: float) -> None:
        """Takes no more prompts, and waits until those that are there have been answered, for so many seconds."""
        self._servicer.stopping = True
        await self._health.enter_graceful_shutdown()
        await self._server.stop(seconds)

    async def _follow(self, client: EncoderClient) -> None:
        async with client.subscribe() as subscription:
            async for event in subscription:
                await give_back(self._inbox.take(client, event))
