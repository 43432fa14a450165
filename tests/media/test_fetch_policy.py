"""What may be fetched: the addresses, the policy's own checks, and the settings that make it."""

from __future__ import annotations

import argparse
import ipaddress
import socket
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_svc.errors import SetupError
from encoder_svc.media.addresses import is_allowed, parse_literal
from encoder_svc.media.fetch_policy import FetchPolicy
from encoder_svc.settings import Settings, add_arguments, load_settings

PRIVATE = tuple(map(ipaddress.ip_network, ("10.0.0.0/8", "169.254.0.0/16", "0.0.0.0/0", "::/0")))


@pytest.mark.parametrize(
    "address",
    ["93.184.215.14", "8.8.8.8", "2606:4700::1111", "2a00:1450:4001::200e", "::ffff:8.8.8.8", "64:ff9b::808:808"],
)
def test_public_addresses_are_allowed(address: str) -> None:
    assert is_allowed(ipaddress.ip_address(address), ())


@pytest.mark.parametrize(
    "address",
    [
        "0.0.0.0", "0.1.2.3", "10.1.2.3", "100.64.0.1", "100.127.255.255", "127.0.0.1", "127.255.255.255",
        "169.254.1.1",
        "172.16.0.1", "172.31.255.255", "192.0.0.1", "192.0.2.1", "192.88.99.1", "192.168.0.1", "198.18.0.1",
        "198.19.255.255",
        "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255", "168.63.129.16",
        "::", "::1", "::127.0.0.1", "::8.8.8.8", "::ffff:10.0.0.1", "::ffff:0:10.0.0.1", "64:ff9b::10.0.0.1",
        "64:ff9b::127.0.0.1", "64:ff9b:1::8.8.8.8", "100::1", "2001::1", "2001:0:4136:e378::", "2001:db8::1",
        "2002:a00:1::",
        "2002:808:808::", "3fff::1", "5f00::1", "fc00::1", "fd12:3456::1", "fd00:ec2::254", "fe80::1", "fe80::1%1",
        "2606:4700::1111%1", "fec0::1", "ff02::1",
    ],
)  # fmt: skip
def test_f19_addresses_that_are_not_public_are_forbidden(address: str) -> None:
    assert not is_allowed(ipaddress.ip_address(address), ())


@given(st.ip_addresses())
def test_f19_what_the_standard_library_calls_private_is_forbidden(address: Any) -> None:
    if is_allowed(address, ()):
        embedded = getattr(address, "ipv4_mapped", None)
        # NAT64's prefix is the one that we look into.
        assert (embedded or address).is_global or address in ipaddress.ip_network("64:ff9b::/96")
        assert not address.is_multicast


@given(st.ip_addresses(v=4))
def test_f19_an_ipv4_address_inside_an_ipv6_one_is_judged_as_itself(address: ipaddress.IPv4Address) -> None:
    allowed = is_allowed(address, ())
    for prefix in ("::ffff:", "64:ff9b::"):
        assert is_allowed(ipaddress.ip_address(f"{prefix}{address}"), ()) == allowed
    assert not is_allowed(ipaddress.IPv6Address((0x2002 << 112) | (int(address) << 80)), ())


@pytest.mark.parametrize("address", ["10.0.0.7", "::ffff:10.0.0.7", "64:ff9b::a00:7", "169.254.1.1", "::1", "fd12::1"])
def test_networks_can_be_allowed(address: str) -> None:
    assert is_allowed(ipaddress.ip_address(address), PRIVATE)
    assert not is_allowed(ipaddress.ip_address(address), (ipaddress.ip_network("192.168.0.0/16"),))


@pytest.mark.parametrize(
    "address",
    ["169.254.169.254", "169.254.170.2", "100.100.100.200", "168.63.129.16", "fd00:ec2::254", "::ffff:169.254.169.254",
     "64:ff9b::a9fe:a9fe", "0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255"],
)  # fmt: skip
def test_f19_metadata_services_are_forbidden_even_in_an_allowed_network(address: str) -> None:
    assert not is_allowed(ipaddress.ip_address(address), PRIVATE)


@given(st.integers(0, 2**32 - 1), st.sampled_from(["{:d}", "0x{:x}", "0X{:X}", "0{:o}"]), st.integers(1, 4))
def test_f19_every_spelling_of_an_address_is_read_as_the_socket_reads_it(value: int, form: str, parts: int) -> None:
    high = [(value >> (24 - 8 * i)) & 0xFF for i in range(parts - 1)]
    host = ".".join(form.format(part) for part in [*high, value & ((1 << (8 * (5 - parts))) - 1)])
    assert parse_literal(host) == ipaddress.IPv4Address(value)
    assert socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0] == str(ipaddress.IPv4Address(value))


