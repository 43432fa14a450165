"""The facts of this machine that figures depend on."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from encoder_svc.bench.result import Machine
from encoder_svc.models.dtypes import read_cpu_flags

_PACKAGES = ("encoder-svc", "torch", "transformers", "grpcio", "protobuf", "numpy", "pillow", "simplejpeg", "pyzmq")
_TELLING_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "bf16")
"""Of a CPU's instruction sets, those that decide how fast a tower is."""


def describe_machine(threads: int) -> Machine:
    """What there is, before anything is started.

    Args:
        threads: with which forwards will be computed.
    """
    flags = read_cpu_flags()
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        instruction_sets=[flag for flag in _TELLING_FLAGS if flag in flags],
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        python=platform.python_version(),
        torch_threads=threads,
        versions={package: found for package in _PACKAGES if (found := _version(package))},
        load_average_at_start=round(os.getloadavg()[0], 2),
    )


def _cpu(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    for line in cpuinfo.read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
