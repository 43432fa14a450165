"""The demonstration with real weights: it writes down what was said, or says that there is no network."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DEMONSTRATION_SECONDS = 500.0
"""Far longer than it takes on a slow machine."""


def transcribe(**environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "examples.transcribe"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "400", **environment},
        capture_output=True,
        text=True,
        timeout=DEMONSTRATION_SECONDS,
        check=False,
    )


def test_without_a_network_it_says_so_and_ends_well(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # so that nobody else listens there
        result = transcribe(
            XDG_CACHE_HOME=str(tmp_path),
            PIP_CONFIG_FILE=os.devnull,
            PIP_INDEX_URL=f"http://127.0.0.1:{taken.getsockname()[1]}/simple",
            PIP_FIND_LINKS="",
        )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "no real speech today" in result.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_real_speech_becomes_its_text() -> None:
    result = transcribe()
    assert result.returncode == 0, result.stdout + result.stderr
    if "no real speech today" in result.stdout:
        pytest.skip("there is no network")
    assert "Ever tried, ever failed. No matter, try again. Fail again. Fail better." in result.stdout
    assert "It was the best of times, it was the worst of times." in result.stdout
