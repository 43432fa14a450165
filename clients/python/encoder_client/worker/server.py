"""The worker's process: its subscriptions, its gRPC server, and how it stops."""

from __future__ import annotations

import asyncio
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc
import grpc.aio
from grpc_health.v1 import health
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from encoder_client.client import EncoderClient
from encoder_client.client_settings import ClientSettings
from encoder_client.errors import EncoderClientError
from encoder_client.pool.embedding_pool import EmbeddingPool
from encoder_client.worker.assembly import give_back
from encoder_client.worker.inbox import Inbox
from encoder_client.worker.servicer import SERVICE, LanguageModel, LanguageServicer
from epd.callers import Callers
from epd.callers_file import Permission
from epd.grpc_server import OPTIONS, bind
from epd.health import Health
from epd.listening import Listening

logger = logging.getLogger("encoder_client")


@dataclass(frozen=True)
class WorkerSettings:
    """How a worker is set up."""

    encoders: tuple[str, ...]
    """gRPC targets of its encoders."""
    client: ClientSettings
    """How they are reached. No other process may have its receiver's name."""
    listening: Listening = field(default_factory=lambda: Listening("127.0.0.1:0"))
    """Where ``Generate`` is served."""
    callers: Path | None = None
    """TOML file of who may call, as an encoder has it; the permission is ``generate``. None: whoever can connect."""
    reflection: bool = True
    """Answer gRPC reflection, so that grpcurl needs no .proto files."""
    pool_bytes: int = 256 << 20
    """Memory that embeddings are read into."""
    max_prompts: int = 64
    """Prompts that are answered at once; the model takes one after another."""
    max_tokens: int = 4096
    """Tokens of an answer at most."""
    space_seconds: float = 30.0
    """How long a prompt waits for space in the pool."""
    part_seconds: float = 120.0
    """How long a prompt waits for parts of which nothing new is told: their encoder may be gone for good. It then fails
    with ``UNAVAILABLE``."""

    def __post_init__(self) -> None:
        if not self.encoders or not self.client.receiver:
            raise EncoderClientError("a worker needs the targets of its encoders, and a receiver's name of its own")
        if not self.part_seconds > 0:
            raise EncoderClientError(f"part_seconds must be more than 0, not {self.part_seconds}")


class WorkerServer:
    """Follows the encoders and answers prompts, for as long as its ``async with`` lasts.

    Args:
        settings: how.
        model: who answers.

    Raises:
        EncoderClientError: the address cannot be listened on, or a TLS file or the file of callers cannot be used.

    Example:
        >>> async with WorkerServer(settings, model) as worker:
        ...     print(worker.target)
        ...     await worker.lost()
    """

    def __init__(self, settings: WorkerSettings, model: LanguageModel) -> None:
        self._settings = settings
        self._pool = EmbeddingPool(settings.pool_bytes)
        self._inbox = Inbox(settings.max_prompts)
        self._server = grpc.aio.server(options=OPTIONS)
        self._health = Health(SERVICE)
        self._clients = AsyncExitStack()
        self._subscriptions: list[asyncio.Task[None]] = []
        try:
            callers = Callers.from_file(settings.callers, settings.listening)
            _check_identities(callers, settings.callers)
            port = bind(self._server, settings.listening)
        except ValueError as error:
            raise EncoderClientError(str(error)) from None
        self._servicer = LanguageServicer(
            model, self._inbox, self._pool, settings.client.receiver, callers,
            max_tokens=settings.max_tokens, space_timeout=settings.space_seconds,
            part_timeout=settings.part_seconds,
        )  # fmt: skip
        self.target = settings.listening.at(port)
        """Where it listens, with the real port."""

    async def __aenter__(self) -> Self:
        for target in self._settings.encoders:
            client = EncoderClient(target, self._settings.client, pool=self._pool)
            await self._clients.enter_async_context(client)
            self._subscriptions.append(asyncio.create_task(self._follow(client), name=f"encoder {target}"))
        self._servicer.serve_by(self._server)
        add_HealthServicer_to_server(self._health, self._server)
        if self._settings.reflection:
            _add_reflection(self._server)
        await self._server.start()
        self._health.set_serving(True)
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
        self._health.stop()
        await self._server.stop(seconds)

    async def _follow(self, client: EncoderClient) -> None:
        async with client.subscribe() as subscription:
            async for event in subscription:
                await give_back(self._inbox.take(client, event))


def _check_identities(callers: Callers, file: Path | None) -> None:
    """Encoders tell a worker of all that its own identity is sent: whoever else may ask would hear of that."""
    if callers.credentials is None:
        return
    identities = {who.identity for who in callers.credentials if Permission.GENERATE in who.permissions}
    if len(identities) != 1:
        raise ValueError(
            f"{file}: a worker answers one identity, that which it has at its encoders, and `generate` is given to "
            f"{', '.join(sorted(identities)) or 'nobody'}; give it to one, and start a worker for each"
        )


def _add_reflection(server: grpc.aio.Server) -> None:
    try:
        from grpc_reflection.v1alpha import reflection
    except ImportError as error:  # it comes with the extra `language`
        logger.info("reflection is left out, it cannot be loaded: %s", error)
    else:
        reflection.enable_server_reflection([SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
