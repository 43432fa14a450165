"""Who calls, as far as the connection or a token proves it, and what they may do.

Without a file of callers everybody who can connect may do everything, and the common name of a client certificate,
where the server demands one, is the identity. With a file, a call needs a credential that is in it.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from epd.callers_file import Credential, Permission, read_callers
from epd.listening import Listening

MAX_TOKEN_BYTES = 1024
_SCHEME = "bearer "


class CallerUnknownError(Exception):
    """A call has no credential, or none that is known. The message is for the caller."""


class CallerForbiddenError(Exception):
    """A caller's credential lacks the permission. The message is for the caller."""


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
    def from_file(cls, file: Path | None, listening: Listening) -> Self:
        """Reads a file of callers, once.

        Args:
            file: TOML. None: everybody is let in.
            listening: where they call.

        Raises:
            ValueError: it cannot be read, or says what cannot be; the message names the file and the entry.
        """
        mutual_tls = listening.client_authority is not None
        if file is None:
            return cls(None, mutual_tls)
        credentials = read_callers(file)
        if not mutual_tls and any(credential.certificate for credential in credentials):
            raise ValueError(
                f"{file} names client certificates, which the server does not ask for; give --tls-client-ca"
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
            CallerUnknownError: the caller is not known.
            CallerForbiddenError: the caller may not do this.
        """
        certificate = _common_name(context) if self.mutual_tls else ""
        if self.credentials is None:
            return certificate
        credential = self._credential(_token(context), certificate)
        if permission not in credential.permissions:
            raise CallerForbiddenError(
                f"this call needs the permission `{permission}`, which the caller's credential does not have"
            )
        return credential.identity

    def _credential(self, token: str | None, certificate: str) -> Credential:
        assert self.credentials is not None
        found: Credential | None = None
        if token is not None:
            digest = hashlib.sha256(token.encode()).hexdigest()
            # All are compared, and in constant time: how long it takes tells nothing of what is in the file.
            for credential in self.credentials:
                if hmac.compare_digest(credential.token_sha256, digest):
                    found = credential
        elif certificate:
            found = next((known for known in self.credentials if known.certificate == certificate), None)
        if found is None:
            raise CallerUnknownError(_UNKNOWN if token is not None or certificate else _MISSING)
        return found


def _common_name(context: Any) -> str:
    names = list(context.auth_context().get("x509_common_name", ()))
    return names[0].decode(errors="replace") if names else ""


def _token(context: Any) -> str | None:
    """The bearer token of a call. None: it has none."""
    for key, value in context.invocation_metadata() or ():
        if key == "authorization":
            if not isinstance(value, str) or value[: len(_SCHEME)].lower() != _SCHEME or len(value) > MAX_TOKEN_BYTES:
                raise CallerUnknownError(_MALFORMED)
            return value[len(_SCHEME) :].strip()
    return None


_MISSING = "the call has no credential; send the metadata `authorization: Bearer TOKEN`, or use a client certificate"
_UNKNOWN = "the call's token or client certificate is not one that this server knows"
_MALFORMED = "the metadata `authorization` must be `Bearer TOKEN`"
