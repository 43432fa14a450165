"""``data:`` addresses (RFC 2397): the media themselves, in base64 or percent-encoded."""

from __future__ import annotations

import binascii
import contextlib
import time
from urllib.parse import unquote_to_bytes

from encoder_svc.errors import Reason, ServiceError

_SLICE = 64 << 10
"""Characters that are decoded at a time: 0.2 to 0.4 ms, in which no other thread gets the interpreter."""
_ESCAPED_SLICE = 16 << 10
"""The same where some are percent-encoded, which takes longer."""
_PAUSE = 20e-6
"""Seconds between slices, in which the event loop's thread can take the interpreter."""
_MAX_HEADER = 1024
"""Characters before the comma."""
_BLANKS = b" \t\r\n\f"


def decode_data_uri(uri: str, limit: int) -> bytes:
    """Decodes a ``data:`` address. Its media type is not looked at: the bytes tell what they are.

    Base64 may be broken into lines and may lack its padding; any other fault in it is told. A fragment is left out.
    It is meant to run in a thread of its own, and lets other threads run in between.

    Args:
        uri: the address.
        limit: bytes of the result. No more than that, and one slice, is ever held.

    Raises:
        ServiceError: REQUEST_INVALID if it is no ``data:`` address, FETCH_TOO_LARGE.
    """
    comma = uri.find(",", 0, _MAX_HEADER)
    if comma < 0:
        raise ServiceError(Reason.REQUEST_INVALID, "a `data:` address needs a comma before its data")
    is_base64 = uri[:comma].rstrip().lower().endswith(";base64")
    # Base64 with every character percent-encoded is the longest way to write a byte.
    if len(uri) - comma > 4 * limit + _MAX_HEADER:
        raise _too_large(limit)
    parts: list[bytes] = []
    nbytes = 0
    rest, start = "", comma + 1
    quartet = b""
    while start < len(uri):
        text = uri[start : start + _SLICE]
        if "%" in text:
            text = text[:_ESCAPED_SLICE]
        start += len(text)
        text = rest + text
        text, fragment, _ = text.partition("#")
        if fragment:
            start = len(uri)
        # An escape that the slice cuts through waits for its end.
        escape = text.rfind("%", max(0, len(text) - 2)) if start < len(uri) else -1
        rest = text[escape:] if escape >= 0 else ""
        data = unquote_to_bytes(text[:escape] if escape >= 0 else text)
        if is_base64:
            encoded = quartet + data.translate(None, _BLANKS)
            whole = len(encoded) if start >= len(uri) else len(encoded) // 4 * 4
            encoded, quartet = encoded[:whole], encoded[whole:]
            data = _from_base64(encoded, is_last=start >= len(uri))
        nbytes += len(data)
        if nbytes > limit:
            raise _too_large(limit)
        parts.append(data)
        if start < len(uri):
            time.sleep(_PAUSE)
    # Joining lets go of the interpreter while it copies.
    return b"".join(parts)


def _from_base64(encoded: bytes, *, is_last: bool) -> bytes:
    if is_last and b"=" not in encoded[-2:]:
        encoded += b"=" * (-len(encoded) % 4)
    padding = len(encoded) - len(encoded.rstrip(b"="))
    data = None
    # Python 3.11 takes padding behind whole groups of four.
    if len(encoded) % 4 == 0 and padding <= (2 if is_last else 0):
        with contextlib.suppress(binascii.Error):
            data = binascii.a2b_base64(encoded, strict_mode=True)
    if data is None:
        raise ServiceError(Reason.REQUEST_INVALID, "the `data:` address is not base64; encode the whole file again")
    return data


def _too_large(limit: int) -> ServiceError:
    return ServiceError(Reason.FETCH_TOO_LARGE, f"the `data:` address holds more than {limit} bytes")
