"""``encoder-svc encode`` against a real server."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.photograph import photo
from tests.server_process import ServerProcess


def run_encode(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "encoder_svc.cli.main", "encode", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_it_shows_events_and_saves_rows(server: ServerProcess, tmp_path: Path) -> None:
    files = [tmp_path / "one.jpg", tmp_path / "two.jpg"]
    for i, file in enumerate(files):
        file.write_bytes(photo(112 + 56 * i, 84, quality=71))
    done = run_encode("--target", server.target, "--save", tmp_path / "rows", *files)
    assert done.returncode == 0, done.stderr
    events = [line.split()[1] for line in done.stdout.splitlines()[1:]]
    assert events[0] == "accepted"
    assert events[-1] == "complete"
    for event in ("layout", "ready", "read", "saved"):
        assert events.count(event) == 2
    rows = [np.load(tmp_path / "rows" / f"{file.name}.npy") for file in files]
    assert [array.shape[0] for array in rows] == [4 * 3, 6 * 3]
    assert all(np.isfinite(array).all() for array in rows)
    # Again: nothing is computed, and it says so.
    done = run_encode("--target", server.target, *files)
    assert done.returncode == 0, done.stderr
    events = [line.split()[1] for line in done.stdout.splitlines()[1:]]
    assert events == ["accepted", "layout", "ready", "read", "layout", "ready", "read", "complete"]
    assert done.stdout.count("from the server's cache") == 2


def test_a_file_that_fails_is_told_and_counts(server: ServerProcess, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.jpg", tmp_path / "bad.jpg"
    good.write_bytes(photo(112, 84))
    bad.write_bytes(b"no image")
    done = run_encode("--target", server.target, good, bad)
    assert done.returncode == 1
    assert "MEDIA_UNRECOGNIZED" in done.stdout
    assert "1 ready, 1 failed" in done.stdout


def test_a_file_that_is_not_there_is_named(server: ServerProcess) -> None:
    done = run_encode("--target", server.target, "/nowhere.jpg")
    assert (done.returncode, done.stderr) == (
        2,
        "encoder-svc encode: cannot read /nowhere.jpg: No such file or directory\n",
    )


def test_a_server_that_is_not_there_is_told(tmp_path: Path) -> None:
    file = tmp_path / "photo.jpg"
    file.write_bytes(photo(112, 84))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # so that nobody else listens there
        done = run_encode("--target", f"127.0.0.1:{taken.getsockname()[1]}", file)
    assert done.returncode == 1
    assert "UNAVAILABLE" in done.stderr
    assert "Traceback" not in done.stderr
