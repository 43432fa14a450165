"""``encoder-svc tiny-checkpoint``: writes a random checkpoint to try the service with."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from encoder_svc.checkpoints import FAMILY_NAMES, write_checkpoint

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "tiny-checkpoint",
        help="write a random checkpoint to try the service with",
        description="Writes a random checkpoint in the layout of the hub: config, preprocessor config, tokenizer with "
        "chat template, and sharded safetensors. It answers nonsense, but everything works with it as with a real one.",
        epilog="example: encoder-svc tiny-checkpoint qwen2_5_vl /tmp/tiny && encoder-svc serve --model /tmp/tiny",
    )
    parser.add_argument("family", metavar="FAMILY", help=f"model type: {', '.join(FAMILY_NAMES)}")
    parser.add_argument("directory", metavar="DIR", type=Path, help="folder to write; made if it does not exist")
    parser.add_argument(
        "--preset",
        default="tiny",
        metavar="{tiny,small,base}",
        help="tiny for tests; small for benchmarks on a CPU; base for a GPU (default: tiny)",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the random weights (default: 0)")
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty")
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Writes it.

    Raises:
        SetupError: the arguments do not fit.
    """
    directory: Path = arguments.directory
    console = Console(stderr=True)
    columns = (TextColumn("writing {task.description}"), BarColumn(), TaskProgressColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"{arguments.preset} {arguments.family}", total=1.0)
        write_checkpoint(
            arguments.family,
            directory,
            arguments.preset,
            arguments.seed,
            arguments.force,
            lambda done: progress.update(task, completed=done),
        )
    size = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    console.print(
        f"{directory} holds a random {arguments.family} ({arguments.preset}, seed {arguments.seed}, "
        f"{size / 1e6:.1f} MB). Serve it: encoder-svc serve --model {directory}",
        highlight=False,
        soft_wrap=True,
    )
    return 0
