"""Each sub-command from end to end, at the size of a toy. No figure is judged: time decides those."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest

from encoder_client.transports import TRANSPORTS
from encoder_svc.bench.result import (
    AnyResult,
    BatchingResult,
    FairnessResult,
    LoopResult,
    OverheadResult,
    SoakResult,
    ThroughputResult,
    TransportResult,
    read_result,
)
from encoder_svc.checkpoints.writer import write_checkpoint
from tests.children import await_death
from tests.server_process import START_SECONDS
from tests.waiting import PATIENCE_SECONDS

BENCH = [sys.executable, "-m", "encoder_svc.cli.main", "bench"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
PNG = b"\x89PNG\r\n\x1a\n"


class Bench:
    """Runs sub-commands on the tiny checkpoint."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model = model
        self.json = folder / "result.json"
        self.plot = folder / "result.png"

    def arguments(self, name: str, *options: str) -> list[str]:
        common = ["--model", str(self._model), "--dtype", "fp32", "--threads", "1", "--device", "cpu"]
        return [*BENCH, name, *options, *common, "--json", str(self.json), "--plot", str(self.plot)]

    def run(self, name: str, *options: str) -> AnyResult:
        process = subprocess.run(
            self.arguments(name, *options), capture_output=True, text=True, check=False, env=ENVIRONMENT
        )
        assert process.returncode == 0, process.stdout + process.stderr
        assert f"bench {name}" in process.stdout
        assert self.plot.read_bytes().startswith(PNG)
        result = read_result(self.json)
        for check in result.floors:
            assert leaf(json.loads(self.json.read_text()), check.figure) == check.value
        assert result.machine.cores >= 1
        assert result.parameters["model"] == self._model.name
        left = [process for process in psutil.process_iter() if str(self._model) in words(process)]
        assert not psutil.wait_procs(left, timeout=PATIENCE_SECONDS)[1]
        return result


def leaf(figures: dict[str, Any], name: str) -> Any:
    """The figure of a dotted name."""
    found: Any = figures
    for part in name.split("."):
        found = found[part]
    return found


def words(process: psutil.Process) -> list[str]:
    """The command line of a process, cut at spaces and equals signs; empty if it has ended."""
    try:
        return " ".join(process.cmdline()).replace("=", " ").split()
    except psutil.Error:
        return []


@pytest.fixture
def bench(tiny_checkpoint: Path, tmp_path: Path) -> Bench:
    # A copy, because servers of other tests may run on the checkpoint.
    return Bench(Path(shutil.copytree(tiny_checkpoint, tmp_path / "model")), tmp_path)


def test_throughput(bench: Bench) -> None:
    result = bench.run("throughput", "--image-size", "56", "--concurrency", "4", "--seconds", "4", "--rounds", "2")
    assert isinstance(result, ThroughputResult)
    assert len(result.rounds) == 2
    # Windows so long that even a very busy machine gets something done in each.
    assert result.images == pytest.approx(4 * result.images_per_second)
    assert result.ratio == pytest.approx(result.images_per_second / result.reference_images_per_second)
    assert 1 <= result.mean_batch_items <= 4
    # 56 pixels are four patches of 14.
    assert result.mean_batch_patches == pytest.approx(16 * result.mean_batch_items)
    stages = result.pipeline.model_dump(exclude={"total"})
    assert all(share > 0 for share in stages.values())
    assert result.pipeline.total == pytest.approx(sum(stages.values()))
    # One engine runs one forward at a time. The window has an edge of at most a batch at each end.
    assert result.pipeline.forward < 2


@pytest.mark.parametrize(("family", "medium"), [("qwen2_5_vl", "video"), ("whisper", "audio"), ("llava", "image")])
def test_throughput_of_a_family(tmp_path: Path, family: str, medium: str) -> None:
    write_checkpoint(family, tmp_path / "model")
    bench = Bench(tmp_path / "model", tmp_path)
    options = ("--image-size", "56", "--concurrency", "2", "--requests", "4", "--rounds", "1", "--medium", medium)
    result = bench.run("throughput", *options)
    assert isinstance(result, ThroughputResult)
    assert (result.parameters["family"], result.parameters["medium"]) == (family, medium)
    assert result.images == result.reference_images == 4
    assert result.ratio > 0


def test_overhead(bench: Bench) -> None:
    result = bench.run("overhead", "--image-size", "56", "--concurrency", "4", "--requests", "10")
    assert isinstance(result, OverheadResult)
    assert result.requests == 10
    assert 0 < result.fixed_overhead_ms.p50 < result.end_to_end_ms.p99
    assert result.fixed_overhead_ms.p50 <= result.fixed_overhead_ms.p99
    assert result.cached_share == 1
    assert result.cached_ms is not None
    assert result.cached_requests_per_second


