"""The serving half of Mooncake: peers read the arena with one-sided transfers; the engine does nothing for a read.

Mooncake has no authentication: whoever reaches its port can read and write what is registered. Hence a checksum in
every chunk, and a private network for it.
"""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass
from typing import Any

from encoder_svc.shared_memory import SharedMemory
from encoder_svc.transports import TransportUnavailableError
from epd import slot_header
from epd.encoder.v1.embedding_pb2 import Locator, MooncakeLocator
from epd.rdma_devices import rdma_fault

log = logging.getLogger(__name__)

_LOG_LEVEL = "MC_LOG_LEVEL"
_QUIET = "ERROR"
_STDERR = 2  # the descriptor that C++ code writes to, whatever sys.stderr is

_METADATA = "P2PHANDSHAKE"  # peers ask each other; there is no metadata server

_PROBLEMS = (
    (
        "libibverbs",
        "Mooncake needs the system library libibverbs, even for TCP: `apt-get install libibverbs1`",
    ),
    ("libcudart", "this build of Mooncake needs CUDA; take the one without: `pip install 'encoder-svc[cpu]'`"),
    ("libcuda.", "this build of Mooncake needs CUDA; take the one without: `pip install 'encoder-svc[cpu]'`"),
)
_NOT_INSTALLED = (
    "Mooncake is not installed: `pip install 'encoder-svc[cpu]'` for hosts without CUDA, `encoder-svc[cuda12]` or "
    "`encoder-svc[cuda13]` for those with it"
)


@dataclass(frozen=True)
class MooncakeServer:
    """An engine of Mooncake that serves one registered arena, for the life of the process."""

    session: str
    """What peers open: ``host:port``."""
    address: int
    """The arena's first byte, as peers name it."""
    protocol: str
    """``tcp`` or ``rdma``."""
    engine: Any
    """Mooncake's ``TransferEngine``. It must stay alive as long as the arena is served."""

    @property
    def locator(self) -> Locator:
        """See :class:`~encoder_svc.transports.TransportServer`."""
        # Mooncake reads payloads: a slot's header is before the address.
        address = self.address + slot_header.SIZE
        return Locator(mooncake=MooncakeLocator(session=self.session, address=address, protocol=self.protocol))


def load_mooncake() -> Any:
    """Imports Mooncake.

    Returns:
        The class ``mooncake.engine.TransferEngine``.

    Raises:
        TransportUnavailableError: it, or a library that it needs, is missing.
    """
    # Read once, at import.
    os.environ.setdefault(_LOG_LEVEL, _QUIET)
    try:
        from mooncake.engine import TransferEngine
    except ModuleNotFoundError:
        raise TransportUnavailableError(_NOT_INSTALLED) from None
    except ImportError as error:
        text = str(error)
        for library, advice in _PROBLEMS:
            if library in text:
                raise TransportUnavailableError(advice) from error
        raise TransportUnavailableError(f"Mooncake cannot be loaded: {text}") from error
    return TransferEngine


def serve_by_mooncake(arena: SharedMemory, host: str, protocol: str, devices: str) -> MooncakeServer:
    """Registers an arena, once, and serves it.

    Args:
        arena: what peers may read. Any peer that reaches the port can also write it.
        host: the address that peers reach this host by.
        protocol: ``tcp`` or ``rdma``.
        devices: RDMA devices, with commas between them; empty takes all.

    Raises:
        TransportUnavailableError: Mooncake cannot be loaded or cannot start.
    """
    _check_address(host, protocol, devices)
    engine = load_mooncake()()
    code, told = _initialize(engine, host, protocol, devices)
    if code != 0:
        log.error("Mooncake ends with %d and tells:\n%s", code, told)
        raise TransportUnavailableError(f"Mooncake cannot start on {host} by {protocol}; the server's log says why")
    if engine.register_memory(arena.address, arena.size) != 0:
        raise TransportUnavailableError(
            f"Mooncake cannot register the arena of {arena.size} bytes"
            + ("; raise the limit of locked memory (ulimit -l)" if protocol == "rdma" else "")
        )
    return MooncakeServer(f"{host}:{engine.get_rpc_port()}", arena.address, protocol, engine)


def _check_address(host: str, protocol: str, devices: str) -> None:
    """Mooncake starts on any name, and takes TCP where it finds no RDMA device, without a word."""
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        raise TransportUnavailableError(
            f"the host name {host!r} cannot be resolved; set mooncake_host to an address that peers reach this host by"
        ) from None
    fault = rdma_fault(devices) if protocol == "rdma" else ""
    if fault:
        raise TransportUnavailableError(f"{fault}; set mooncake_devices to those that work, or mooncake_protocol=tcp")


def _initialize(engine: Any, host: str, protocol: str, devices: str) -> tuple[int, str]:
    """Starts an engine of Mooncake; returns its code and what it wrote to stderr.

    That is held back, because even a good start writes that it is an error to have no segments yet. It is not where the
    operator has set a log level.
    """
    if os.environ.get(_LOG_LEVEL) != _QUIET:
        return engine.initialize(host, _METADATA, protocol, devices), ""
    held, kept = os.memfd_create("mooncake-stderr", os.MFD_CLOEXEC), os.dup(_STDERR)
    os.dup2(held, _STDERR)
    try:
        code: int = engine.initialize(host, _METADATA, protocol, devices)
        return code, os.pread(held, 1 << 16, 0).decode(errors="replace")
    finally:
        os.dup2(kept, _STDERR)
        os.close(kept)
        os.close(held)
