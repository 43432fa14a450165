"""The one way by which media come from an address: guarded, bounded, and denied unless it is allowed.

The front runs it on its event loop. Nothing here keeps the loop for longer than a millisecond: what decodes, reads
files or copies much does so in threads.
"""

from __future__ import annotations

import asyncio
import ssl
from concurrent.futures import ThreadPoolExecutor
from typing import Self

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.data_uri import decode_data_uri
from encoder_svc.media.fetch_policy import FetchPolicy
from encoder_svc.media.file_reads import FileReads
from encoder_svc.media.host_names import Resolver, SystemResolver
from encoder_svc.media.http_download import HttpDownload
from encoder_svc.media.local_file import path_of_file_uri, read_file
from encoder_svc.media.web_address import check_characters

_THREADS = 4
"""That decode, and again that read files: a file system that hangs holds up files alone."""
_SMALL_DATA_CHARACTERS = 16 << 10
"""A `data:` address that is decoded at once: it takes less time than a thread would."""
_MAX_SCHEME = 16


class Fetcher:
    """Fetches media. An async context manager, used on one event loop.

    Args:
        policy: what is allowed.
        resolver: looks up names; the fetcher closes it. None: the system's.
        tls: what servers are trusted. None: the system's authorities.

    Example:
        >>> async def main() -> bytes:
        ...     async with Fetcher(FetchPolicy()) as fetcher:
        ...         return await fetcher.fetch("data:;base64,aGVsbG8=")
        >>> asyncio.run(main())
        b'hello'
    """

    def __init__(
        self, policy: FetchPolicy, resolver: Resolver | None = None, *, tls: ssl.SSLContext | None = None
    ) -> None:
        self._policy = policy
        self._decoding = ThreadPoolExecutor(_THREADS, thread_name_prefix="data-uri")
        self._files = FileReads(_THREADS, policy.max_seconds)
        self._http = HttpDownload(policy, resolver or SystemResolver(), tls)

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ends fetches that are under way; it waits for no thread."""
        await self._http.__aexit__()
        self._decoding.shutdown(wait=False, cancel_futures=True)
        self._files.close()

    async def fetch(self, uri: str, limit_bytes: int | None = None) -> bytes:
        """The bytes behind an address. Cancelling it ends it at once, and closes its connection.

        Args:
            uri: a ``data:``, ``https:``, ``http:`` or ``file:`` address, as far as the policy allows them.
            limit_bytes: the most bytes of the result, if that is less than the policy's.

        Raises:
            ServiceError: REQUEST_INVALID, URI_FORBIDDEN, FETCH_REFUSED, FETCH_FAILED, FETCH_TIMEOUT or FETCH_TOO_LARGE.
        """
        limit = self._policy.max_bytes if limit_bytes is None else min(limit_bytes, self._policy.max_bytes)
        scheme, colon, _ = uri[:_MAX_SCHEME].partition(":")
        if not colon:
            raise ServiceError(Reason.REQUEST_INVALID, "the address has no scheme; write it as https://... or data:...")
        scheme = scheme.lower()
        self._policy.check_scheme(scheme)
        try:
            async with asyncio.timeout(self._policy.max_seconds):
                return await self._fetch(scheme, uri, limit)
        except TimeoutError:
            raise ServiceError(
                Reason.FETCH_TIMEOUT, "the file did not come in time; send the bytes (setting: fetch_seconds)"
            ) from None

    async def _fetch(self, scheme: str, uri: str, limit: int) -> bytes:
        if scheme == "data":
            if len(uri) <= _SMALL_DATA_CHARACTERS:
                return decode_data_uri(uri, limit)
            return await asyncio.get_running_loop().run_in_executor(self._decoding, decode_data_uri, uri, limit)
        if scheme == "file":
            check_characters(uri)
            path = path_of_file_uri(uri)
            return await self._files.read(lambda: read_file(path, self._policy.roots, limit))
        return await self._http.download(uri, limit)
