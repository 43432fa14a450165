"""Mooncake where it cannot serve: a reason and a remedy, not a failure or, worse, an offer that cannot be read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.package_path import hiding

PROGRAM = """
import sys
from encoder_svc.shared_memory import SharedMemory
from encoder_svc.transports.mooncake import TransportUnavailableError, serve_by_mooncake
arena = SharedMemory.create("arena", 1 << 20)
try:
    print("serves", serve_by_mooncake(arena, *sys.argv[1:4]).session)
except TransportUnavailableError as error:
    print(error)
"""


def serve(
    host: str = "127.0.0.1", protocol: str = "tcp", devices: str = "", packages: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Serves in a process of its own, which sees the packages in ``packages`` first."""
    environment = os.environ | (hiding(packages) if packages else {})
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, host, protocol, devices],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    return result


def test_a_good_start_is_quiet() -> None:
    result = serve()
    assert result.stdout.startswith("serves 127.0.0.1:")
    assert "Local segment descriptor" not in result.stderr


MISSING = {
    "not installed": ("raise ModuleNotFoundError(\"No module named 'mooncake'\")", "pip install 'encoder-svc[cpu]'"),
    "no libibverbs": (
        'raise ImportError("libibverbs.so.1: cannot open shared object file: No such file or directory")',
        "apt-get install libibverbs1",
    ),
    "built for cuda": (
        'raise ImportError("libcudart.so.12: cannot open shared object file: No such file or directory")',
        "encoder-svc[cpu]",
    ),
    "unknown": ('raise ImportError("undefined symbol: x")', "undefined symbol: x"),
}


@pytest.mark.parametrize("name", MISSING)
def test_f43_what_is_missing_is_named_with_its_remedy(tmp_path: Path, name: str) -> None:
    statement, remedy = MISSING[name]
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text(statement)
    assert remedy in serve(packages=tmp_path).stdout


def test_a_host_that_no_peer_can_resolve_is_refused() -> None:
    assert "mooncake_host" in serve(host="no.such.host.invalid").stdout


def test_rdma_without_such_a_device_does_not_become_tcp() -> None:
    assert "RDMA device" in serve(protocol="rdma", devices="mlx5_none").stdout
