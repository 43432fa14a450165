"""What the front finds wrong with a checkpoint at start, without torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from encoder_svc.errors import SetupError
from encoder_svc.models.checkpoint import INDEX
from encoder_svc.models.dtypes import read_cpu_flags, resolve_dtype
from encoder_svc.models.registry import FAMILIES, check_servable


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may spoil."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def refusal(folder: Path) -> str:
    with pytest.raises(SetupError) as refused:
        check_servable(folder)
    return str(refused.value)


def test_a_good_checkpoint_is_summed_up(copy: Path) -> None:
    summary = check_servable(copy)
    assert (summary.name, summary.model_type, summary.dtype) == ("copy", "qwen2_5_vl", "float32")


def test_no_torch_is_imported_to_check_one(tiny_checkpoint: Path) -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('torch', 'transformers')))\n"
        "from pathlib import Path\n"
        "from encoder_svc.models.registry import check_servable\n"
        "print(check_servable(Path(sys.argv[1])).model_type)\n"
    )
    check = subprocess.run([sys.executable, "-c", program, tiny_checkpoint], capture_output=True, text=True, check=True)
    assert check.stdout.strip() == "qwen2_5_vl"


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert "is a file" in refusal(tmp_path / "file")
    assert "has no config.json" in refusal(tmp_path)


def test_a_config_that_is_no_object_is_refused(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    assert "is not JSON" in refusal(copy)
    (copy / "config.json").write_text("[]")
    assert "is not a JSON object" in refusal(copy)


def test_a_checkpoint_that_does_not_say_how_to_prepare_media_is_refused(copy: Path) -> None:
    (copy / "preprocessor_config.json").rename(copy / "aside.json")
    assert "has no preprocessor_config.json" in refusal(copy)
    processor = {"image_processor": json.loads((copy / "aside.json").read_text())}
    (copy / "processor_config.json").write_text(json.dumps(processor))
    assert check_servable(copy).model_type == "qwen2_5_vl"


def test_an_unsupported_family_is_refused_with_those_that_can_be_served(copy: Path) -> None:
    change_config(copy, model_type="llama", architectures=["LlamaForCausalLM"])
    message = refusal(copy)
    assert "'llama'" in message
    assert all(family in message for family in FAMILIES)


def test_a_family_is_known_by_its_architecture_too(copy: Path) -> None:
    change_config(copy, model_type="")
    assert check_servable(copy).model_type == "qwen2_5_vl"


def test_a_checkpoint_without_its_tower_is_refused(copy: Path) -> None:
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if not name.startswith("visual")}
    (copy / INDEX).write_text(json.dumps(index))
    assert "holds no tensor named visual.*" in refusal(copy)


def test_weights_that_are_not_safetensors_are_refused(copy: Path) -> None:
    for file in copy.glob("model*"):
        file.unlink()
    (copy / "pytorch_model.bin").touch()
    assert "must be safetensors" in refusal(copy)


def test_a_shard_that_was_cut_off_is_refused(copy: Path) -> None:
    shard = copy / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    message = refusal(copy)
    assert shard.name in message
    assert "download it again" in message


def test_an_index_that_promises_more_than_a_shard_holds_is_refused(copy: Path) -> None:
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"]["visual.blocks.77.norm1.weight"] = "model-00001-of-00003.safetensors"
    (copy / INDEX).write_text(json.dumps(index))
    assert "lacks the tensor visual.blocks.77.norm1.weight" in refusal(copy)


def test_an_index_cannot_point_out_of_the_folder(copy: Path) -> None:
    index = json.loads((copy / INDEX).read_text())
    index["weight_map"]["visual.extra"] = "../other/model.safetensors"
    (copy / INDEX).write_text(json.dumps(index))
    assert "not a file of the folder" in refusal(copy)


NO_FLAGS: frozenset[str] = frozenset()


@pytest.mark.parametrize(
    ("setting", "checkpoint", "device", "flags", "expected"),
    [
        ("auto", "bfloat16", "cpu", NO_FLAGS, "float32"),
        ("auto", "bfloat16", "cpu", frozenset({"avx2", "amx_bf16"}), "bfloat16"),
        ("auto", "bfloat16", "cpu", frozenset({"avx512_bf16"}), "bfloat16"),
        ("auto", "float16", "cpu", frozenset({"avx512_bf16"}), "float32"),
        ("auto", "bfloat16", "cuda:0", NO_FLAGS, "bfloat16"),
        ("auto", "float16", "cuda", NO_FLAGS, "float16"),
        ("auto", "", "cuda:0", NO_FLAGS, "float32"),
        ("auto", "float64", "cpu", NO_FLAGS, "float32"),
        ("bfloat16", "float32", "cpu", NO_FLAGS, "bfloat16"),
    ],
)
def test_the_dtype_is_the_checkpoints_where_the_device_is_fast_in_it(
    setting: str, checkpoint: str, device: str, flags: frozenset[str], expected: str
) -> None:
    assert resolve_dtype(setting, checkpoint, device, flags) == expected


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(SetupError, match="int8"):
        resolve_dtype("int8", "float32", "cpu", NO_FLAGS)


def test_cpu_flags_are_read_as_linux_writes_them(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 amx_bf16\n\nprocessor\t: 1\nflags\t\t: fpu\n")
    assert read_cpu_flags(cpuinfo) == {"fpu", "avx2", "amx_bf16"}
    assert read_cpu_flags(tmp_path / "absent") == frozenset()
