"""Which RDMA devices of this host work: where Mooncake finds none it takes TCP, without a word, so both ends look."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

DEVICES = Path("/sys/class/infiniband")
_ACTIVE = "ACTIVE"
"""The end of a port's state, such as ``4: ACTIVE``; a cable that is out makes it ``1: DOWN``."""


def rdma_fault(devices: str) -> str:
    """Why these devices of this host cannot be used; empty: they can.

    Args:
        devices: names, with commas between them. Empty: all that there are, of which one must work.
    """
    found = sorted(path.name for path in DEVICES.glob("*"))
    if not found:
        return "this host has no RDMA device (`ibv_devices` lists them)"
    wanted = sorted({name.strip() for name in devices.split(",") if name.strip()})
    if missing := [name for name in wanted if name not in found]:
        return f"this host has no RDMA device {', '.join(missing)}; it has {', '.join(found)}"
    idle = [name for name in wanted or found if not _is_active(DEVICES / name)]
    if idle == found or (wanted and idle):
        return f"no port of the RDMA device {', '.join(idle)} is active (`ibv_devinfo` tells its state)"
    return ""


def _is_active(device: Path) -> bool:
    for state in device.glob("ports/*/state"):
        with suppress(OSError):  # it has just been taken out
            if state.read_text().strip().endswith(_ACTIVE):
                return True
    return False
