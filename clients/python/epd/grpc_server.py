"""What gRPC servers of this project have in common: their port, its TLS, and how long silence lasts."""

from __future__ import annotations

from pathlib import Path

import grpc
import grpc.aio

from epd.listening import Listening

OPTIONS: tuple[tuple[str, int], ...] = (
    # Two servers on one port must not share its connections in silence.
    ("grpc.so_reuseport", 0),
    # Clients may ping every 10 s, also without a call; half of that here, so that an early ping is no strike.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    # A caller whose machine is gone never closes its connection: its calls end after these two.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)


def bind(server: grpc.aio.Server, listening: Listening) -> int:
    """Opens the port of a server that has not started.

    Returns:
        The real port.

    Raises:
        ValueError: the address cannot be listened on, or a TLS file cannot be used.
    """
    try:
        if listening.certificate is None or listening.key is None:
            return server.add_insecure_port(listening.address)
        authority = listening.client_authority
        credentials = grpc.ssl_server_credentials(
            [(_read(listening.key), _read(listening.certificate))],
            root_certificates=None if authority is None else _read(authority),
            require_client_auth=authority is not None,
        )
        return server.add_secure_port(listening.address, credentials)
    except RuntimeError:
        files = (
            "" if listening.certificate is None else "; or the TLS files are no PEM of a certificate and its own key"
        )
        raise ValueError(
            f"cannot listen on {listening.address}: the port is in use by another process, or the address is not this "
            f"host's; give --listen another port (0 takes a free one), or stop the other process{files}"
        ) from None


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read the TLS file {file}: {error.strerror}") from None
