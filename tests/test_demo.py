"""The demonstration ends well: it compares tokens itself, and its exit code says whether they are equal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEMONSTRATION_SECONDS = 500.0
"""Far longer than it takes on a slow machine."""


def test_the_demo_ends_with_equal_tokens(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, ROOT / "examples" / "demo.py"],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEMONSTRATION_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
