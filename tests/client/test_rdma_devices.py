"""RDMA where it is not to be had: said by name, and never taken for TCP. The kernel's list is a folder here."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from encoder_client import EmbeddingPool
from encoder_client.transports.mooncake import MooncakeReader
from encoder_svc.transports import TransportUnavailableError
from encoder_svc.transports.mooncake import serve_by_mooncake
from epd import rdma_devices
from epd.encoder.v1.embedding_pb2 import Locator, MooncakeLocator
from epd.rdma_devices import rdma_fault

RDMA = Locator(mooncake=MooncakeLocator(session="192.0.2.1:1", protocol="rdma"))
TCP = Locator(mooncake=MooncakeLocator(session="192.0.2.1:1", protocol="tcp"))


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the kernel lists devices."""
    monkeypatch.setattr(rdma_devices, "DEVICES", tmp_path)
    return tmp_path


def plug(devices: Path, name: str, *states: str) -> None:
    """A device with a port in each of these states."""
    (devices / name).mkdir()
    for number, state in enumerate(states, start=1):
        port = devices / name / "ports" / str(number)
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")


@pytest.mark.parametrize(
    ("wanted", "fault"),
    [
        ("", ""),
        ("mlx5_0", ""),
        (" mlx5_0 , mlx5_2", ""),
        ("mlx5_1", "no port of the RDMA device mlx5_1 is active"),
        ("mlx5_0,mlx5_1", "no port of the RDMA device mlx5_1 is active"),
        ("mlx5_7", "no RDMA device mlx5_7; it has mlx5_0, mlx5_1, mlx5_2"),
    ],
)
def test_the_devices_that_are_asked_for_must_be_there_and_active(devices: Path, wanted: str, fault: str) -> None:
    plug(devices, "mlx5_0", "4: ACTIVE")
    plug(devices, "mlx5_1", "1: DOWN", "2: INIT")
    plug(devices, "mlx5_2", "1: DOWN", "4: ACTIVE")
    found = rdma_fault(wanted)
    assert fault in found
    assert bool(found) == bool(fault)


def test_a_host_without_a_device_or_with_cables_out(devices: Path) -> None:
    assert "this host has no RDMA device" in rdma_fault("")
    plug(devices, "mlx5_0", "1: DOWN")
    plug(devices, "mlx5_1")
    assert "no port of the RDMA device mlx5_0, mlx5_1 is active" in rdma_fault("")


def test_an_encoder_without_such_a_device_does_not_offer_it(devices: Path) -> None:
    with pytest.raises(TransportUnavailableError, match="mooncake_protocol=tcp"):
        serve_by_mooncake(None, "127.0.0.1", "rdma", "")  # type: ignore[arg-type] # it is not looked at


def test_a_client_without_such_a_device_passes_it_over_and_says_so_once(
    devices: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reader = MooncakeReader(EmbeddingPool(1 << 20), devices="mlx5_0")
    with caplog.at_level(logging.WARNING, "encoder_client"):
        assert not reader.reaches(RDMA)
        assert not reader.reaches(RDMA)
    [record] = caplog.records
    assert "this host has no RDMA device" in record.getMessage()
    assert reader.reaches(TCP)
    plug(devices, "mlx5_0", "4: ACTIVE")
    assert reader.reaches(RDMA)