@pytest.mark.parametrize("host", ["example.com", "localhost", "1.2.3.4.5", "256.1.1.1", "0x", "a1", ""])
def test_names_are_no_addresses(host: str) -> None:
    assert parse_literal(host) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schemes": frozenset({"ftp"})}, "fetch_schemes: 'ftp' is none of data, file, http, https"),
        ({"schemes": frozenset({"file"})}, "go together"),
        ({"roots": (Path("/usr"),)}, "go together"),
        ({"hosts": ("https://example.com",)}, "fetch_hosts"),
        ({"hosts": ("*",)}, "fetch_hosts"),
        ({"hosts": ("*example.com",)}, "fetch_hosts"),
        ({"hosts": ("EXAMPLE.com",)}, "fetch_hosts"),
        ({"schemes": frozenset({"file"}), "roots": (Path("/"),)}, "every file of the host"),
        ({"schemes": frozenset({"file"}), "roots": (Path("/proc"),)}, "kernel"),
        ({"schemes": frozenset({"file"}), "roots": (Path("/proc/self/fd"),)}, "kernel"),
        ({"schemes": frozenset({"file"}), "roots": (Path("/no/such/folder"),)}, "does not exist"),
        ({"schemes": frozenset({"file"}), "roots": (Path("/etc/passwd"),)}, "not a folder"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SetupError, match=message):
        FetchPolicy(**fields)


def test_a_link_to_the_root_of_all_files_is_no_root_either(tmp_path: Path) -> None:
    (tmp_path / "all").symlink_to("/")
    with pytest.raises(SetupError, match="every file of the host"):
        FetchPolicy(schemes=frozenset({"file"}), roots=(tmp_path / "all",))


def settings(*arguments: str, **environment: str) -> Settings:
    """Settings as a command line and an environment make them."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    names = {f"ENCODER_SVC_{name.upper()}": value for name, value in environment.items()}
    return load_settings(parser.parse_args(["--model", "/nowhere", *arguments]), names)


def test_by_default_only_data_is_fetched() -> None:
    policy = FetchPolicy.from_settings(settings())
    assert policy == FetchPolicy()
    assert policy.schemes == {"data"}
    assert policy.ports == {80, 443}
    assert (policy.max_bytes, policy.max_seconds, policy.max_concurrency) == (64 << 20, 20.0, 32)
    assert (policy.hosts, policy.allow_private, policy.roots) == ((), (), ())


def test_settings_become_a_policy(tmp_path: Path) -> None:
    made = settings(
        "--fetch-schemes", "data, https,file", "--fetch-hosts", "*.example.com,cdn.test", "--fetch-ports", "443,8443",
        "--fetch-roots", f"{tmp_path}", "--fetch-max-bytes", "1MiB", "--fetch-seconds", "3", "--fetch-concurrency", "4",
        fetch_private_networks="10.20.0.0/16,fd12:3456::/32",
    )  # fmt: skip
    policy = FetchPolicy.from_settings(made)
    assert policy.schemes == {"data", "https", "file"}
    assert policy.hosts == ("*.example.com", "cdn.test")
    assert policy.ports == {443, 8443}
    assert policy.allow_private == (ipaddress.ip_network("10.20.0.0/16"), ipaddress.ip_network("fd12:3456::/32"))
    assert policy.roots == (tmp_path.resolve(),)
    assert (policy.max_bytes, policy.max_seconds, policy.max_concurrency) == (1 << 20, 3.0, 4)


def test_a_settings_file_may_hold_lists(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('fetch_schemes = ["data", "http"]\nfetch_ports = [8080]\nfetch_hosts = "a.test, b.test"\n')
    policy = FetchPolicy.from_settings(settings("--config", str(file)))
    assert policy.schemes == {"data", "http"}
    assert policy.ports == {8080}
    assert policy.hosts == ("a.test", "b.test")


@pytest.mark.parametrize(
    ("option", "value"),
    [("schemes", "ftp"), ("hosts", "*"), ("ports", "0"), ("ports", "x"), ("private-networks", "10.0.0.1/8"),
     ("max-bytes", "0"), ("seconds", "0"), ("concurrency", "0"), ("roots", "/no/such/folder")],
)  # fmt: skip
def test_a_wrong_setting_is_named(option: str, value: str) -> None:
    with pytest.raises(SetupError, match=f"fetch.{option.replace('-', '.')}"):
        FetchPolicy.from_settings(settings(f"--fetch-{option}", value))
