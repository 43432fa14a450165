"""Who calls, as far as the connection proves it."""

from __future__ import annotations

from typing import Any


def identity_of(context: Any, *, mutual_tls: bool) -> str:
    """The common name of the caller's certificate.

    Args:
        context: the call's ``grpc.aio.ServicerContext``.
        mutual_tls: the server demands client certificates. Without that, nothing that a caller says of itself counts.

    Returns:
        The name that scopes the caller's ids; empty without mutual TLS.
    """
    if not mutual_tls:
        return ""
    names = list(context.auth_context().get("x509_common_name", ()))
    return names[0].decode(errors="replace") if names else ""
