"""What may be fetched: deny by default, every permission a setting of the operator."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from encoder_svc.errors import Reason, ServiceError, SetupError
from encoder_svc.media.addresses import Address, Network, is_allowed
from encoder_svc.settings import Settings

SCHEMES = frozenset({"data", "https", "http", "file"})

_HOST_PATTERN = re.compile(r"(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*|[0-9a-f:.]+")
_NEVER_BELOW = (Path("/proc"), Path("/sys"))
"""Their files are the kernel's answers, not media: environments, memory maps, open descriptors."""


@dataclass(frozen=True)
class FetchPolicy:
    """What a :class:`~encoder_svc.media.fetch.Fetcher` may do.

    Raises:
        SetupError: a value is wrong, or two contradict each other.

    Example:
        >>> FetchPolicy(schemes=frozenset({"data", "https"}), hosts=("*.example.com",)).allows_host("a.example.com")
        True
    """

    schemes: frozenset[str] = frozenset({"data"})
    """Of :data:`SCHEMES`."""
    hosts: tuple[str, ...] = ()
    """Exact, or ``*.suffix`` for every host below a domain (not the domain itself). Empty: any."""
    ports: frozenset[int] = frozenset({80, 443})
    allow_private: tuple[Network, ...] = ()
    """Networks that are allowed though they are not public."""
    roots: tuple[Path, ...] = ()
    """Folders below which ``file:`` addresses may lie. If one is reached by links, its real path is added."""
    max_bytes: int = 64 << 20
    """Of one file."""
    max_seconds: float = 20.0
    """For one file: the wait for a free place, names, connections, redirects and the body together."""
    connect_seconds: float = 5.0
    """For one connection, from its name to the end of the TLS handshake."""
    idle_seconds: float = 5.0
    """Between two pieces of an answer."""
    max_redirects: int = 3
    max_concurrency: int = 32
    """Files that come over the network at once."""

    def __post_init__(self) -> None:
        if unknown := self.schemes - SCHEMES:
            raise SetupError(f"fetch_schemes: {min(unknown)!r} is none of {', '.join(sorted(SCHEMES))}")
        for host in self.hosts:
            if not _HOST_PATTERN.fullmatch(host):
                raise SetupError(
                    f"fetch_hosts: {host!r} is no host; write example.com or *.example.com, in lower case, without"
                    " scheme and port"
                )
        if ("file" in self.schemes) != bool(self.roots):
            raise SetupError("fetch_schemes with file and fetch_roots go together; give both or neither")
        real = [_real_root(root) for root in self.roots]
        object.__setattr__(self, "roots", tuple(dict.fromkeys([*(root.absolute() for root in self.roots), *real])))

    @classmethod
    def from_settings(cls, settings: Settings) -> Self:
        """The policy that the operator has set.

        Raises:
            SetupError: a value is wrong; the message names the setting.
        """
        return cls(
            schemes=frozenset(settings.fetch_schemes),
            hosts=settings.fetch_hosts,
            ports=frozenset(settings.fetch_ports),
            allow_private=tuple(_network(text) for text in settings.fetch_private_networks),
            roots=settings.fetch_roots,
            max_bytes=settings.fetch_max_bytes,
            max_seconds=settings.fetch_seconds,
            max_concurrency=settings.fetch_concurrency,
        )

    def check_scheme(self, scheme: str) -> None:
        """Refuses a scheme that is not allowed.

        Raises:
            ServiceError: URI_FORBIDDEN.
        """
        if scheme not in self.schemes:
            # What is no scheme at all is not repeated: it may be a part of the address.
            kind = f"`{scheme}:` addresses" if scheme in SCHEMES else "addresses of this kind"
            raise ServiceError(
                Reason.URI_FORBIDDEN, f"the server does not fetch {kind}; send the bytes (setting: fetch_schemes)"
            )

    def allows_host(self, host: str) -> bool:
        """Whether a host is on the list. Its addresses are another matter: see :meth:`check_address`.

        Args:
            host: in lower case, in ASCII, without a dot at its end.
        """
        return not self.hosts or any(
            host.endswith(pattern[1:]) if pattern.startswith("*.") else host == pattern for pattern in self.hosts
        )

    def check_host(self, host: str, port: int) -> None:
        """Refuses a host or port that is not allowed.

        Raises:
            ServiceError: URI_FORBIDDEN.
        """
        if not self.allows_host(host):
            raise ServiceError(
                Reason.URI_FORBIDDEN, "the server does not fetch from this host; send the bytes (setting: fetch_hosts)"
            )
        if port not in self.ports:
            raise ServiceError(
                Reason.URI_FORBIDDEN, "the server does not fetch from this port; send the bytes (setting: fetch_ports)"
            )

    def check_address(self, address: Address) -> None:
        """Refuses a network address that is neither public nor allowed.

        Raises:
            ServiceError: URI_FORBIDDEN.
        """
        if not is_allowed(address, self.allow_private):
            raise ServiceError(
                Reason.URI_FORBIDDEN,
                "the host is not on the public internet; send the bytes (setting: fetch_private_networks)",
            )


def _network(text: str) -> Network:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        raise SetupError(
            f"fetch_private_networks: {text!r} is no network; write it as 10.20.0.0/16 or fd12:3456::/32, with no"
            " bits set behind the prefix"
        ) from None


def _real_root(root: Path) -> Path:
    try:
        real = root.resolve(strict=True)
    except (OSError, RuntimeError):
        raise SetupError(f"fetch_roots: {root} does not exist or cannot be entered") from None
    if not real.is_dir():
        raise SetupError(f"fetch_roots: {root} is not a folder")
    if real == Path("/"):
        raise SetupError("fetch_roots: / would allow every file of the host; name the folders that hold media")
    if any(real.is_relative_to(folder) for folder in _NEVER_BELOW):
        raise SetupError(f"fetch_roots: {root} holds no media, but what the kernel tells about processes")
    return real
