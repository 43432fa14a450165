"""The check of a device is itself no wreck: in its reduced form it runs on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("check.py")


def test_the_check_of_a_device_passes_on_the_cpu(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "--device", "cpu", "--json", file],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    result = json.loads(file.read_text())
    # Speed is no matter of right and wrong on a machine that other tests share.
    failed = [check for check in result["checks"] if not check["passed"] and not check["name"].startswith("throughput")]
    assert not failed, done.stdout
    read = {check["name"] for check in result["checks"] if check["name"].startswith("read by")}
    assert read >= {"read by mooncake", "read by inline", "read by mooncake over RDMA"}, done.stderr
    assert len(result["checks"]) - len(read) == 7
