"""``encoder-svc serve`` as a command: what it refuses to start with, and what its help tells."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from encoder_client import EncoderClient
from encoder_svc.checkpoints.writer import write_checkpoint
from encoder_svc.cli.device import resolve_device
from encoder_svc.models.registry import open_adapter
from encoder_svc.settings import Settings
from tests.conftest import StartServer, servers
from tests.server_process import START_SECONDS


@pytest.fixture
def broken_checkpoint(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to be damaged."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "broken"))


def refusal(start_server: StartServer, **settings: object) -> str:
    """What a server that cannot start says. It exits with 2, fast and without a traceback."""
    server = start_server(wait=False, **settings)
    assert server.process.wait(START_SECONDS) == 2
    assert "Traceback" not in server.stderr
    assert server.stderr.startswith("encoder-svc serve: ")
    return server.stderr


def test_an_unsupported_family_is_named(start_server: StartServer, broken_checkpoint: Path) -> None:
    file = broken_checkpoint / "config.json"
    config = json.loads(file.read_text()) | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    file.write_text(json.dumps(config))
    said = refusal(start_server, model=broken_checkpoint)
    assert "'llama'" in said
    assert "qwen2_5_vl" in said


def test_a_missing_shard_is_named(start_server: StartServer, broken_checkpoint: Path) -> None:
    shard = min(broken_checkpoint.glob("*.safetensors"))
    shard.unlink()
    assert shard.name in refusal(start_server, model=broken_checkpoint)


def test_a_folder_that_is_no_checkpoint_is_named(start_server: StartServer, tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(start_server, model=tmp_path)


def test_a_wrong_dtype_is_refused_with_those_that_are_right(start_server: StartServer) -> None:
    said = refusal(start_server, dtype="float64")
    for word in ("--dtype", "float32", "bfloat16", "float16"):
        assert word in said


def test_a_model_option_that_the_family_does_not_have_is_refused(start_server: StartServer) -> None:
    said = refusal(start_server, model_options="sink_form=softmax")
    assert "qwen2_5_vl has no model option 'sink_form'; it has none" in said


async def test_model_options_reach_the_towers(tmp_path: Path) -> None:
    write_checkpoint("mimo_v2", tmp_path / "mimo_v2")
    options = {"sink_form": "softmax"}
    adapter = open_adapter(tmp_path / "mimo_v2", "float32", options)
    expected = adapter.load_tower(torch.device("cpu"), lambda _step, _fraction: None).compatibility_fingerprint
    with servers(tmp_path / "mimo_v2") as start:
        server = start(model_options="sink_form=softmax")
        async with EncoderClient(server.target) as client:
            info = await client.server_info()
    assert info.model.compatibility_fingerprint == expected


def test_a_device_that_is_not_there_ends_the_start(start_server: StartServer) -> None:
    said = refusal_of_a_child(start_server, device="cuda:7")
    assert "cuda:7" in said


def refusal_of_a_child(start_server: StartServer, **settings: object) -> str:
    """As :func:`refusal`, for faults that only a child can find."""
    server = start_server(wait=False, **settings)
    assert server.process.wait(START_SECONDS) == 2
    assert "Traceback" not in server.stderr
    return server.stderr.splitlines()[-1]


def test_auto_takes_a_gpu_only_where_there_is_one(tmp_path: Path) -> None:
    assert resolve_device("auto", gpus=tmp_path / "no driver") == "cpu"
    assert resolve_device("auto", gpus=tmp_path) == "cpu"
    assert resolve_device("cuda:1", gpus=tmp_path) == "cuda:1"


def test_help_comes_without_torch() -> None:
    code = "import sys; from encoder_svc.cli.main import main\ntry: main(['--help'])\nexcept SystemExit: pass\n"
    code += "print(sorted({'torch', 'transformers', 'pydantic', 'grpc'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "tiny-checkpoint" in done.stdout
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_front_never_imports_torch() -> None:
    code = "import sys, encoder_svc.cli.serve; print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_serve_help_tells_every_setting() -> None:
    command = [sys.executable, "-m", "encoder_svc.cli.main", "serve", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for name in Settings.model_fields:
        assert f"--{name.replace('_', '-')}" in done.stdout


def test_a_wrong_command_is_told_with_the_right_ones() -> None:
    command = [sys.executable, "-m", "encoder_svc.cli.main", "sreve"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "serve" in done.stderr
