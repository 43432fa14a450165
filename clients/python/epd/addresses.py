"""Addresses, as ``HOST:PORT`` or ``[IPv6]:PORT``."""

from __future__ import annotations

import ipaddress


def split_address(address: str) -> tuple[str, int]:
    """Splits ``HOST:PORT`` or ``[IPv6]:PORT``.

    Raises:
        ValueError: it is neither.
    """
    host, separator, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Only processes of this host connect to such a host, given as a name or as an address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
