"""Only the towers are read and held, and weights that do not fit are refused with what to do."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5_VLConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel

from encoder_svc.checkpoints import write_checkpoint
from encoder_svc.errors import SetupError
from encoder_svc.models.checkpoint import INDEX, open_checkpoint
from encoder_svc.models.qwen_vision_config import Qwen25Vision
from encoder_svc.models.qwen_vision_parameters import VisionTower
from encoder_svc.models.registry import FAMILIES, check_servable, open_adapter
from encoder_svc.models.weights import build_towers, read_config, read_towers
from tests.models.encoding import embed, load

PREFIXES = FAMILIES["qwen2_5_vl"].prefixes


@pytest.fixture
def copy(tiny_checkpoint: Path, tmp_path: Path) -> Path:
    """A checkpoint that a test may spoil."""
    return Path(shutil.copytree(tiny_checkpoint, tmp_path / "copy"))


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Writes the weights anew as one file, changed."""
    tensors = all_tensors(folder)
    change(tensors)
    for file in folder.glob("model*"):
        file.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_f44_exactly_the_tower_is_read(tiny_checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="encoder_svc.models.weights"):
        _, tower = load(tiny_checkpoint)

    stored = all_tensors(tiny_checkpoint)
    visual = {name: tensor for name, tensor in stored.items() if name.startswith("visual.")}
    language = {name: tensor for name, tensor in stored.items() if name.startswith(("model.", "lm_head."))}
    assert visual
    assert language
    assert set(visual) | set(language) == set(stored)

    messages = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    read = {message.split()[1] for message in messages if message.startswith("read ")}
    assert read == set(visual)
    assert list(tower.weights.files) == sorted(file.name for file in tiny_checkpoint.glob("*.safetensors"))
    assert tower.weights.tensors == len(visual)
    assert tower.weights.bytes == sum(tensor.nbytes for tensor in visual.values())
    assert tower.weights.parameters == sum(tensor.numel() for tensor in visual.values())


def test_f44_no_language_weight_is_allocated(tiny_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)
    weights = read_towers(checkpoint, PREFIXES, torch.float32, lambda _step, _fraction: None)
    model = build_towers("Qwen2_5_VLModel", Qwen2_5_VLConfig.from_dict(checkpoint.config), weights, torch.float32)
    held = dict(model.named_parameters())
    assert set(held) == set(checkpoint.names(PREFIXES))
    assert sum(parameter.nbytes for parameter in held.values()) == weights.info.bytes
    assert not list(model.language_model.parameters())
    assert not list(model.language_model.buffers())


def test_our_modules_have_the_names_and_shapes_of_transformers() -> None:
    odd: dict[str, Any] = {
        "depth": 3, "hidden_size": 48, "num_heads": 4, "intermediate_size": 20, "out_hidden_size": 24,
        "patch_size": 10, "spatial_merge_size": 3, "temporal_patch_size": 1, "fullatt_block_indexes": [1],
    }  # fmt: skip
    with torch.device("meta"):
        ours = VisionTower(Qwen25Vision.model_validate(odd)).state_dict()
        theirs = Qwen2_5_VLModel(Qwen2_5_VLConfig(vision_config=odd)).visual.state_dict()
    assert {name: value.shape for name, value in ours.items()} == {name: value.shape for name, value in theirs.items()}


@pytest.mark.parametrize("prefix", ["visual.", "model.visual."])
def test_names_of_either_release_of_transformers_are_taken(tiny_checkpoint: Path, copy: Path, prefix: str) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("visual.")]:
            tensors[prefix + name.removeprefix("visual.")] = tensors.pop(name)

    rewrite(copy, rename)
    adapter, tower = load(copy)
    (rows,) = embed(tower, [adapter.warm_up().item])
    (same,) = embed(load(tiny_checkpoint)[1], [adapter.warm_up().item])
    assert torch.equal(rows, same)
    rewrite(copy, lambda tensors: tensors.pop(prefix + "merger.ln_q.weight"))
    assert f"{prefix}merger.ln_q.weight is not in the checkpoint" in refusal(copy)


def test_weights_survive_the_loss_of_their_files(copy: Path) -> None:
    adapter, tower = load(copy)
    (before,) = embed(tower, [adapter.warm_up().item])
    for file in copy.glob("*.safetensors"):
        with file.open("r+b") as shard:
            shard.truncate(0)
    (after,) = embed(tower, [adapter.warm_up().item])
    assert torch.equal(before, after)


def test_progress_reaches_the_end(tiny_checkpoint: Path) -> None:
    seen: list[float] = []
    adapter = open_adapter(tiny_checkpoint, "float32")
    adapter.load_tower(torch.device("cpu"), lambda _step, fraction: seen.append(fraction))
    assert seen == sorted(seen)
    assert (seen[0] < 0.1, seen[-1]) == (True, 1.0)


def fingerprint(folder: Path, dtype: str = "float32") -> bytes:
    return bytes(load(folder, dtype)[1].compatibility_fingerprint)


