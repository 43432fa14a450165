"""The committed Python stubs are what ``make proto`` makes of the protos."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent


def contents(folder: Path) -> dict[str, bytes]:
    """Each generated file's bytes, by its path in ``folder``."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*_pb2*"))
        if "__pycache__" not in path.parts
    }


def test_stubs_are_current(tmp_path: Path) -> None:
    # What is installed is taken as it is: a test must not install anything.
    installed = [f"--old-file=.venv/installed-{kind}" for kind in ("cpu", "cuda12", "cuda13")]
    subprocess.run(["make", "--silent", *installed, "proto", f"BIN={BIN}", f"STUBS={tmp_path}"], cwd=ROOT, check=True)
    made, committed = contents(tmp_path / "epd"), contents(ROOT / "clients" / "python" / "epd")
    assert made.keys() == committed.keys()
    stale = [name for name, data in made.items() if committed[name] != data]
    assert not stale, f"run `make proto`: stale are {stale}"
