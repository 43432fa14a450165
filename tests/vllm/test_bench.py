"""``encoder-client bench vllm`` with real engines: what it measures, writes and leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil

from encoder_svc.checkpoints import write_checkpoint
from tests.vllm.engine import ENVIRONMENT, ROOT


def test_both_deployments_are_measured_by_turns(vllm: Path, tmp_path: Path) -> None:
    # Qwen3-VL: the language-only engine needs another architecture, which the bench finds itself.
    model, encoder = tmp_path / "model", tmp_path / "encoder-svc"
    write_checkpoint("qwen3_vl", model, preset="tiny")
    encoder.write_text(f"#!{sys.executable}\nfrom encoder_svc.cli.main import main\n\nraise SystemExit(main())\n")
    encoder.chmod(0o755)
    file, plot = tmp_path / "result.json", tmp_path / "result.png"
    command = [
        sys.executable, "-m", "encoder_client", "bench", "vllm", f"--model={model}", f"--vllm={vllm}",
        f"--encoder={encoder}", "--dtype=float32", "--vllm-option=--max-model-len=2048",
        "--vllm-option=--enforce-eager",
        "--encoder-option=--engine-threads=1", "--image-size=128", "--pictures=3", "--tokens=2", "--concurrency=2",
        "--requests=4", "--rounds=2", f"--json={file}", f"--plot={plot}",
    ]  # fmt: skip
    path = {"PYTHONPATH": f"{ROOT}:{ENVIRONMENT['PYTHONPATH']}"}
    done = subprocess.run(command, env=os.environ | ENVIRONMENT | path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "requests/s" in done.stdout
    result = json.loads(file.read_text())
    for workload in ("new", "repeated"):
        for side in ("whole", "split"):
            served = result["workloads"][workload][side]
            assert (served["requests"], len(served["rounds"])) == (8, 2)
            assert 0 < served["first_token_ms"]["p50"] <= served["answer_ms"]["p50"]
    assert set(result["peak_bytes"]) == {"engine", "encoder", "language-only engine", "proxy"}
    assert all(0 < peaks["serving"] <= peaks["with_start"] for peaks in result["peak_bytes"].values())
    assert 0 < result["tower_bytes"] < sum(part.stat().st_size for part in model.glob("*.safetensors"))
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert not [
        process for process in psutil.process_iter(["cmdline"]) if str(model) in (process.info["cmdline"] or [])
    ]