def test_batching(bench: Bench) -> None:
    result = bench.run("batching", "--image-sizes", "56,112", "--concurrency", "4", "--requests", "8", "--rounds", "1")
    assert isinstance(result, BatchingResult)
    assert list(result.sizes) == ["56", "112"]
    assert result.smallest_gain == min(size.gain for size in result.sizes.values())
    assert {check.figure for check in result.floors} == {"sizes.56.gain", "sizes.112.gain"}


def test_fairness(bench: Bench) -> None:
    result = bench.run("fairness", "--image-size", "56", "--prompt-images", "8", "--prompts", "2")
    assert isinstance(result, FairnessResult)
    assert result.singles_beside_prompt >= 8
    assert result.ratio == pytest.approx(result.beside_prompt_ms.p99 / result.beside_singles_ms.p99)


def test_soak(bench: Bench) -> None:
    result = bench.run("soak", "--requests", "200", "--concurrency", "8", "--cancel-share", "0.5")
    assert isinstance(result, SoakResult)
    assert result.ok
    assert sum(result.ends.model_dump().values()) == 200
    assert 0 < result.ends.cancelled + result.ends.left < 200
    assert set(result.rss_slope_bytes_per_request) >= {"front", "engine", "media worker", "client"}


def test_a_soak_that_kills_the_engine(bench: Bench) -> None:
    # After the kill come enough requests for a fast machine, too, to be seen on its way.
    options = ("--requests", "85", "--concurrency", "4", "--kill-engine-every", "45", "--transport", "inline")
    process = subprocess.run(
        bench.arguments("soak", *options), capture_output=True, text=True, check=False, env=ENVIRONMENT
    )
    result = read_result(bench.json)
    assert isinstance(result, SoakResult)
    assert result.kills == 1
    assert sum(result.ends.model_dump().values()) == 85
    # How fast the engine is back depends on who else uses the cores: the exit code says what the file does.
    assert process.returncode == (0 if result.ok else 1)
    assert result.ok == all(check.met for check in result.floors)
    assert [check.figure for check in result.floors if not check.met] in ([], ["slowest_recovery_seconds"])


def test_loop(bench: Bench) -> None:
    options = ("--requests", "50", "--forward-seconds", "0.02", "--streams", "2", "--stream-bytes", "200000")
    result = bench.run("loop", *options)
    assert isinstance(result, LoopResult)
    assert result.calls == 50
    assert result.forward_seconds > 0
    assert result.streams_per_second > 0
    assert {check.figure for check in result.floors} == {"beside_forward_ms.p99", "beside_streams_ms.p99"}


def test_transport(tmp_path: Path) -> None:
    file, plot = tmp_path / "result.json", tmp_path / "result.png"
    options = ["--sizes", "4096,2MiB", "--rounds", "1", "--json", str(file), "--plot", str(plot)]
    process = subprocess.run(
        [*BENCH, "transport", *options], capture_output=True, text=True, check=False, env=ENVIRONMENT
    )
    assert process.returncode == 0, process.stderr
    result = read_result(file)
    assert isinstance(result, TransportResult)
    assert [(one.transport, one.nbytes) for one in result.results] == list(
        product(("shared_memory", "shared_memory_in_place", *TRANSPORTS[1:]), (4096, 2 << 20))
    )
    for one in result.results:
        assert one.ratio == pytest.approx(one.gigabytes_per_second / one.raw_gigabytes_per_second)
        assert one.checksum == (not one.transport.startswith("shared_memory"))
        assert (one.raw_one_frame_gigabytes_per_second is not None) == (one.transport == "zeromq")
        assert (one.raw_bytes_gigabytes_per_second is not None) == (one.transport == "inline")
        for raw, ratio in (
            (one.raw_one_frame_gigabytes_per_second, one.ratio_to_one_frame),
            (one.raw_bytes_gigabytes_per_second, one.ratio_to_bytes),
        ):
            assert ratio == (None if raw is None else pytest.approx(one.gigabytes_per_second / raw))
    assert plot.read_bytes().startswith(PNG)


def test_a_bench_that_is_stopped_leaves_no_server(bench: Bench) -> None:
    process = subprocess.Popen(
        bench.arguments("throughput", "--seconds", "600"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=ENVIRONMENT,
    )  # fmt: skip
    try:
        family: list[psutil.Process] = []
        while not any("encoder_svc.engine.process" in words(child) for child in family):
            assert process.poll() is None
            time.sleep(0.05)  # it needs the processor more than this loop does
            family = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_SECONDS) == 128 + signal.SIGTERM
        for child in family:
            await_death(child.pid)
    finally:
        process.kill()
        process.communicate()
    assert not bench.json.exists()
