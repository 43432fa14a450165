"""Downloads over HTTP: a request, its redirects, and a body that is counted as it comes."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import logging
import socket
import ssl
from typing import Self

import aiohttp
from aiohappyeyeballs import AddrInfoType
from yarl import URL

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.fetch_policy import FetchPolicy
from encoder_svc.media.host_names import CheckedResolver, Resolver
from encoder_svc.media.web_address import check_web_address

_log = logging.getLogger(__name__)

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_PASSING = frozenset({408, 425, 429})
"""Client errors that may be over at the next try."""
_SMALL_PIECE_BYTES = 4 << 10
"""Smaller pieces are put together, so that a server that sends single bytes costs no more memory than others."""
_PIECE_BYTES = 64 << 10
"""To this size, and no more than twice as much waits to be read: what the loop does at once stays small."""
_SMALL_BODY_BYTES = 256 << 10
"""Joined at once; a larger one in a thread, which lets go of the interpreter while it copies."""


class HttpDownload:
    """Downloads files within a policy. An async context manager.

    * No proxy, no ``.netrc``, no cookies, no credentials, whatever the environment says.
    * A connection goes to an address that was checked for it, and serves one request. There is one look-up for each
      hop, and :func:`open_checked_socket` checks again what is about to be connected to, numeric hosts among it.
    * Redirects are followed here, not by the HTTP client, and each hop is checked as the first one was.

    Args:
        policy: what is allowed.
        resolver: looks up names.
        tls: what servers are trusted. None: the system's authorities.
    """

    def __init__(self, policy: FetchPolicy, resolver: Resolver, tls: ssl.SSLContext | None = None) -> None:
        self._policy = policy
        self._resolver = CheckedResolver(policy, resolver)
        self._tls = tls
        self._places = asyncio.Semaphore(policy.max_concurrency)

    async def __aenter__(self) -> Self:
        tls = self._tls
        if tls is None and "https" in self._policy.schemes:
            # Reading the authorities' certificates takes tens of milliseconds.
            tls = await asyncio.to_thread(ssl.create_default_context)
        connector = aiohttp.TCPConnector(
            resolver=self._resolver,
            socket_factory=functools.partial(open_checked_socket, self._policy),
            ssl=tls if tls is not None else True,
            use_dns_cache=False,
            force_close=True,
            limit=0,  # The places are the limit.
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            read_bufsize=_PIECE_BYTES,
            headers={"User-Agent": "encoder-svc", "Accept": "*/*", "Accept-Encoding": "identity"},
            timeout=aiohttp.ClientTimeout(
                total=None, connect=self._policy.connect_seconds, sock_read=self._policy.idle_seconds
            ),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()
        await self._resolver.close()

    async def download(self, uri: str, limit: int) -> bytes:
        """Downloads one file. Cancelling it closes the connection.

        Args:
            uri: an ``https:`` or ``http:`` address.
            limit: bytes of the file.

        Raises:
            ServiceError: REQUEST_INVALID, URI_FORBIDDEN, FETCH_REFUSED, FETCH_FAILED, FETCH_TOO_LARGE.
            TimeoutError: the connection, or the next piece of an answer, took too long.
        """
        url = check_web_address(uri, self._policy)
        async with self._places:
            for _ in range(self._policy.max_redirects + 1):
                try:
                    answer = await self._ask(url, limit)
                except TimeoutError:
                    raise
                except (aiohttp.ClientError, OSError) as error:
                    # Paths and queries may hold secrets: the host is all that is logged.
                    _log.info("cannot fetch from %s: %s", url.raw_host, type(error).__name__)
                    raise _told(error) from None
                if isinstance(answer, list):
                    return await _join(answer)
                url = answer
        raise ServiceError(
            Reason.FETCH_REFUSED, f"the address redirects more than {self._policy.max_redirects} times; give its target"
        )

    async def _ask(self, url: URL, limit: int) -> list[bytes] | URL:
        """One request: the pieces of the file, or where to look instead."""
        async with self._session.get(url, allow_redirects=False) as answer:
            try:
                if answer.status in _REDIRECTS:
                    return self._next_hop(url, answer.headers.get("Location", ""))
                _check_status(answer.status)
                if answer.headers.get("Content-Encoding", "identity").lower() not in ("", "identity"):
                    raise ServiceError(
                        Reason.FETCH_REFUSED, "the file's server sends it compressed, unasked; have it sent as it is"
                    )
                if (answer.content_length or 0) > limit:
                    raise _too_large(limit)
                return await _read(answer.content, limit)
            finally:
                # Whatever is left of the answer is not wanted.
                answer.close()

    def _next_hop(self, url: URL, location: str) -> URL:
        try:
            # As written where it is ASCII, like the first address.
            target = url.join(URL(location, encoded=location.isascii()))
        except ValueError:
            target = None
        if not location or target is None:
            raise ServiceError(Reason.FETCH_REFUSED, "the address redirects to no address")
        if target.scheme not in ("https", "http"):
            # Else any web server could have files of this host, or whatever it likes, read in its name.
            raise ServiceError(Reason.URI_FORBIDDEN, "the address redirects to something that is not on the web")
        return check_web_address(str(target), self._policy)


def open_checked_socket(policy: FetchPolicy, info: AddrInfoType) -> socket.socket:
    """The last gate: a socket for an address that the HTTP client is about to connect to.

    Raises:
        ServiceError: URI_FORBIDDEN: the policy does not allow the address.
    """
    family, kind, protocol, _, address = info
    policy.check_address(ipaddress.ip_address(address[0]))
    return socket.socket(family, kind, protocol)


def _check_status(status: int) -> None:
    if status == 200:
        return
    if status >= 500 or status in _PASSING:
        raise ServiceError(Reason.FETCH_FAILED, f"the file's server answers {status}; try again later")
    raise ServiceError(Reason.FETCH_REFUSED, f"the file's server answers {status}; check the address")


async def _read(body: aiohttp.StreamReader, limit: int) -> list[bytes]:
    pieces: list[bytes] = []
    small = bytearray()
    nbytes = 0
    async for data in body.iter_any():
        nbytes += len(data)
        if nbytes > limit:
            raise _too_large(limit)
        if len(data) >= _SMALL_PIECE_BYTES and not small:
            pieces.append(data)
            continue
        small += data
        if len(small) >= _PIECE_BYTES:
            pieces.append(bytes(small))
            small.clear()
    pieces.append(bytes(small))
    return pieces


async def _join(pieces: list[bytes]) -> bytes:
    if sum(map(len, pieces)) <= _SMALL_BODY_BYTES:
        return b"".join(pieces)
    return await asyncio.to_thread(_join_and_free, pieces)


def _join_and_free(pieces: list[bytes]) -> bytes:
    body = b"".join(pieces)
    # Here rather than on the loop: giving so much memory back to the system takes milliseconds.
    while pieces:
        pieces.pop()
    return body


def _told(error: aiohttp.ClientError | OSError) -> ServiceError:
    match error:
        case aiohttp.ClientConnectorCertificateError():
            return ServiceError(
                Reason.FETCH_REFUSED, "the certificate of the file's server is not trusted or not for this host"
            )
        case aiohttp.ClientConnectorError():
            return ServiceError(Reason.FETCH_FAILED, "the file's server cannot be connected to; try again later")
        case aiohttp.ClientPayloadError() | aiohttp.ServerDisconnectedError():
            return ServiceError(Reason.FETCH_FAILED, "the connection broke off before the file was complete; try again")
        case _:
            return ServiceError(Reason.FETCH_FAILED, "the file's server does not answer as HTTP demands")


def _too_large(limit: int) -> ServiceError:
    return ServiceError(Reason.FETCH_TOO_LARGE, f"the file has more than {limit} bytes; make it smaller")
