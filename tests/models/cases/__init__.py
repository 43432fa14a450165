"""The rows of all families, in a file for each kin."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from tests.models.family_cases import FamilyCase

CASES: tuple[FamilyCase, ...] = tuple(
    case
    for module in sorted(iter_modules(__path__), key=lambda module: module.name)
    for case in import_module(f"{__name__}.{module.name}").CASES
)
"""``CASES`` of every module here."""
