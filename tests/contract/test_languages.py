"""The contract compiles for other languages. For TypeScript, its types are checked and a message crosses to Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from epd.encoder.v1.encoder_service_pb2 import Delivery, EncodeRequest
from epd.encoder.v1.media_pb2 import Modality

ROOT = Path(__file__).parents[2]
PROTOS = ROOT / "protos"
BIN = Path(sys.executable).parent
TYPESCRIPT = Path(__file__).parent / "typescript"
# The public contract, with the file of Google's that it imports.
FILES = [
    *sorted(str(path.relative_to(PROTOS)) for path in (PROTOS / "epd" / "encoder").rglob("*.proto")),
    "google/rpc/status.proto",
]


def protoc(*arguments: str, environment: dict[str, str] | None = None) -> None:
    """Runs protoc over the public contract. It must not even warn."""
    result = subprocess.run(
        [BIN / "protoc", f"-I{PROTOS}", *arguments, *FILES],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("language", "mark", "needle"),
    [
        ("cpp", "**/encoder_service.pb.h", "EncodeRequest final"),
        ("java", "**/EncodeRequest.java", "class EncodeRequest"),
        ("csharp", "**/EncoderService.cs", "class EncodeRequest"),
        ("php", "**/EncodeRequest.php", "class EncodeRequest"),
        ("ruby", "**/encoder_service_pb.rb", "EncodeRequest"),
    ],
)
def test_compiles_for(language: str, mark: str, needle: str, tmp_path: Path) -> None:
    protoc(f"--{language}_out={tmp_path}")
    made = list(tmp_path.glob(mark))
    assert made
    assert needle in made[0].read_text()


@pytest.mark.parametrize(
    ("language", "plugins", "made"),
    [
        ("Go", ("protoc-gen-go", "protoc-gen-go-grpc"), "example/epd/encoder_service_grpc.pb.go"),
        ("C++", ("grpc_cpp_plugin",), "epd/encoder/v1/encoder_service.grpc.pb.h"),
        ("Java", ("grpc_java_plugin",), "epd/encoder/v1/EncoderServiceGrpc.java"),
    ],
    ids=["go", "cpp", "java"],
)
def test_the_command_of_the_docs_makes_stubs(
    language: str, plugins: tuple[str, ...], made: str, tmp_path: Path
) -> None:
    if missing := [plugin for plugin in plugins if shutil.which(plugin) is None]:
        pytest.skip(f"{', '.join(missing)} is not installed; docs/clients.md says where it comes from")
    docs = (ROOT / "docs" / "clients.md").read_text()
    command = docs.split(f"**{language}**\n\n```\n")[1].split("```")[0]
    protos = tmp_path / "protos"
    shutil.copytree(PROTOS, protos)
    (protos / "gen").mkdir()
    environment = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
    result = subprocess.run(
        ["bash", "-c", command], cwd=protos, env=environment, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
    assert (protos / "gen" / made).exists()


def test_typescript_types_check_and_a_message_crosses_to_python(tmp_path: Path) -> None:
    modules = ROOT / "clients" / "typescript" / "node_modules"
    if not (modules / ".package-lock.json").exists():  # npm writes it last
        pytest.skip("no node_modules: `make install` could not install TypeScript's generator (npm)")
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:{BIN}"}
    # ES modules resolve imports from where the file is.
    (tmp_path / "node_modules").symlink_to(modules)
    for name in ("package.json", "tsconfig.json", "client.ts"):
        shutil.copy(TYPESCRIPT / name, tmp_path)
    generated = tmp_path / "generated"
    generated.mkdir()
    plugin = modules / ".bin" / "protoc-gen-es"
    protoc(
        f"--plugin=protoc-gen-es={plugin}", f"--es_out={generated}", "--es_opt=target=ts,import_extension=js",
        environment=environment,
    )  # fmt: skip
    check = subprocess.run(
        [modules / ".bin" / "tsc", "--project", tmp_path], env=environment, capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stdout
    data = subprocess.run(
        ["node", tmp_path / "built" / "client.js"], env=environment, stdout=subprocess.PIPE, check=True
    ).stdout
    request = EncodeRequest.FromString(data)
    assert request.prompt_id == "prompt-1"
    assert request.delivery == Delivery.DELIVERY_CALLER
    assert [(item.part_idx, item.modality, item.data) for item in request.items] == [
        (0, Modality.MODALITY_IMAGE, b"\xff\xd8\xff")
    ]
