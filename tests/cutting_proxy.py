"""A TCP proxy whose connections a test can cut, and which it can take out of reach for a while."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from epd.addresses import split_address


class CuttingProxy:
    """Forwards connections on a free port of the loopback to ``target``.

    Example:
        >>> async with cutting_proxy(server.target) as proxy:
        ...     proxy.cut()
    """

    def __init__(self, target: str) -> None:
        self._host, self._port = split_address(target)
        self._writers: set[asyncio.StreamWriter] = set()
        self.open = True
        """New connections are taken; else they are closed at once."""
        self.connections = 0
        """How many were forwarded until now."""
        self.target = ""

    def move(self, target: str) -> None:
        """New connections go to another server."""
        self._host, self._port = split_address(target)

    def cut(self) -> None:
        """Breaks all connections, without a word to either side but RST."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection."""
        if not self.open:
            writer.transport.abort()
            return
        self.connections += 1
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, far_writer}
        self._writers |= both
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_copy(reader, far_writer))
                tasks.create_task(_copy(far_reader, writer))
        finally:
            self._writers -= both
            for end in both:
                end.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


@asynccontextmanager
async def cutting_proxy(target: str) -> AsyncIterator[CuttingProxy]:
    """A proxy before ``target``."""
    proxy = CuttingProxy(target)
    server = await asyncio.start_server(proxy.forward, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()[:2]
    proxy.target = f"{host}:{port}"
    try:
        yield proxy
    finally:
        server.close()
        proxy.cut()
        await server.wait_closed()
