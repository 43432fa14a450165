"""The proxy's HTTP side. A chat request's media go to the encoders, its text to vLLM, whose answer streams through."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from asyncio.trsock import TransportSocket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import grpc
from aiohttp import AddrInfoType, ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, web

from encoder_client.client_settings import ClientSettings
from encoder_client.credentials import Credentials
from encoder_client.errors import EncoderClientError, EncoderError, PromptError
from encoder_client.events import Ready
from encoder_client.fleet.encoder_fleet import EncoderFleet
from encoder_client.proxy.chat_media import ChatMedia, rewrite, take
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk

logger = logging.getLogger("encoder_client")

HTTP_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.FAILED_PRECONDITION: 400,
    grpc.StatusCode.OUT_OF_RANGE: 400,
    grpc.StatusCode.NOT_FOUND: 400,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 429,
    grpc.StatusCode.UNAVAILABLE: 503,
    grpc.StatusCode.DEADLINE_EXCEEDED: 504,
}
"""What an encoder's error becomes; any other is 502."""
PASSED_ON = {"accept", "authorization", "content-type", "x-request-id", "traceparent", "tracestate"}
"""Headers of a request that vLLM gets."""
NOT_PASSED_BACK = {
    "connection", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "upgrade", "server", "date",
}  # fmt: skip
"""Headers of an answer that belong to one connection, or that the proxy writes itself."""


_KEEPALIVE = {socket.TCP_KEEPIDLE: 30, socket.TCP_KEEPINTVL: 10, socket.TCP_KEEPCNT: 3}
"""Seconds of silence before the first probe, and between two, and how many are not answered: a minute in all."""


@dataclass(frozen=True)
class ProxySettings:
    """How a proxy is set up."""

    encoders: tuple[str, ...]
    """gRPC targets, as for :class:`EncoderFleet`."""
    vllm: str
    """Address of the engine, such as ``http://127.0.0.1:8000``."""
    encode_seconds: float = 60.0
    """The deadline of a request's media."""
    max_body_bytes: int = 64 << 20
    """The largest chat request."""
    max_requests: int = 1024
    """Chat requests at once; more are told to come again."""
    stall_seconds: float = 60.0
    """How long a caller may take to send a request, and may take nothing of its answer."""
    credentials: Credentials = field(default_factory=Credentials)
    """For calls to encoders."""


class Proxy:
    """Serves callers of one vLLM.

    Args:
        settings: how.
        fleet: has the media encoded.
        session: calls vLLM.
    """

    def __init__(self, settings: ProxySettings, fleet: EncoderFleet, session: ClientSession) -> None:
        self._settings = settings
        self._fleet = fleet
        self._session = session
        self._chats = 0

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """``POST /v1/chat/completions``."""
        if self._chats >= self._settings.max_requests:
            return _error(429, "the proxy has as many requests as it takes; try again", 1.0)
        self._chats += 1
        try:
            if (connection := request.get_extra_info("socket")) is not None:
                _watch(connection)  # a caller whose machine is gone holds embeddings, by the kernel's default two hours
            try:
                async with asyncio.timeout(self._settings.stall_seconds):
                    body = await _json(request)
            except TimeoutError:
                return _error(408, f"the request did not come within {self._settings.stall_seconds:g} s")
            media = take(body)
            async with AsyncExitStack() as answering:
                async with self._encoded(media) as chunks:
                    data = json.dumps(rewrite(body, chunks, self._fleet.model_type)).encode()
                    upstream = await answering.enter_async_context(
                        self._session.post(self._address(request), data=data, headers=_passed_on(request))
                    )
                    first = await upstream.content.readany()
                # vLLM has computed the prompt when it says something, so the embeddings may go.
                return await self._stream(request, upstream, first)
        except PromptError as error:
            return _error(400, str(error))
        except EncoderError as error:
            # An address that the encoder must not fetch is the caller's; that it refuses the proxy itself is not.
            status = 400 if error.reason == "URI_FORBIDDEN" else HTTP_STATUS.get(error.code, 502)
            return _error(status, str(error), error.retry_after)
        except EncoderClientError as error:
            return _error(502, str(error))
        except ClientError as error:
            return _error(502, f"vLLM does not answer: {error}")
        finally:
            self._chats -= 1

    async def plain(self, request: web.Request) -> web.StreamResponse:
        """What has no media: passed through as it is."""
        data = await request.read() if request.can_read_body else None
        try:
            async with self._session.request(
                request.method, self._address(request), data=data, headers=_passed_on(request)
            ) as upstream:
                return await self._stream(request, upstream, b"")
        except ClientError as error:
            return _error(502, f"vLLM does not answer: {error}")

    async def _stream(self, request: web.Request, upstream: ClientResponse, first: bytes) -> web.StreamResponse:
        headers = {name: value for name, value in upstream.headers.items() if name.lower() not in NOT_PASSED_BACK}
        answer = web.StreamResponse(status=upstream.status, headers=headers)
        await answer.prepare(request)
        try:
            await self._write(answer, first)
            async for piece in upstream.content.iter_any():
                await self._write(answer, piece)
            await answer.write_eof()
        except (ClientError, TimeoutError) as error:
            logger.warning("an answer of vLLM is broken off: %s", error)
            if request.transport is not None:
                request.transport.abort()  # so that the caller does not take it for a whole one
        return answer

    async def _write(self, answer: web.StreamResponse, piece: bytes) -> None:
        try:
            async with asyncio.timeout(self._settings.stall_seconds):
                await answer.write(piece)
        except TimeoutError:
            raise TimeoutError(f"its caller has taken nothing for {self._settings.stall_seconds:g} s") from None

    @asynccontextmanager
    async def _encoded(self, media: ChatMedia) -> AsyncIterator[Sequence[EmbeddingChunk]]:
        """Has media encoded, and keeps the embeddings at their encoders while the block runs."""
        if not media.items:
            yield ()
            return
        seconds = self._settings.encode_seconds
        chunks: dict[int, EmbeddingChunk] = {}
        try:
            async with self._fleet.encode(media.items, timeout=seconds, cache_salt=media.cache_salt) as call:
                async for event in call:
                    if isinstance(event, Ready):
                        chunks[event.chunk.part_idx] = event.chunk
                    if failures := call.failures:  # also of parts that were cancelled
                        raise failures[min(failures)]
            renewing = asyncio.create_task(self._renew(list(chunks.values())))
            try:
                yield [chunks[part_idx] for part_idx in range(len(media.items))]
            finally:
                renewing.cancel()
                await asyncio.gather(renewing, return_exceptions=True)
        finally:
            with suppress(EncoderClientError):  # leases that cannot be given back run out
                await self._fleet.client.abandon(list(chunks.values()))

    async def _renew(self, chunks: Sequence[EmbeddingChunk]) -> None:
        """A request may wait for long in vLLM's queue. A lease that is lost is no fault yet: the cache may have it."""
        seconds = min(lease.ttl.ToNanoseconds() for chunk in chunks for lease in chunk.leases) / 1e9
        while True:
            await asyncio.sleep(seconds / 3)
            for chunk in chunks:
                with suppress(EncoderClientError):
                    await self._fleet.client.renew([chunk])

    def _address(self, request: web.Request) -> str:
        return self._settings.vllm.rstrip("/") + request.path_qs


