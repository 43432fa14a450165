"""What a run gives: the schema of its JSON file. Times are in milliseconds where the name says ``_ms``."""

from __future__ import annotations

import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

SCHEMA_VERSION = 1
WHOLE, SPLIT = "whole", "split"
"""The engine with its own tower; encoder, proxy and language-only engine."""
ENGINE, ENCODER, LANGUAGE_ONLY, PROXY = "engine", "encoder", "language-only engine", "proxy"
"""The servers; the first is that with its own tower."""


@dataclass(frozen=True)
class Machine:
    """Where it was measured."""

    cpu: str
    cores: int
    """That this process and all that it starts may use."""
    memory_bytes: int
    kernel: str
    load_average_at_start: float
    """Of one minute."""


@dataclass(frozen=True)
class Percentiles:
    """Nearest-rank percentiles: values that were measured."""

    p50: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Percentiles:
        """Of values, at least one."""
        ordered = sorted(values)
        rank = [ordered[max(math.ceil(share * len(ordered)), 1) - 1] for share in (0.5, 0.99)]
        return cls(*rank)


@dataclass(frozen=True)
class Served:
    """One way of serving under one workload."""

    requests: int
    requests_per_second: float
    first_token_ms: Percentiles
    """From sending the request to the first token."""
    answer_ms: Percentiles
    """To the last."""
    rounds: list[float]
    """Requests per second of each."""


@dataclass(frozen=True)
class Result:
    """``bench vllm``."""

    command_line: str
    started_at: str
    """UTC, as ISO 8601 writes it."""
    seconds: float
    """Of the whole run."""
    machine: Machine
    parameters: dict[str, str | int]
    """What was measured with, defaults included, and the environment's settings of vLLM."""
    workloads: dict[str, dict[str, Served]]
    """By workload (``new``, ``repeated``), then ``whole`` and ``split``."""
    peak_bytes: dict[str, dict[str, int]]
    """Proportional set size by server: the greatest from its start (``with_start``), and under load (``serving``)."""
    tower_bytes: int
    """Of the tower's weights in the engine's type."""
    schema_version: int = field(default=SCHEMA_VERSION)

    def to_json(self) -> str:
        """As ``--json`` writes it."""
        return json.dumps(asdict(self), indent=2) + "\n"


def this_machine() -> Machine:
    """What there is, before anything is started."""
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        load_average_at_start=round(os.getloadavg()[0], 2),
    )


def _cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    for line in cpuinfo.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
