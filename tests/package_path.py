"""Packages of a test's own in front of the installed ones, for a process that it starts."""

from __future__ import annotations

import os
from pathlib import Path


def hiding(packages: Path) -> dict[str, str]:
    """The variable by which Python finds what is in ``packages`` first, and all else where this process does."""
    return {"PYTHONPATH": os.pathsep.join([str(packages), os.environ.get("PYTHONPATH", "")])}
