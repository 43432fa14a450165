"""Web servers for the fetcher: well-behaved ones, and ones that write what they like."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable

import trustme
from aiohttp import web

from encoder_svc.media.fetch_policy import FetchPolicy

LOOPBACK = ipaddress.ip_network("127.0.0.0/8")

Page = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class WebServer:
    """A real aiohttp server whose pages a test sets, and which remembers what it was asked for."""

    def __init__(self) -> None:
        self.pages: dict[str, Page] = {}
        self.requests: list[web.BaseRequest] = []
        self.port = 0
        self.scheme = "http"

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        """The address of a page."""
        return f"{self.scheme}://{host}:{self.port}{path}"

    def serve(self, path: str, body: bytes, **headers: str) -> str:
        """Serves a file; returns its address."""

        async def page(_: web.BaseRequest) -> web.Response:
            return web.Response(body=body, headers={name.replace("_", "-"): value for name, value in headers.items()})

        self.pages[path] = page
        return self.url(path)

    def redirect(self, path: str, target: str, status: int = 302) -> str:
        """Sends callers elsewhere; returns the address."""

        async def page(_: web.BaseRequest) -> web.Response:
            return web.Response(status=status, headers={"Location": target, "Set-Cookie": "seen=1"})

        self.pages[path] = page
        return self.url(path)

    async def answer(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answers by the page of the path."""
        self.requests.append(request)
        page = self.pages.get(request.path)
        return await page(request) if page is not None else web.Response(status=404, text="secret text of the server")


@contextlib.asynccontextmanager
async def web_server(host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> AsyncIterator[WebServer]:
    """A served :class:`WebServer` on a free port."""
    server = WebServer()
    runner = web.ServerRunner(web.Server(server.answer, handler_cancellation=True), shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, host, 0, ssl_context=tls)
    await site.start()
    server.port = runner.addresses[0][1]
    server.scheme = "https" if tls else "http"
    try:
        yield server
    finally:
        await runner.cleanup()


@contextlib.asynccontextmanager
async def raw_server(script: Script) -> AsyncIterator[int]:
    """A server that speaks as its script does, after it has read the request. Gives its port."""
    running: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await reader.readuntil(b"\r\n\r\n")
            await script(reader, writer)
        running.discard(task)
        writer.close()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        for task in running:
            task.cancel()
        server.close()
        await server.wait_closed()


class Authority:
    """A certificate authority of the test's own."""

    def __init__(self) -> None:
        self._authority = trustme.CA()

    def server(self, host: str) -> ssl.SSLContext:
        """A server's side, with a certificate for ``host``."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._authority.issue_cert(host).configure_cert(context)
        return context

    def client(self) -> ssl.SSLContext:
        """A client's side, which trusts this authority and no other."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._authority.configure_trust(context)
        return context


class Names:
    """A resolver with answers of the test's own: for each name a list of answers, the last of which stays."""

    def __init__(self, **answers: list[list[str]]) -> None:
        self._answers = {name.replace("_", "."): list(given) for name, given in answers.items()}
        self.asked: list[str] = []

    async def resolve(self, host: str) -> list[str]:
        """The next answer for a name."""
        self.asked.append(host)
        answers = self._answers.get(host)
        if answers is None:
            raise OSError("no such name at 10.9.8.7")
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def close(self) -> None:
        """Holds nothing."""


def local_policy(*ports: int, **changes: object) -> FetchPolicy:
    """A policy that allows the web on this host's loopback, at some ports."""
    fields: dict[str, object] = {
        "schemes": frozenset({"data", "http"}),
        "ports": frozenset(ports),
        "allow_private": (LOOPBACK,),
        **changes,
    }
    return FetchPolicy(**fields)  # type: ignore[arg-type] # of many types
