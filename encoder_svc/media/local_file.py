"""``file:`` addresses: regular files below the folders that the operator has named."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote_to_bytes

from encoder_svc.errors import Reason, ServiceError

_READ_BYTES = 1 << 20


def path_of_file_uri(uri: str) -> Path:
    """The absolute path that a ``file:`` address names (RFC 8089). Nothing is looked up.

    Raises:
        ServiceError: REQUEST_INVALID: it names another host, a relative path, or no path.
    """
    rest = uri[len("file:") :].partition("#")[0]
    if rest.startswith("//"):
        host, slash, rest = rest[2:].partition("/")
        if host.lower() not in ("", "localhost"):
            raise ServiceError(Reason.REQUEST_INVALID, "a `file:` address cannot name another host")
        rest = slash + rest
    path = os.fsdecode(unquote_to_bytes(rest))
    if not path.startswith("/") or "?" in rest or "\0" in path:
        raise ServiceError(
            Reason.REQUEST_INVALID, "a `file:` address needs an absolute path, as in `file:///media/cat.jpg`"
        )
    return Path(path)


def read_file(path: Path, roots: Sequence[Path], limit: int) -> bytes:
    """Reads a regular file below one of the roots. It blocks: for a thread of its own.

    What is checked is the file that is read, not its name: it is opened without access (``O_PATH``: no device is
    touched, no FIFO waited for), the kernel tells where it really lies, and the same open file is then read. A link
    that changes in between changes nothing.

    Args:
        path: absolute; links are followed, as long as the file that they end at lies below a root.
        roots: absolute paths, the real ones among them.
        limit: bytes of the file.

    Raises:
        ServiceError: URI_FORBIDDEN, FETCH_REFUSED (missing, or no regular file), FETCH_FAILED, FETCH_TOO_LARGE.
    """
    # By its name alone first, so that nobody learns which files there are elsewhere.
    if not _is_below(os.path.normpath(path), roots):
        raise _forbidden()
    try:
        anchor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        raise ServiceError(Reason.FETCH_REFUSED, "there is no such file that the server can read") from None
    try:
        own_name = f"/proc/self/fd/{anchor}"
        if not _is_below(str(Path(own_name).readlink()), roots):
            raise _forbidden()
        status = os.fstat(anchor)
        if not stat.S_ISREG(status.st_mode):
            raise ServiceError(Reason.FETCH_REFUSED, "the address names no regular file")
        if status.st_size > limit:
            raise _too_large(limit)
        return _read(own_name, limit)
    finally:
        os.close(anchor)


def _read(name: str, limit: int) -> bytes:
    parts: list[bytes] = []
    nbytes = 0
    try:
        descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            while part := os.read(descriptor, min(_READ_BYTES, limit + 1 - nbytes)):
                nbytes += len(part)
                if nbytes > limit:
                    raise _too_large(limit)
                parts.append(part)
        finally:
            os.close(descriptor)
    except PermissionError:
        raise ServiceError(Reason.FETCH_REFUSED, "there is no such file that the server can read") from None
    except OSError:
        raise ServiceError(Reason.FETCH_FAILED, "the file cannot be read; its disk may be at fault") from None
    return b"".join(parts)


def _is_below(path: str, roots: Sequence[Path]) -> bool:
    return any(path.startswith(f"{root}/") for root in roots)


def _forbidden() -> ServiceError:
    return ServiceError(
        Reason.URI_FORBIDDEN, "the file is in no folder that the server reads; send the bytes (setting: fetch_roots)"
    )


def _too_large(limit: int) -> ServiceError:
    return ServiceError(Reason.FETCH_TOO_LARGE, f"the file has more than {limit} bytes; make it smaller")
