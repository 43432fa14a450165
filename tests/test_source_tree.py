"""What no file of the project may hold."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_OURS = {"node_modules", "__pycache__", "build", "dist"}

# Readers that run what they read, or that build any object which the bytes name.
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
UNSAFE_CALLS = {"eval", "exec"}
UNSAFE_ATTRIBUTES = {"torch.load", "send_pyobj", "recv_pyobj", "allow_pickle"}


def files(pattern: str) -> Iterator[Path]:
    """Our own files: not what tools made, not what was installed, nothing hidden but ``.ci``.

    What is left out is not even looked into: tools that run meanwhile write there, and take away.
    """
    for folder, inner, names in os.walk(ROOT):
        top = Path(folder) == ROOT
        inner[:] = [name for name in sorted(inner) if not is_left_out(name, top=top)]
        for name in sorted(names):
            path = Path(folder, name)
            if not is_left_out(name, top=top) and path.match(pattern) and path.is_file():
                yield path


def is_left_out(name: str, *, top: bool) -> bool:
    """A file or folder is not ours; ``top``: it lies at the top."""
    return name in NOT_OURS or name.endswith(".egg-info") or (top and name.startswith(".") and name != ".ci")


def unsafe(source: str) -> list[str]:
    """The places in ``source`` that read bytes unsafely, as ``line: what``."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [str(node.module).split(".")[0], *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            names = [node.func.id] if node.func.id in UNSAFE_CALLS else []
        elif isinstance(node, ast.Attribute):
            names = [node.attr, ast.unparse(node)]
        elif isinstance(node, ast.keyword):
            names = [str(node.arg)] if not (isinstance(node.value, ast.Constant) and node.value.value is False) else []
        bad = UNSAFE_MODULES | UNSAFE_ATTRIBUTES | (UNSAFE_CALLS if isinstance(node, ast.Call) else set())
        found += [f"{getattr(node, 'lineno', 0)}: {name}" for name in names if name in bad]
    return found


def test_f17_nothing_reads_bytes_by_running_them() -> None:
    sources = list(files("*.py"))
    assert len(sources) > 20
    # A test may run the code that our own pages show.
    assert [
        f"{path.relative_to(ROOT)}:{place}"
        for path in sources
        for place in unsafe(path.read_text())
        if not (path.is_relative_to(ROOT / "tests") and place.endswith(": exec"))
    ] == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "def f():\n    import marshal",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "eval('1')",
        "socket.recv_pyobj()",
        "numpy.load('x', allow_pickle=True)",
    ],
)
def test_f17_unsafe_reads_are_found(source: str) -> None:
    assert unsafe(source)


@pytest.mark.parametrize(
    "source", ["model.eval()", "numpy.load('x', allow_pickle=False)", "safetensors.torch.load_file('x')"]
)
def test_f17_safe_reads_are_not_taken_for_unsafe(source: str) -> None:
    assert not unsafe(source)


# What opens connections, or writes through one. The service listens and is read from; its links are ipc sockets.
CONNECTING_MODULES = {"requests", "httpx", "aiohttp", "http", "urllib.request", "urllib3", "ftplib", "smtplib"}
CONNECTING_CALLS = {
    "create_connection",
    "open_connection",
    "insecure_channel",
    "secure_channel",
    "transfer_sync_write",
    "transfer_submit_write",
    "batch_transfer_sync_write",
    "batch_transfer_async_write",
}


def connecting(source: str) -> list[str]:
    """What ``source`` names that could open a connection, or write into a peer's memory."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & CONNECTING_MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {str(node.module)} & CONNECTING_MODULES | {alias.name for alias in node.names} & CONNECTING_CALLS
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} & CONNECTING_CALLS
    return sorted(found)


def test_f18_only_the_guarded_fetcher_can_connect() -> None:
    # The bench is a caller: it connects to the server that it has started.
    service = ROOT / "encoder_svc"
    sources = [
        path for path in files("*.py") if path.is_relative_to(service) and not path.is_relative_to(service / "bench")
    ]
    assert sources
    assert {path.name for path in sources if connecting(path.read_text())} <= {"http_download.py"}


def test_f18_a_connection_is_found() -> None:
    assert connecting("import grpc.aio\ngrpc.aio.insecure_channel(chunk.address)") == ["insecure_channel"]
    assert connecting("from urllib.request import urlopen") == ["urllib.request"]


# Written in two halves, so that this file passes its own test.
REGISTRIES = ["pypi" + ".org", "pythonhosted" + ".org", "npmjs" + ".org", "debian" + ".org", "pytorch" + ".org"]
MACHINE_PATH = re.compile(r"(?<![\w.~*-])/(?:root|home/\w+|Users/\w+|work)/")


def texts() -> Iterator[tuple[str, str]]:
    """Path and content of every text file."""
    for path in files("*"):
        data = path.read_bytes()
        if b"\0" not in data:
            yield str(path.relative_to(ROOT)), data.decode()


def test_no_file_names_a_package_registry() -> None:
    assert [name for name, text in texts() if any(host in text for host in REGISTRIES)] == []


def test_no_file_names_a_folder_of_one_machine() -> None:
    assert [f"{name}: {match.group()}" for name, text in texts() for match in MACHINE_PATH.finditer(text)] == []
