"""The protos keep their form, and no change of them breaks a caller. Real buf, and proof that it would complain."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUF = Path(sys.executable).with_name("buf")
BASELINE = ROOT / "protos" / "baseline.binpb"
CHUNK = "epd/encoder/v1/embedding.proto"
SERVICE = "epd/encoder/v1/encoder_service.proto"


def buf(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs buf in ``folder``, which holds ``buf.yaml`` and ``protos/``."""
    return subprocess.run([BUF, *arguments], cwd=folder, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the contract outside of any git repository, to be spoiled."""
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    return tmp_path


def edit(copy: Path, file: str, old: str, new: str) -> None:
    """Replaces the only occurrence of ``old``."""
    path = copy / "protos" / file
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} is not once in {file}"
    path.write_text(text.replace(old, new))


def test_lint_passes() -> None:
    result = buf("lint", folder=ROOT)
    assert result.returncode == 0, result.stdout + result.stderr


def test_nothing_breaks_callers_of_the_baseline(copy: Path) -> None:
    result = buf("breaking", "--against", str(BASELINE), folder=copy)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        pytest.param(CHUNK, "uint32 token_count = 8;", "uint32 token_count = 108;", id="number"),
        pytest.param(CHUNK, "uint32 token_count = 8;", "string token_count = 8;", id="type"),
        pytest.param(CHUNK, "uint32 token_count = 8;", "uint32 rows = 8;", id="name"),
        pytest.param(CHUNK, "uint32 token_count = 8;", "", id="removed"),
        pytest.param(CHUNK, "DATA_TYPE_INT32 = 5;", "DATA_TYPE_INT32 = 55;", id="enum-number"),
        pytest.param(SERVICE, "rpc Release(", "rpc GiveBack(", id="rpc"),
    ],
)
def test_a_breaking_change_is_found(copy: Path, file: str, old: str, new: str) -> None:
    edit(copy, file, old, new)
    result = buf("breaking", "--against", "protos/baseline.binpb", folder=copy)
    assert result.returncode != 0
    assert file in result.stdout


def test_an_added_field_breaks_nobody(copy: Path) -> None:
    edit(copy, CHUNK, "uint32 token_count = 8;", "uint32 token_count = 8;\n  // New.\n  uint32 added = 1000;")
    result = buf("breaking", "--against", "protos/baseline.binpb", folder=copy)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_field_must_have_a_comment(copy: Path) -> None:
    edit(copy, CHUNK, "uint32 token_count = 8;", "uint32 token_count = 8;\n\n  uint32 added = 1000;")
    result = buf("lint", folder=copy)
    assert result.returncode != 0
    assert "added" in result.stdout
