"""Which network addresses the service may connect to.

The rule is a list of what is public, not of what is private: an address that nobody thought of is refused. The blocks
are those of the IANA special-purpose address registries for IPv4 and IPv6 (RFC 6890), written out here, because the
answers of ``ipaddress.is_global`` differ between releases of Python.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

_NOT_PUBLIC_V4 = tuple(
    ipaddress.IPv4Network(block)
    for block in (
        "0.0.0.0/8",  # this host, this network
        "10.0.0.0/8",  # private
        "100.64.0.0/10",  # shared by providers (RFC 6598); some clouds' metadata
        "127.0.0.0/8",  # loopback
        "169.254.0.0/16",  # link-local; most clouds' metadata
        "172.16.0.0/12",  # private
        "192.0.0.0/24",  # protocol assignments
        "192.0.2.0/24",  # documentation
        "192.88.99.0/24",  # 6to4 relays (RFC 7526)
        "192.168.0.0/16",  # private
        "198.18.0.0/15",  # benchmarks
        "198.51.100.0/24",  # documentation
        "203.0.113.0/24",  # documentation
        "224.0.0.0/4",  # multicast
        "240.0.0.0/4",  # reserved, and broadcast
    )
)
_GLOBAL_UNICAST_V6 = ipaddress.IPv6Network("2000::/3")
_NOT_PUBLIC_V6 = tuple(
    ipaddress.IPv6Network(block)
    for block in (
        "2001::/23",  # protocol assignments; Teredo, which hides an IPv4 address
        "2001:db8::/32",  # documentation
        "2002::/16",  # 6to4, which hides an IPv4 address
        "3fff::/20",  # documentation
    )
)
_NAT64 = ipaddress.IPv6Network("64:ff9b::/96")
"""The well-known prefix of NAT64 (RFC 6052): the last 32 bits are the IPv4 address that is reached."""

_NEVER: tuple[Network, ...] = (
    ipaddress.IPv4Network("0.0.0.0/8"),
    ipaddress.IPv4Network("224.0.0.0/4"),
    ipaddress.IPv4Network("255.255.255.255/32"),
    ipaddress.IPv6Network("::/128"),
    ipaddress.IPv6Network("ff00::/8"),
    # What clouds tell their machines, credentials among it. Azure's is an address of the public internet.
    ipaddress.IPv4Network("169.254.169.254/32"),
    ipaddress.IPv4Network("169.254.170.2/32"),
    ipaddress.IPv4Network("100.100.100.200/32"),
    ipaddress.IPv4Network("168.63.129.16/32"),
    ipaddress.IPv6Network("fd00:ec2::254/128"),
    ipaddress.IPv6Network("fd20:ce::254/128"),
)


def parse_literal(host: str) -> Address | None:
    """The address that a host of a URL spells, in any spelling that the system's sockets take, or None for a name.

    ``127.1``, ``0x7f.0.0.1``, ``0177.0.0.1`` and ``2130706433`` are all 127.0.0.1 (inet_aton(3)). An IPv4 address
    inside an IPv6 one (``::ffff:127.0.0.1``) is the IPv4 address.

    Args:
        host: without brackets, in ASCII.
    """
    try:
        return _unwrap(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except OSError:
        return None


def is_allowed(address: Address, networks: Sequence[Network]) -> bool:
    """Whether the service may connect to an address.

    Args:
        address: a numeric address.
        networks: networks that are allowed beyond what is public. Metadata services, multicast and the unspecified
            address stay forbidden even there.
    """
    address = _unwrap(address)
    if _is_in(address, _NEVER):
        return False
    if isinstance(address, ipaddress.IPv6Address) and address.scope_id is not None:
        return False  # It names an interface of this host.
    if address.version == 6 and address in _NAT64:
        embedded = ipaddress.IPv4Address(int(address) & 0xFFFF_FFFF)
        return is_allowed(embedded, networks)
    if _is_in(address, networks):
        return True
    if isinstance(address, ipaddress.IPv4Address):
        return not _is_in(address, _NOT_PUBLIC_V4)
    return address in _GLOBAL_UNICAST_V6 and not _is_in(address, _NOT_PUBLIC_V6)


def _unwrap(address: Address) -> Address:
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def _is_in(address: Address, networks: Sequence[Network]) -> bool:
    return any(address.version == network.version and address in network for network in networks)
