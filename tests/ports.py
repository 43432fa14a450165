"""Ports for servers that must be told one."""

from __future__ import annotations

import os
import socket
from itertools import count
from pathlib import Path

LOWEST = 20_000
EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
_ASKED = count()


def free_port() -> int:
    """A TCP port of the loopback that nothing listens on.

    It lies below those that the system gives to connections and to who asks for any port: so none of the other tests
    that run at the same time takes it before the server has.
    """
    end = int(EPHEMERAL.read_text().split()[0])
    start = LOWEST + (os.getpid() + next(_ASKED)) % max(1, end - LOWEST)
    places: list[int] = [*range(start, end), *range(LOWEST, start)]
    for port in places:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError(f"no port from {LOWEST} to {end} is free")
