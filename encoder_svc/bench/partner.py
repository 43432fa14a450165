"""The end of a process that works beside the bench and stops when its standard input does."""

from __future__ import annotations

import subprocess

STOP_SECONDS = 30.0
"""A partner ends what it has begun in less; then it is killed."""


def end_partner(process: subprocess.Popen[str]) -> None:
    """Closes the partner's input, waits for its end, and kills it if it does not come."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.close()
    try:
        process.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