@asynccontextmanager
async def serving(settings: ProxySettings, host: str, port: int) -> AsyncIterator[str]:
    """Serves for as long as the block runs.

    Args:
        settings: how.
        host: where to listen.
        port: 0 takes a free one.

    Yields:
        ``HOST:PORT`` with the real port.

    Raises:
        EncoderClientError: the address cannot be listened on.
    """
    # Nothing is read here.
    fleet = EncoderFleet(settings.encoders, ClientSettings(settings.credentials, transports=("inline",)))
    # Answers take as long as they take, and calls to vLLM are bounded by max_requests.
    connector = TCPConnector(limit=0, socket_factory=_watched_socket)
    session = ClientSession(timeout=ClientTimeout(total=None, sock_connect=10.0), connector=connector)
    async with fleet, session:
        proxy = Proxy(settings, fleet, session)
        application = web.Application(client_max_size=settings.max_body_bytes)
        application.router.add_post("/v1/chat/completions", proxy.chat)
        application.router.add_post("/v1/completions", proxy.plain)
        application.router.add_get("/{path:.*}", proxy.plain)
        # A caller who leaves cancels its handler, and with it the calls to encoders and vLLM.
        runner = web.AppRunner(application, handler_cancellation=True, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, host, port)
            try:
                await site.start()
            except OSError as error:
                raise EncoderClientError(f"cannot listen on {host}:{port}: {error.strerror}") from None
            yield f"{host}:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()


async def _json(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError:
        raise PromptError("the body is no JSON") from None
    if not isinstance(body, dict):
        raise PromptError("the body must be an object")
    return body


def _watched_socket(info: AddrInfoType) -> socket.socket:
    """To an engine whose machine may go without a word: its answer would be waited for, and its embeddings held."""
    family, kind, protocol, _, _ = info
    connection = socket.socket(family, kind, protocol)
    _watch(connection)
    return connection


def _watch(connection: socket.socket | TransportSocket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _passed_on(request: web.Request) -> dict[str, str]:
    return {name: value for name, value in request.headers.items() if name.lower() in PASSED_ON}


def _error(status: int, message: str, retry_after: float | None = None) -> web.Response:
    kind = "invalid_request_error" if status == 400 else "encoder_error"
    headers = {} if retry_after is None else {"Retry-After": str(max(1, round(retry_after)))}
    text = {"error": {"message": message, "type": kind, "code": status}}
    return web.json_response(text, status=status, headers=headers)
