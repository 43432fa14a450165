"""Where a service listens, and how that is protected."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from epd.addresses import is_loopback, split_address


@dataclass(frozen=True)
class Listening:
    """An address, and the files of its TLS. Other hosts are served by TLS, or when that was asked for.

    Raises:
        ValueError: it is no address, the files do not go together, or other hosts would be served in plain text.
    """

    address: str
    """``HOST:PORT`` or ``[IPv6]:PORT``; port 0 takes a free one."""
    certificate: Path | None = None
    """PEM file of the server's certificate chain. None: plain text."""
    key: Path | None = None
    """PEM file of its private key."""
    client_authority: Path | None = None
    """PEM file of the authority that clients' certificates must come from. None: they need none."""
    allow_insecure: bool = False
    """Serve other hosts in plain text."""

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("tls_certificate and tls_key go together; give both or neither")
        if self.client_authority is not None and self.certificate is None:
            raise ValueError("tls_client_ca needs tls_certificate and tls_key")
        if not (self.is_loopback or self.certificate or self.allow_insecure):
            raise ValueError(
                f"listening on {self.address} would serve other hosts without TLS; give --tls-certificate and --tls-key"
                ", or --allow-insecure if the network is trusted, or listen on 127.0.0.1"
            )

    @property
    def is_loopback(self) -> bool:
        """Only processes of this host can connect."""
        return is_loopback(self.host)

    @property
    def host(self) -> str:
        """Without the port and without brackets."""
        return split_address(self.address)[0]

    def at(self, port: int) -> str:
        """The address with a real port."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"