def test_the_fingerprint_names_weights_dtype_and_preprocessing(tiny_checkpoint: Path, copy: Path) -> None:
    first = fingerprint(tiny_checkpoint)
    assert len(first) == 32
    assert fingerprint(copy) == first, "the path is no part of it"
    assert fingerprint(copy, "bfloat16") != first

    settings = json.loads((copy / "preprocessor_config.json").read_text())
    (copy / "preprocessor_config.json").write_text(json.dumps({**settings, "max_pixels": 50_000}))
    assert fingerprint(copy) != first
    (copy / "preprocessor_config.json").write_text(json.dumps(settings))

    rewrite(copy, lambda tensors: None)
    assert fingerprint(copy) == first, "how tensors are spread over files is no part of it"
    rewrite(copy, lambda tensors: tensors["lm_head.weight"].add_(1))
    assert fingerprint(copy) == first, "the language model is no part of it"
    rewrite(copy, lambda tensors: tensors["visual.merger.ln_q.weight"][0].add_(1e-6))
    assert fingerprint(copy) != first


def refusal(folder: Path) -> str:
    with pytest.raises(SetupError) as refused:
        load(folder)
    return str(refused.value)


def test_a_missing_tensor_is_named(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors.pop("visual.blocks.1.attn.qkv.bias"))
    assert "visual.blocks.1.attn.qkv.bias is not in the checkpoint" in refusal(copy)


def test_a_tensor_of_the_wrong_shape_is_named_with_both_shapes(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors.update({"visual.merger.mlp.2.bias": torch.zeros(7)}))
    message = refusal(copy)
    assert "visual.merger.mlp.2.bias" in message
    assert "(7,)" in message
    assert "(256,)" in message


def test_a_tensor_without_a_place_is_named(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors.update({"visual.blocks.9.norm1.weight": torch.zeros(128)}))
    assert "visual.blocks.9.norm1.weight has no place in the model" in refusal(copy)


def test_a_tensor_under_two_names_is_named(copy: Path) -> None:
    rewrite(copy, lambda tensors: tensors.update({"model.visual.merger.ln_q.weight": torch.zeros(128)}))
    assert "visual.merger.ln_q.weight has no place in the model" in refusal(copy)


def test_a_config_that_transformers_cannot_read_is_refused(copy: Path) -> None:
    config: dict[str, Any] = json.loads((copy / "config.json").read_text())
    config["vision_config"]["depth"] = "many"
    (copy / "config.json").write_text(json.dumps(config))
    assert "vision_config.depth" in refusal(copy)
    with pytest.raises(SetupError, match=r"config\.json"):
        read_config(Qwen2_5_VLConfig, open_checkpoint(copy))


def test_a_config_that_transformers_cannot_build_is_refused(tiny_checkpoint: Path) -> None:
    checkpoint = open_checkpoint(tiny_checkpoint)
    config = read_config(Qwen2_5_VLConfig, checkpoint)
    config.text_config.num_attention_heads = 0
    weights = read_towers(checkpoint, PREFIXES, torch.float32, lambda _step, _fraction: None)
    with pytest.raises(SetupError, match=r"config\.json"):
        build_towers("Qwen2_5_VLModel", config, weights, torch.float32)


@pytest.mark.parametrize(
    ("section", "field", "value", "told"),
    [
        ("vision_config", "num_heads", 5, "num_heads 5"),
        ("vision_config", "num_heads", 128, "num_heads 128"),
        ("vision_config", "num_heads", 0, "vision_config.num_heads"),
        ("vision_config", "depth", 0, "vision_config.depth"),
        ("vision_config", "fullatt_block_indexes", [1, 9], "names block 9"),
        ("vision_config", "window_size", 14, "window_size 14"),
        ("vision_config", "in_channels", 4, "vision_config.in_channels"),
        ("vision_config", "hidden_act", "gelu", "vision_config.hidden_act"),
        ("vision_config", "intermediate_size", -1, "vision_config.intermediate_size"),
        ("vision_config", "hidden_size", 128, "has shape"),
    ],
)
def test_a_config_that_no_model_can_have_is_refused(
    copy: Path, section: str, field: str, value: Any, told: str
) -> None:
    config: dict[str, Any] = json.loads((copy / "config.json").read_text())
    config[section][field] = value
    (copy / "config.json").write_text(json.dumps(config))
    assert told in refusal(copy)


def test_a_missing_shard_is_named_with_what_it_holds(copy: Path) -> None:
    (copy / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(SetupError, match=r"shard model-00002-of-00003\.safetensors named in the index is missing"):
        check_servable(copy)
    assert "model-00002-of-00003.safetensors" in refusal(copy)


def test_a_missing_shard_of_the_language_model_alone_is_not_missed(copy: Path) -> None:
    tensors = all_tensors(copy)
    for file in copy.glob("model*"):
        file.unlink()
    halves = {"model-00001-of-00002.safetensors": "visual.", "model-00002-of-00002.safetensors": ""}
    save_file({n: t for n, t in tensors.items() if n.startswith("visual.")}, copy / next(iter(halves)))
    weight_map = {n: next(f for f, prefix in halves.items() if n.startswith(prefix)) for n in tensors}
    (copy / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    check_servable(copy)
    assert list(load(copy)[1].weights.files) == ["model-00001-of-00002.safetensors"]


def test_a_written_checkpoint_depends_on_its_seed_alone(tiny_checkpoint: Path, tmp_path: Path) -> None:
    write_checkpoint("qwen2_5_vl", tmp_path / "again")
    write_checkpoint("qwen2_5_vl", tmp_path / "other", seed=1)
    assert fingerprint(tmp_path / "again") == fingerprint(tiny_checkpoint)
    assert fingerprint(tmp_path / "other") != fingerprint(tiny_checkpoint)
