"""The file of callers: who may call, proved how, and what they may do. Encoders and language-only workers read it."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

MAX_IDENTITY_CHARACTERS = 256
_SHA256 = re.compile("[0-9a-f]{64}")


class Permission(StrEnum):
    """What a caller may do."""

    ENCODE = "encode"
    """At an encoder: ``Encode``, ``Upload``, ``Cancel``."""
    READ = "read"
    """At an encoder: ``Acquire``, ``Subscribe``, ``Fetch``, ``Release``, ``Renew``."""
    INFO = "info"
    """At an encoder: ``GetServerInfo``."""
    GENERATE = "generate"
    """At a language-only worker: ``Generate``."""


@dataclass(frozen=True)
class Credential:
    """One entry of the file of callers."""

    identity: str
    """Scopes ids, receivers, uploads and the cache. Several credentials may have the same."""
    permissions: frozenset[Permission]
    token_sha256: str = ""
    """Of a random token, as ``encoder-svc token`` makes it: 64 hexadecimal digits. Or else:"""
    certificate: str = ""
    """The common name of a client certificate."""


def read_callers(file: Path) -> tuple[Credential, ...]:
    """Reads a file of callers, such as docs/operations.md shows.

    Raises:
        ValueError: it cannot be read, or says what cannot be; the message names the file and the entry, and no token.
    """
    try:
        table = tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise ValueError(f"cannot read the file of callers {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"the file of callers {file} is not TOML: {error}") from None
    try:
        credentials = _credentials(table)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    proofs = [(credential.token_sha256, credential.certificate) for credential in credentials]
    if len(set(proofs)) < len(proofs):
        raise ValueError(f"{file}: two credentials have the same token or certificate")
    return credentials


def _credentials(table: dict[str, Any]) -> tuple[Credential, ...]:
    entries = table.pop("credential", None)
    _require(not table, next(iter(table), ""), "there is no such key; entries begin with [[credential]]")
    has_some = isinstance(entries, list) and bool(entries) and all(isinstance(entry, dict) for entry in entries)
    _require(has_some, "credential", "there must be an entry at least, which begins with [[credential]]")
    return tuple(_credential(entry, f"credential[{number}]") for number, entry in enumerate(entries))


def _credential(entry: dict[str, Any], where: str) -> Credential:
    for key in entry:
        _require(key in _KEYS, f"{where}.{key}", f"there is no such key; there are {', '.join(_KEYS)}")
    for key in {"identity", "token_sha256", "certificate"} & set(entry):
        _require(isinstance(entry[key], str), f"{where}.{key}", "it must be a text")
    identity: str = entry.get("identity", "")
    fits = 0 < len(identity) <= MAX_IDENTITY_CHARACTERS
    _require(fits, f"{where}.identity", f"it must be a text of 1 to {MAX_IDENTITY_CHARACTERS} characters")
    permissions = entry.get("permissions")
    known = ", ".join(Permission)
    _require(isinstance(permissions, list) and bool(permissions), f"{where}.permissions", f"it must be some of {known}")
    for number, name in enumerate(permissions or ()):
        _require(name in list(Permission), f"{where}.permissions[{number}]", f"{name!r} is none of {known}")
    _require(("token_sha256" in entry) != ("certificate" in entry), where, "needs either token_sha256 or certificate")
    token_sha256: str = entry.get("token_sha256", "")
    is_digest = "token_sha256" not in entry or _SHA256.fullmatch(token_sha256) is not None
    _require(is_digest, f"{where}.token_sha256", "it must be the token's SHA-256, 64 lower-case hexadecimal digits")
    certificate: str = entry.get("certificate", "")
    _require(bool(token_sha256 or certificate), f"{where}.certificate", "it must be the common name of a certificate")
    return Credential(identity, frozenset(map(Permission, permissions or ())), token_sha256, certificate)


def _require(holds: bool, where: str, what: str) -> None:
    if not holds:
        raise ValueError(f"{where}: {what}")


_KEYS = ("identity", "permissions", "token_sha256", "certificate")
