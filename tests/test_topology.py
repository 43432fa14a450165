"""Two encoders, two language-only workers, one of each killed: the demonstration itself checks every answer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DEMONSTRATION_SECONDS = 500.0
"""Far longer than it takes on a slow machine."""


@pytest.mark.slow
def test_every_prompt_is_answered_right_though_an_encoder_and_a_worker_are_killed() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "examples.topology", "--prompts", "9"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEMONSTRATION_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "killed on the way: encoder A and worker 1" in result.stdout
