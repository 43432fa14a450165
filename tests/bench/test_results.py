"""Files of results: their schema, the floors, and the tables that are made of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from encoder_svc.bench.display import result_table
from encoder_svc.bench.floors import Floor
from encoder_svc.bench.report import markdown
from encoder_svc.bench.result import (
    Chart,
    FairnessResult,
    Machine,
    Percentiles,
    Pipeline,
    Series,
    ThroughputResult,
    read_result,
)
from encoder_svc.errors import SetupError

FAIRNESS = FairnessResult(
    command_line="encoder-svc bench fairness --json fairness.json",
    started_at="2026-01-02T03:04:05+00:00",
    seconds=61.5,
    machine=Machine(
        cpu="A CPU", cores=2, instruction_sets=["avx2"], memory_bytes=8 << 30, kernel="6.1", python="3.11.9",
        torch_threads=2, versions={"torch": "2.13.0"}, load_average_at_start=0.1,
    ),
    parameters={"image_size": 224},
    floors=[Floor("at most", 3.0).check("ratio", 3.5)],
    charts=[
        Chart(title="t", x_label="x", y_label="y", kind="lines", series=[Series(label="s", x=[1.0], y=[2.0])])
    ],
    beside_prompt_ms=Percentiles(p50=10.0, p99=35.0),
    beside_singles_ms=Percentiles(p50=5.0, p99=10.0),
    ratio=3.5,
    singles_beside_prompt=100,
    singles_beside_singles=120,
    prompts=8,
)  # fmt: skip


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "fairness.json"
    path.write_text(FAIRNESS.model_dump_json())
    return path


def test_a_result_comes_back_as_it_was_written(file: Path) -> None:
    assert read_result(file) == FAIRNESS


def test_figures_stand_at_the_top_level(file: Path) -> None:
    written = json.loads(file.read_text())
    assert written["ratio"] == 3.5
    assert written["beside_prompt_ms"] == {"p50": 10.0, "p99": 35.0}
    assert written["schema_version"] == 1


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"ratio": "fast"}, "ratio"),
        ({"surprise": 1}, "surprise"),
        ({"command": "speed"}, "command"),
        ({"schema_version": 2}, "schema_version"),
        ({"ratio": float("inf")}, "ratio"),
    ],
)
def test_what_is_no_result_is_refused(file: Path, change: dict[str, object], place: str) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(SetupError, match=place):
        read_result(file)


@pytest.mark.parametrize(
    ("relation", "value", "met"),
    [
        ("at least", 1.9, True), ("at least", 1.8, True), ("at least", 1.7, False), ("at least", None, False),
        ("at most", 1.9, False), ("at most", 1.8, True), ("at most", 1.7, True), ("at most", None, False),
    ],
)  # fmt: skip
def test_a_floor(relation: str, value: float | None, met: bool) -> None:
    floor = Floor("at least" if relation == "at least" else "at most", 1.8)
    assert floor.check("ratio", value).met is met


@pytest.mark.parametrize(("medium", "unit"), [("image", "images"), ("video", "videos"), ("audio", "sounds")])
def test_the_table_names_what_was_counted(medium: str, unit: str) -> None:
    told = FAIRNESS.model_dump(include={"command_line", "started_at", "seconds", "machine"})
    result = ThroughputResult(
        **told, parameters={"medium": medium}, floors=[], charts=[], images_per_second=2.0, ratio=2.0, images=8,
        reference_images_per_second=1.0, mean_batch_items=1.0, mean_batch_patches=4.0, reference_images=4, rounds=[],
        pipeline=Pipeline(prepare=0.1, forward=0.9, stage=0.1, read=0.1, total=1.2),
    )  # fmt: skip
    names = list(result_table(result).columns[0].cells)
    assert names[:2] == [f"{unit}_per_second", f"reference_{unit}_per_second"]
    assert "images_per_second" in result.figures()


def test_the_report_tells_the_command_the_machine_and_what_is_not_met() -> None:
    page = markdown([FAIRNESS])
    assert "`encoder-svc bench fairness --json fairness.json`" in page
    assert "2 cores of A CPU (avx2)" in page
    assert "| 1 | fairness `ratio` | ≤ 3 | 3.50 | **not met** |" in page
    assert "| 1 | fairness `beside_prompt_ms.p99` | 35.0 |" in page


def report(*files: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "encoder_svc.bench.report", *files], capture_output=True, text=True, check=False
    )


def test_the_report_as_a_command(file: Path) -> None:
    told = report(file, file)
    assert told.returncode == 0, told.stderr
    assert told.stdout == markdown([FAIRNESS, FAIRNESS])


def test_the_report_refuses_other_files(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    told = report(other)
    assert told.returncode == 2
    assert "is no result" in told.stderr
    assert "Traceback" not in told.stderr


def test_what_a_run_needs_afterwards_is_asked_for_before(tmp_path: Path) -> None:
    told = subprocess.run(
        [
            sys.executable, "-m", "encoder_svc.cli.main", "bench", "overhead",
            "--json", str(tmp_path / "nowhere" / "x.json"),
        ],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert told.returncode == 2
    assert "there is no folder" in told.stderr
