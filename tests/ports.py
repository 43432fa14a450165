"""Ports for servers that must be told one."""

from __future__ import annotations

import os
import socket
from pathlib import Path

LOWEST = 20_000
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port() -> int:
    """A TCP port of the loopback that nothing listens on.

    It lies below those that the system gives to connections and to who asks for any port, and is given to one caller
    only, of whatever process: so none of the other tests that run at the same time takes it before the server has.
    """
    end = int(EPHEMERAL.read_text().split()[0])
    start = LOWEST + os.getpid() % max(1, end - LOWEST)
    places: list[int] = [*range(start, end), *range(LOWEST, start)]
    for port in places:
        if _is_free(port) and _take(port):
            return port
    raise AssertionError(f"no port from {LOWEST} to {end} is free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _take(port: int) -> bool:
    """Takes the port's name among the host's abstract unix sockets, until this process ends. False: it was given."""
    with socket.socket(socket.AF_UNIX) as name:
        try:
            name.bind(f"\0tests.ports.{port}")
        except OSError:
            return False
        name.detach()
    return True
