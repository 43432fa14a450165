"""``encoder-svc models``: the families that can be served."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from encoder_svc.models.registry import FAMILIES
from epd.encoder.v1.media_pb2 import Modality

if TYPE_CHECKING:
    from argparse import _SubParsersAction


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "models",
        help="list the model families that can be served",
        description="Lists the model families that can be served. A checkpoint belongs to the family that model_type "
        "in its config.json names.",
    )
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints the table."""
    table = Table(title="Model families that can be served", title_justify="left")
    for column in ("model_type", "encodes", "tensors", "verified", "--model-options"):
        table.add_column(column, no_wrap=column == "model_type")
    for family in FAMILIES.values():
        table.add_row(
            family.model_type,
            ", ".join(Modality.Name(kind).removeprefix("MODALITY_").lower() for kind in family.modalities),
            ", ".join(family.tensors),
            family.verified,
            ", ".join(f"{name}={'|'.join(values)}" for name, values in family.options.items()),
        )
    Console().print(table)
    return 0
