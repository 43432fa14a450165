"""Which device a server takes, decided without importing torch: the front never loads it."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

_TORCH_CUDA = re.compile(r"^cuda\b.*=\s*['\"]", re.MULTILINE)


def resolve_device(setting: str, gpus: Path = Path("/proc/driver/nvidia/gpus")) -> str:
    """The device of a setting.

    Args:
        setting: ``auto``, or a device as torch names it.
        gpus: where the NVIDIA driver lists what it drives.

    Returns:
        For ``auto`` ``cuda`` where the driver lists a GPU and the installed torch was built for CUDA, else ``cpu``; the
        setting itself otherwise: whether it exists, the engine will tell.
    """
    if setting != "auto":
        return setting
    return "cuda" if gpus.is_dir() and any(gpus.iterdir()) and _torch_has_cuda() else "cpu"


def _torch_has_cuda() -> bool:
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return False
    return _TORCH_CUDA.search((Path(found.origin).parent / "version.py").read_text()) is not None
