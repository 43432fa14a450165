from __future__ import annotations

import os
from pathlib import Path

import pytest

from encoder_svc.errors import SetupError
from encoder_svc.runtime import memory_limit


def test_f42_arenas_that_can_never_be_filled_are_refused_with_what_to_set() -> None:
    limit = memory_limit.memory_limit()
    memory_limit.check_memory(limit)
    with pytest.raises(SetupError, match=r"--arena-bytes and --input-arena-bytes lower") as fault:
        memory_limit.check_memory(limit + 1)
    assert f"{limit >> 20} MiB" in str(fault.value)


def test_the_limit_is_the_machines_or_less() -> None:
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < memory_limit.memory_limit() <= machine


@pytest.mark.parametrize(("text", "limit"), [("1048576\n", 1 << 20), ("max\n", None), ("9223372036854771712\n", None)])
def test_a_container_with_less_counts(
    text: str, limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "memory.max"
    file.write_text(text)
    monkeypatch.setattr(memory_limit, "_CGROUP_LIMITS", (tmp_path / "absent", file))
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert memory_limit.memory_limit() == (limit or machine)
