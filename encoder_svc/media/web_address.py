"""``https:`` and ``http:`` addresses: parsed once, checked, and rebuilt from what was checked."""

from __future__ import annotations

import ipaddress
import re

from yarl import URL

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.addresses import parse_literal
from encoder_svc.media.fetch_policy import FetchPolicy

MAX_CHARACTERS = 8192
"""Of an address that is not ``data:``."""
_BAD_CHARACTER = re.compile(r"[\x00-\x20\x7f\\]")
"""Blanks, controls and backslashes: parsers differ in what they make of them, so no parser gets to see them."""
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")


def check_web_address(text: str, policy: FetchPolicy) -> URL:
    """Parses an address and refuses what the policy does not allow, as far as its text shows.

    Args:
        text: absolute, with scheme ``http`` or ``https``.
        policy: what is allowed.

    Returns:
        The address to ask for: host in lower case and ASCII, a numeric one in the usual spelling, no fragment. Path and
        query are as the caller wrote them, so that signed addresses stay valid.

    Raises:
        ServiceError: REQUEST_INVALID, URI_FORBIDDEN.
    """
    check_characters(text)
    try:
        url = URL(text)
        as_written = URL(text, encoded=True) if text.isascii() else url
        host, port = url.raw_host, url.port
    except ValueError:  # The IDNA codec's UnicodeError is one, too.
        raise _invalid() from None
    policy.check_scheme(url.scheme)
    authority = re.split(r"[/?#]", text.partition("//")[2], maxsplit=1)[0]
    if "@" in authority:
        raise ServiceError(
            Reason.URI_FORBIDDEN, "the server fetches no address with a user name or password; use a signed address"
        )
    if not host or port is None:
        raise _invalid()
    host = host.lower().removesuffix(".")
    address = parse_literal(host)
    if address is not None:
        host = str(address)
    elif "[" in authority or not _NAME.fullmatch(host):
        raise _invalid()
    policy.check_host(host, port)
    if address is not None:
        policy.check_address(address)
    authority = f"[{host}]:{port}" if isinstance(address, ipaddress.IPv6Address) else f"{host}:{port}"
    query = f"?{as_written.raw_query_string}" if as_written.raw_query_string else ""
    return URL(f"{url.scheme}://{authority}{as_written.raw_path or '/'}{query}", encoded=True)


def check_characters(text: str) -> None:
    """Refuses an address that is too long, or holds what no address may.

    Raises:
        ServiceError: REQUEST_INVALID.
    """
    if len(text) > MAX_CHARACTERS:
        raise ServiceError(Reason.REQUEST_INVALID, f"the address has more than {MAX_CHARACTERS} characters")
    if _BAD_CHARACTER.search(text):
        raise ServiceError(
            Reason.REQUEST_INVALID, "the address holds a blank, a control character or a backslash; percent-encode it"
        )


def _invalid() -> ServiceError:
    return ServiceError(
        Reason.REQUEST_INVALID, "the address is not a URL with a host, as in https://example.com/cat.jpg"
    )
