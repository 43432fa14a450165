"""Prints the table of docs/performance.md from the files of ``--json``: ``python -m encoder_svc.bench.report FILE...``.

So the page holds only what was measured, with the command and the machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from encoder_svc.bench.display import bound, flatten, shown
from encoder_svc.bench.result import AnyResult, Machine, read_result
from encoder_svc.errors import SetupError


def markdown(results: Sequence[AnyResult]) -> str:
    """The tables: what was run where, the figures with floors, and all figures."""
    return "\n".join([*_machines(results), "", *_floors(results), "", *_figures(results), ""])


def _machines(results: Sequence[AnyResult]) -> Iterator[str]:
    for number, machine in enumerate(dict.fromkeys(_machine(result.machine) for result in results)):
        yield from ([""] if number else [])
        yield machine
    yield ""
    yield "| run | command | when (UTC) | load at start |"
    yield "|---|---|---|---|"
    for number, result in enumerate(results, start=1):
        load = result.machine.load_average_at_start
        yield f"| {number} | `{result.command_line}` | {result.started_at[:16].replace('T', ' ')} | {load:g} |"


def _machine(machine: Machine) -> str:
    versions = ", ".join(f"{package} {version}" for package, version in machine.versions.items())
    return (
        f"{machine.cores} cores of {machine.cpu} ({', '.join(machine.instruction_sets)}), "
        f"{machine.memory_bytes / (1 << 30):.0f} GiB, Linux {machine.kernel}, Python {machine.python}, {versions}; "
        f"{machine.torch_threads} threads of torch."
    )


def _floors(results: Sequence[AnyResult]) -> Iterator[str]:
    yield "| run | figure | floor | measured | |"
    yield "|---|---|---|---|---|"
    for number, result in enumerate(results, start=1):
        for check in result.floors:
            mark = "met" if check.met else "**not met**"
            yield f"| {number} | {result.command} `{check.figure}` | {bound(check)} | {shown(check.value)} | {mark} |"


def _figures(results: Sequence[AnyResult]) -> Iterator[str]:
    yield "| run | figure | measured |"
    yield "|---|---|---|"
    for number, result in enumerate(results, start=1):
        for name, value in flatten(result.figures()):
            yield f"| {number} | {result.command} `{name}` | {shown(value)} |"


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the files and prints the tables.

    Returns:
        0; 2 if a file is no result.
    """
    parser = argparse.ArgumentParser(prog="python -m encoder_svc.bench.report", description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="written by encoder-svc bench --json")
    parsed = parser.parse_args(arguments)
    try:
        results = [read_result(file) for file in parsed.files]
    except SetupError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sys.stdout.write(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
