"""The doctor, as a command, on this machine and on one that is made sick."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.package_path import hiding

Findings = dict[str, dict[str, str]]


def doctor(*options: str, packages: Path | None = None) -> tuple[int, Findings]:
    """Runs the command; packages in ``packages`` hide the installed ones."""
    result = subprocess.run(
        [sys.executable, "-m", "encoder_svc.cli.main", "doctor", "--json", *options],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | (hiding(packages) if packages else {}),
    )
    assert "Traceback" not in result.stderr
    return result.returncode, {finding["check"]: finding for finding in json.loads(result.stdout)}


def test_f43_a_machine_that_runs_the_tests_is_well(tiny_checkpoint: Path) -> None:
    code, findings = doctor("--model", str(tiny_checkpoint))
    assert code == 0, findings
    for check in (
        "torch",
        "transformers",
        "gRPC and protobuf",
        "transport inline",
        "transport Mooncake",
        "transport shared memory",
        "transport ZeroMQ",
        "model",
    ):
        assert findings[check]["state"] == "works", findings[check]
    assert findings["/dev/shm"]["found"].startswith(tuple("0123456789"))


def test_f43_what_is_broken_is_told_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text('raise RuntimeError("operator torchvision::nms does not exist")')
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").write_text(
        'raise ImportError("libibverbs.so.1: cannot open shared object file")'
    )
    code, findings = doctor("--model", str(tmp_path), packages=tmp_path)
    assert code == 1
    assert findings["torchvision"]["state"] == "broken"
    assert "torchvision::nms" in findings["torchvision"]["found"]
    assert "pip uninstall torchvision" in findings["torchvision"]["remedy"]
    assert findings["transport Mooncake"]["state"] == "off"
    assert "apt-get install libibverbs1" in findings["transport Mooncake"]["remedy"]
    assert findings["model"]["state"] == "broken"
    assert "config.json" in findings["model"]["remedy"]
