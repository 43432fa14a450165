"""From a host name to the network addresses that a fetch may use."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from aiohttp.abc import AbstractResolver, ResolveResult

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.fetch_policy import FetchPolicy

_THREADS = 8
"""Names that are looked up at once. The system's resolver may hold a thread for many seconds."""


class Resolver(Protocol):
    """Looks up names."""

    async def resolve(self, host: str) -> list[str]:
        """The numeric addresses of a host, best first.

        Raises:
            OSError: it has none, or the look-up failed.
        """
        ...

    async def close(self) -> None:
        """Lets go of what it holds."""
        ...


class SystemResolver:
    """Asks the system, as every other program on the host does: its hosts file, then its DNS servers.

    It has threads of its own: in the event loop's few, a slow name server would hold up everything else.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="names")

    async def resolve(self, host: str) -> list[str]:
        """See :class:`Resolver`."""
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        )
        return list(dict.fromkeys(str(address[0]) for *_, address in found))

    async def close(self) -> None:
        """See :class:`Resolver`. Does not wait for look-ups that are under way."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class CheckedResolver(AbstractResolver):
    """Gives the HTTP client the addresses of a host, if the policy allows all of them.

    One forbidden address condemns the host: names that mix public and private addresses are made for attacks.
    """

    def __init__(self, policy: FetchPolicy, resolver: Resolver) -> None:
        self._policy = policy
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The checked addresses, numeric: whoever connects to them looks up nothing.

        Raises:
            ServiceError: URI_FORBIDDEN, FETCH_FAILED.
        """
        try:
            addresses = [ipaddress.ip_address(text) for text in await self._resolver.resolve(host)]
        except (OSError, UnicodeError):
            addresses = []
        if not addresses:
            raise ServiceError(Reason.FETCH_FAILED, "the name of the host cannot be looked up; check the address")
        for address in addresses:
            self._policy.check_address(address)
        return [
            ResolveResult(
                hostname=host,
                host=str(address),
                port=port,
                family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                proto=socket.IPPROTO_TCP,
                flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        """Lets go of what the resolver holds."""
        await self._resolver.close()
