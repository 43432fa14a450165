"""``encoder-svc doctor``: what works on this machine, and how to mend what does not."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from encoder_svc.cli.diagnosis import Finding, State, diagnose

if TYPE_CHECKING:
    from argparse import _SubParsersAction

_MARKS = {State.WORKS: "[green]✓ works[/]", State.OFF: "[yellow]– off[/]", State.BROKEN: "[red]✗ broken[/]"}


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "doctor",
        help="tell what works on this machine, and how to mend what does not",
        description="Tells what works on this machine, and how to mend what does not. The exit code is 1 when something"
        " that the service needs is broken; what is off is optional.",
    )
    parser.add_argument("--model", type=Path, metavar="PATH", help="check this checkpoint too")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON, for programs")
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Checks, and prints what was found.

    Returns:
        1 when something that the service needs is broken, else 0.
    """
    errors = Console(stderr=True)
    with errors.status("checking") as status:
        findings = list(diagnose(args.model, lambda check: status.update(f"checking {check}")))
    if args.json:
        json.dump([asdict(finding) for finding in findings], sys.stdout, indent=2, ensure_ascii=False)
        print()
    else:
        _print(Console(), findings)
    return int(any(finding.state is State.BROKEN for finding in findings))


def _print(console: Console, findings: list[Finding]) -> None:
    table = Table(title="What works on this machine", title_justify="left")
    table.add_column("check", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("found")
    for finding in findings:
        table.add_row(finding.check, _MARKS[finding.state], escape(finding.found))
    console.print(table)
    for finding in findings:
        if finding.remedy:
            console.print(f"{_MARKS[finding.state].split()[0]}[/] [bold]{finding.check}[/]: {escape(finding.remedy)}")
    broken = [finding.check for finding in findings if finding.state is State.BROKEN]
    if broken:
        console.print(f"The service cannot run until this is mended: {', '.join(broken)}.")
    else:
        console.print("The service can run here.")
