"""Who calls, as far as the connection or a token proves it, and what they may do.

Without a file of callers everybody who can connect may do everything, and the common name of a client certificate,
where the server demands one, is the identity. With a file, a call needs a credential that is in it.
"""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from encoder_svc.errors import Reason, ServiceError, SetupError
from encoder_svc.settings import Settings

MAX_TOKEN_BYTES = 1024
_SCHEME = "bearer "


class Permission(StrEnum):
    """What a caller may do."""

    ENCODE = "encode"
    """``Encode``, ``Upload``, ``Cancel``."""
    READ = "read"
    """``Acquire``, ``Subscribe``, ``Fetch``, ``Release``, ``Renew``."""
    INFO = "info"
    """``GetServerInfo``."""


class Credential(BaseModel):
    """One entry of the file of callers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    identity: Annotated[str, Field(min_length=1, max_length=256)]
    """Scopes ids, receivers, uploads and the cache. Several credentials may have the same."""
    permissions: Annotated[frozenset[Permission], Field(min_length=1)]
    token_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")] | None = None
    """Of a random token, as ``encoder-svc token`` makes it."""
    certificate: Annotated[str, Field(min_length=1)] | None = None
    """The common name of a client certificate."""

    @model_validator(mode="after")
    def _has_one_proof(self) -> Self:
        if (self.token_sha256 is None) == (self.certificate is None):
            raise ValueError("needs either token_sha256 or certificate")
        return self


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    credential: Annotated[tuple[Credential, ...], Field(min_length=1)]


@dataclass(frozen=True)
class Callers:
    """Decides who calls.

    Args:
        credentials: those that are let in. None: everybody.
        mutual_tls: the server demands client certificates. Without that, nothing that a certificate says counts.
    """

    credentials: Sequence[Credential] | None
    mutual_tls: bool

    @classmethod
    def from_settings(cls, settings: Settings) -> Callers:
        """Reads the file that the settings name. It is read once.

        Raises:
            SetupError: it cannot be read, or says what cannot be.
        """
        mutual_tls = settings.tls_client_ca is not None
        if settings.callers is None:
            return cls(None, mutual_tls)
        credentials = _read(settings.callers)
        if not mutual_tls and any(credential.certificate is not None for credential in credentials):
            raise SetupError(
                f"{settings.callers} names client certificates, which the server does not ask for; give --tls-client-ca"
            )
        return cls(credentials, mutual_tls)

    def admit(self, context: Any, permission: Permission) -> str:
        """Lets a call in.

        Args:
            context: its ``grpc.aio.ServicerContext``.
            permission: what it needs.

        Returns:
            The identity that scopes the caller's ids. Empty: nobody in particular.

        Raises:
            ServiceError: the caller is not known, or may not do this.
        """
        certificate = _common_name(context) if self.mutual_tls else ""
        if self.credentials is None:
            return certificate
        credential = self._credential(_token(context), certificate)
        if permission not in credential.permissions:
            raise ServiceError(
                Reason.CALLER_FORBIDDEN,
                f"this call needs the permission `{permission}`, which the caller's credential does not have",
            )
        return credential.identity

    def _credential(self, token: str | None, certificate: str) -> Credential:
        assert self.credentials is not None
        found: Credential | None = None
        if token is not None:
            digest = hashlib.sha256(token.encode()).hexdigest()
            # All are compared, and in constant time: how long it takes tells nothing of what is in the file.
            for credential in self.credentials:
                if hmac.compare_digest(credential.token_sha256 or "", digest):
                    found = credential
        elif certificate:
            found = next((known for known in self.credentials if known.certificate == certificate), None)
        if found is None:
            raise ServiceError(Reason.CALLER_UNKNOWN, _UNKNOWN if token is not None or certificate else _MISSING)
        return found


def _read(file: Path) -> tuple[Credential, ...]:
    try:
        table = tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise SetupError(f"cannot read the file of callers {file}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SetupError(f"the file of callers {file} is not TOML: {error}") from None
    try:
        credentials = _File.model_validate(table).credential
    except ValidationError as error:
        raise SetupError("\n".join(_describe(file, fault) for fault in error.errors())) from None
    proofs = [credential.token_sha256 or credential.certificate for credential in credentials]
    if len(set(proofs)) < len(proofs):
        raise SetupError(f"{file}: two credentials have the same token or certificate")
    return credentials


def _describe(file: Path, fault: Any) -> str:
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in fault["loc"]).lstrip(".")
    return f"{file}: {path}: {str(fault['msg']).removeprefix('Value error, ')}"


def _common_name(context: Any) -> str:
    names = list(context.auth_context().get("x509_common_name", ()))
    return names[0].decode(errors="replace") if names else ""


def _token(context: Any) -> str | None:
    """The bearer token of a call. None: it has none."""
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            if not isinstance(value, str) or value[: len(_SCHEME)].lower() != _SCHEME or len(value) > MAX_TOKEN_BYTES:
                raise ServiceError(Reason.CALLER_UNKNOWN, _MALFORMED)
            return value[len(_SCHEME) :].strip()
    return None


_MISSING = "the call has no credential; send the metadata `authorization: Bearer TOKEN`, or use a client certificate"
_UNKNOWN = "the call's token or client certificate is not one that this server knows"
_MALFORMED = "the metadata `authorization` must be `Bearer TOKEN`"
