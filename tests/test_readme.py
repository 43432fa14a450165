"""What README.md tells people to do is done here, in its order, and the links of all pages lead somewhere."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from tests.ports import free_port
from tests.server_process import START_SECONDS, STOP_SECONDS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
PORT = "50051"
"""Of the README; here a free one takes its place."""


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    kind: str
    """Empty: runs to its end. ``background``: a server. ``by-hand``: not run."""
    text: str


def blocks(page: str) -> list[Block]:
    """The fenced blocks of a page, in order."""
    fence = re.compile(r"^```(\w+)(?: ([\w-]+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return [Block(language, kind, text) for language, kind, text in fence.findall(page)]


@contextmanager
def running(block: Block, folder: Path, environment: dict[str, str], port: int) -> Iterator[None]:
    """Runs a server block until the end of the ``with``, with the gRPC health service as the sign that it serves."""
    log = folder / "server.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {block.text.strip()}"], cwd=folder, env=environment, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        try:
            wait_until_serving(port, log)
            yield
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=STOP_SECONDS) == 0, log.read_text()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def wait_until_serving(port: int, log: Path) -> None:
    """Follows the health service until it says SERVING. It may not listen yet, so the call waits for a connection."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.max_reconnect_backoff_ms", 200)]) as channel:
        states = HealthStub(channel).Watch(HealthCheckRequest(), wait_for_ready=True, timeout=START_SECONDS)
        try:
            for state in states:
                if state.status == HealthCheckResponse.SERVING:
                    states.cancel()
                    return
        except grpc.RpcError as error:
            raise AssertionError(f"the server does not serve: {error}\n{log.read_text()}") from None
    raise AssertionError(f"the server stopped telling its health\n{log.read_text()}")


def run(block: Block, folder: Path, environment: dict[str, str]) -> str:
    """Runs a block to its end, as a script that stops at the first failure, and returns what it printed."""
    arguments = {
        "bash": ["bash", "-euo", "pipefail", "-c", block.text],
        "python": [sys.executable, "-W", "error", "-c", block.text],
    }[block.language]
    result = subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=START_SECONDS, check=False
    )
    assert result.returncode == 0, f"{block.text}\n{result.stdout}\n{result.stderr}"
    return result.stdout


def test_f45_the_readme_runs(tmp_path: Path) -> None:
    port = free_port()
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    page = blocks(README.read_text().replace(PORT, str(port)))
    to_do = [block for block in page if block.language in ("bash", "python") and block.kind != "by-hand"]
    [server] = [block for block in to_do if block.kind == "background"]
    place = to_do.index(server)
    for block in to_do[:place]:
        run(block, tmp_path, environment)
    with running(server, tmp_path, environment, port):
        printed = "\n".join(run(block, tmp_path, environment) for block in to_do[place + 1 :])
    for promised in (
        "epd.encoder.v1.EncoderService",
        "rpc Encode (",
        '"status": "SERVING"',
        '"model_type": "qwen2_5_vl"',
        '"state": "CHUNK_STATE_LAYOUT"',
        '"state": "CHUNK_STATE_READY"',
        '"complete"',
        "read over",
    ):
        assert promised in printed


def test_f45_a_failing_command_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="false"):
        run(Block("bash", "", "false | cat\necho unreached\n"), tmp_path, dict(os.environ))


def test_f45_the_make_targets_that_pages_name_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"(?:^|`)make ([a-z]+)", page.read_text(), re.MULTILINE)
        assert set(named) <= targets, page.name


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_f45_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        linked = (page.parent / path).resolve() if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


def test_f45_tests_that_the_reliability_page_names_exist() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "reliability.md").read_text()))
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    existing = set(re.findall(r"def (test_\w+)", sources))
    assert named
    assert sorted(named - existing) == []
