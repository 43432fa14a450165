"""The TypeScript client under Node: built from its sources, against a real server, and against a faulty one."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from encoder_client import ClientSettings, EncoderClient, image
from tests.client.chunks import ready, rows
from tests.client.scripted_encoder import ScriptedEncoder
from tests.photograph import photo
from tests.rpc.calls import is_idle
from tests.server_process import START_SECONDS, ServerProcess
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "clients" / "typescript"
MODULES = SOURCES / "node_modules"
BIN = Path(sys.executable).parent
SECONDS = START_SECONDS


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The client's example, compiled."""
    if not (MODULES / ".package-lock.json").exists():  # npm writes it last
        pytest.skip("no node_modules in clients/typescript: `make install` could not install them (npm)")
    folder = tmp_path_factory.mktemp("typescript") / "clients" / "typescript"
    shutil.copytree(SOURCES, folder, ignore=shutil.ignore_patterns("node_modules", "generated", "built"))
    (folder / "node_modules").symlink_to(MODULES)
    (folder.parents[1] / "protos").symlink_to(ROOT / "protos")
    built = subprocess.run(
        ["npm", "run", "build"], cwd=folder, env=environment(), capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "built" / "examples" / "encode.js"


def environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{os.environ['PATH']}:{BIN}"}


async def run(example: Path, target: str, *files: Path, token: str = "") -> tuple[int, str, str]:
    node = await asyncio.create_subprocess_exec(
        "node", str(example), target, *map(str, files),
        env={**environment(), "ENCODER_TOKEN": token}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        output, errors = await asyncio.wait_for(node.communicate(), SECONDS)
    finally:
        if node.returncode is None:
            node.kill()
            await node.wait()
    assert node.returncode is not None
    return node.returncode, output.decode(), errors.decode()


# Sizes of its own: what is cached has no LAYOUT.
async def test_typescript_reads_what_python_reads(example: Path, server: ServerProcess, tmp_path: Path) -> None:
    await eventually(lambda: is_idle(server))
    files = [tmp_path / name for name in ("a.jpg", "b.jpg", "c.jpg")]
    for file, data in zip(files, (photo(308, 140), photo(364, 84), b"not an image"), strict=True):
        file.write_bytes(data)
    code, output, errors = await run(example, server.target, *files)
    assert (code, errors) == (0, "")
    async with EncoderClient(server.target, ClientSettings(transports=("inline",))) as client:
        async with client.encode([image(file) for file in files[:2]]) as call:
            expected = [float(embedding.numpy()[0, 0]) for embedding in await call.embeddings()]
        assert (await client.server_info()).load.leases == 0
    lines = output.splitlines()
    assert "part 0 will have 55 rows" in lines
    assert "part 1 will have 39 rows" in lines
    assert "part 2 failed: MEDIA_UNRECOGNIZED" in lines
    shown = dict(line.split(", begins with ") for line in lines if "begins" in line)
    assert float(shown["part 0: 55 x 256"]) == pytest.approx(expected[0], abs=2e-4)
    assert float(shown["part 1: 39 x 256"]) == pytest.approx(expected[1], abs=2e-4)


async def test_typescript_says_why_a_request_is_refused(example: Path, server: ServerProcess) -> None:
    code, _, errors = await run(example, server.target)
    assert code != 0
    assert "INVALID_ARGUMENT (REQUEST_INVALID)" in errors


async def test_f14_typescript_refuses_damaged_bytes(example: Path, tmp_path: Path) -> None:
    data = rows(40, 8)
    file = tmp_path / "a.jpg"
    file.write_bytes(photo(140, 112))
    encoder = ScriptedEncoder([ready(data)], payload=lambda: bytes(data.nbytes))
    async with encoder.serve() as target:
        encoder.chunks[0].encoder.grpc_target = target
        code, _, errors = await run(example, target, file)
    assert code != 0
    assert "ReadError: the bytes of part 0 do not have its checksum" in errors
    assert encoder.outcomes == ["CORRUPT"]


async def test_a_token_of_typescript_goes_to_this_host_alone_in_plain_text(example: Path, tmp_path: Path) -> None:
    data = rows(40, 8)
    file = tmp_path / "a.jpg"
    file.write_bytes(photo(140, 112))
    encoder = ScriptedEncoder([ready(data)], payload=data.tobytes)
    async with encoder.serve() as target:
        encoder.chunks[0].encoder.grpc_target = target
        code, _, errors = await run(example, target, file, token="secret")
    assert (code, errors) == (0, "")
    assert encoder.authorizations == ["Bearer secret"]
    for target in ("encoder-a:50051", "127.0.0.1.example:50051", "10.0.0.7:50051"):
        code, _, errors = await run(example, target, file, token="secret")
        assert code != 0
        assert f"the token would go to {target} in plain text" in errors
        assert "secret" not in errors
