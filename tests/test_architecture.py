"""The walls between the parts: who may import whom, by reading the imports, and by importing for real."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CLIENT = ROOT / "clients" / "python"


def imports(source: str) -> Iterator[str]:
    """Every module that ``source`` imports, wherever it does: ``from a import b`` gives ``a`` and ``a.b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide what is imported"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(module: str, package: str) -> bool:
    """``module`` is ``package``, or inside it."""
    return module == package or module.startswith(package + ".")


def breaches(folder: Path, forbidden: tuple[str, ...]) -> list[str]:
    """The imports below ``folder`` that reach into what is forbidden."""
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [folder]
    assert files
    return [
        f"{path.name} imports {module}"
        for path in files
        for module in imports(path.read_text())
        if any(is_within(module, package) for package in forbidden)
    ]


GRPC = ("grpc", "grpc_health", "grpc_reflection", "grpc_status", "grpc_channelz", "encoder_svc.rpc")
TENSORS = ("torch", "transformers", "safetensors")
CODECS = ("PIL", "simplejpeg", "av")
WALLS = {
    "encoder_svc/settings.py": ("encoder_svc.runtime", "encoder_svc.media", "encoder_svc.engine", *GRPC, *TENSORS),
    "encoder_svc/errors.py": ("encoder_svc", *GRPC, *TENSORS),
    "encoder_svc/shared_memory.py": ("encoder_svc", *GRPC, *TENSORS),
    "encoder_svc/runtime": (
        "encoder_svc.models", "encoder_svc.media", "encoder_svc.engine", "encoder_svc.transports", "mooncake",
        *GRPC, *TENSORS, *CODECS,
    ),
    "encoder_svc/rpc": (
        "encoder_svc.models", "encoder_svc.media", "encoder_svc.engine", "encoder_svc.transports", "mooncake",
        *TENSORS, *CODECS,
    ),
    "encoder_svc/media": ("encoder_svc.engine", "encoder_svc.transports", "mooncake", *GRPC),
    "encoder_svc/engine": ("encoder_svc.media", *CODECS, *GRPC),
    "encoder_svc/models": (
        "encoder_svc.runtime", "encoder_svc.transports", "encoder_svc.engine", "encoder_svc.media", "mooncake", *GRPC,
    ),
    "encoder_svc/transports": ("encoder_svc.runtime", "encoder_svc.models", "encoder_svc.media", *GRPC, *TENSORS),
    "encoder_svc/telemetry": (*GRPC, *TENSORS),
    "clients/python/encoder_client": ("encoder_svc",),
    "clients/python/epd": ("encoder_svc", "encoder_client"),
}  # fmt: skip


@pytest.mark.parametrize("part", WALLS)
def test_imports_stay_within_the_walls(part: str) -> None:
    assert breaches(ROOT / part, WALLS[part]) == []


def test_a_breach_is_found_wherever_it_stands(tmp_path: Path) -> None:
    (tmp_path / "quiet.py").write_text("import torchlike\nfrom encoder_svc import errors\n")
    (tmp_path / "lazy.py").write_text("def load():\n    from torch import nn\n")
    (tmp_path / "upward.py").write_text("from encoder_svc import rpc\n")
    assert breaches(tmp_path, ("torch", "encoder_svc.rpc")) == [
        "lazy.py imports torch",
        "lazy.py imports torch.nn",
        "upward.py imports encoder_svc.rpc",
    ]


def modules(package: Path, root: Path) -> list[str]:
    """The dotted names of all modules of a package."""
    names = (path.relative_to(root).with_suffix("").parts for path in sorted(package.rglob("*.py")))
    return [".".join(parts[:-1] if parts[-1] == "__init__" else parts) for parts in names]


def import_without(absent: tuple[str, ...], names: list[str]) -> None:
    """Imports ``names`` in an interpreter of their own, in which ``absent`` cannot be imported."""
    program = (
        "import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({absent!r}))\n"
        f"for name in {names!r}:\n"
        "    importlib.import_module(name)\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_front_runs_without_torch() -> None:
    import_without(
        ("torch", "transformers", "safetensors", "mooncake", "PIL", "simplejpeg"),
        [
            "encoder_svc.cli.main",
            "encoder_svc.cli.serve",
            "encoder_svc.rpc.server",
            *modules(ROOT / "encoder_svc" / "runtime", ROOT),
        ],
    )


def test_the_runtime_runs_without_grpc() -> None:
    import_without(("grpc", "torch"), modules(ROOT / "encoder_svc" / "runtime", ROOT))


def test_media_workers_and_engines_run_without_grpc() -> None:
    import_without(("grpc",), ["encoder_svc.media.worker", "encoder_svc.engine.process"])


def test_the_client_needs_no_tensor_library_and_no_server() -> None:
    import_without(("torch", "transformers", "mooncake", "encoder_svc"), ["encoder_client"])
