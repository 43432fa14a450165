"""Random checkpoints are whole ones to transformers, and no degenerate ones: their words depend on the picture."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from skimage import data
from transformers import AutoTokenizer, Qwen2_5_VLForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutputWithPooling

from encoder_svc.checkpoints import PRESET_NAMES, write_checkpoint
from encoder_svc.checkpoints.qwen2_5_vl import PRESETS
from encoder_svc.cli.main import main
from encoder_svc.errors import SetupError
from encoder_svc.models.adapter import TowerInput
from encoder_svc.models.checkpoint import INDEX
from encoder_svc.models.registry import FAMILIES, check_servable
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from tests.models.encoding import DecodedPicture, load, whole_model

PHOTOGRAPHS = ("astronaut", "chelsea", "coffee")


def embed(checkpoint: Path, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and grid of a photograph."""
    adapter, tower = load(checkpoint)
    item = MediaItem(modality=Modality.MODALITY_IMAGE)
    probe = DecodedPicture(torch.from_numpy(getattr(data, name)()[:256, :256].copy()))
    layout = adapter.measure(item, probe)
    (patches,) = adapter.prepare(item, probe, layout)
    grid = tuple(layout.chunk.grid_dim)
    return tower.encode([TowerInput(item.modality, grid, (patches,))])[0][0].clone(), torch.tensor([grid])


def answer(model: Any, checkpoint: Path, rows: torch.Tensor, grid: torch.Tensor) -> tuple[list[int], torch.Tensor]:
    """Greedy tokens after a question on a picture, and the logits of the first."""
    tokenizer: Any = AutoTokenizer.from_pretrained(checkpoint)
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}
    text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text.replace("<|image_pad|>", "<|image_pad|>" * len(rows)), return_tensors="pt").input_ids
    encoded = BaseModelOutputWithPooling(pooler_output=(rows,))  # type: ignore[arg-type]
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_encoder_outputs={"image": encoded},
        image_grid_thw=grid,
        mm_token_type_ids=(ids == model.config.image_token_id).int(),
        max_new_tokens=12,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return output.sequences[0, ids.shape[1] :].tolist(), output.logits[0][0]


def test_transformers_loads_it_whole(tiny_checkpoint: Path) -> None:
    model_class: Any = Qwen2_5_VLForConditionalGeneration
    _, report = model_class.from_pretrained(tiny_checkpoint, output_loading_info=True)
    assert not any(report.values()), report


def test_words_depend_on_the_picture(tiny_checkpoint: Path) -> None:
    model = whole_model(tiny_checkpoint)
    answers: list[list[int]] = []
    for name in PHOTOGRAPHS:
        rows, grid = embed(tiny_checkpoint, name)
        tokens, logits = answer(model, tiny_checkpoint, rows, grid)
        without, blind = answer(model, tiny_checkpoint, torch.zeros_like(rows), grid)
        assert tokens != without
        assert (logits - blind).abs().max() > logits.std()
        answers.append(tokens)
    assert len({tuple(tokens) for tokens in answers}) == len(PHOTOGRAPHS)
    assert max(max(tokens) for tokens in answers) < 256, "special tokens are never generated"


def test_the_chat_template_marks_where_pictures_stand(tiny_checkpoint: Path) -> None:
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_checkpoint)
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "häh?"}]}
    ids = tokenizer.apply_chat_template([message], add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>häh?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    assert config["image_token_id"] == tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert config["vocab_size"] == len(tokenizer)


def test_it_has_shards_that_all_hold_both_halves(tiny_checkpoint: Path) -> None:
    weight_map: dict[str, str] = json.loads((tiny_checkpoint / INDEX).read_text())["weight_map"]
    towers = {file for name, file in weight_map.items() if name.startswith("visual.")}
    language = {file for name, file in weight_map.items() if not name.startswith("visual.")}
    assert towers == language == {file.name for file in tiny_checkpoint.glob("*.safetensors")}
    assert len(towers) > 1


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
def test_sizes_of_presets_fit_each_other(preset: Any) -> None:
    assert preset.vision_hidden % (4 * preset.vision_heads) == 0
    assert preset.hidden == preset.heads * 64
    assert preset.heads % preset.key_value_heads == 0
    assert max(preset.full_attention) == preset.vision_depth - 1


def test_small_is_the_benchmarks_size(tmp_path: Path) -> None:
    assert set(PRESETS) == set(PRESET_NAMES)
    small = PRESETS["small"]
    assert (small.vision_depth, small.vision_hidden, small.vision_heads, small.vision_intermediate) == (8, 512, 8, 1408)


@pytest.mark.parametrize("family", ["qwen3_vl_moe", "kimi_vl", "whisper"])
def test_equal_arguments_give_equal_files(family: str, tmp_path: Path) -> None:
    for name in ("once", "again"):
        write_checkpoint(family, tmp_path / name)
    written = {file.name: file.read_bytes() for file in (tmp_path / "once").iterdir()}
    assert written == {file.name: file.read_bytes() for file in (tmp_path / "again").iterdir()}
    assert {"config.json", "preprocessor_config.json", "tokenizer.json", "generation_config.json"} <= set(written)
    write_checkpoint(family, tmp_path / "other", seed=1)
    for file in (tmp_path / "other").glob("*.safetensors"):
        assert file.read_bytes() != written[file.name]


def test_the_command_writes_it_and_says_how_to_serve_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "made"
    assert main(["tiny-checkpoint", "qwen2_5_vl", str(folder)]) == 0
    assert f"encoder-svc serve --model {folder}" in capsys.readouterr().err
    assert check_servable(folder).model_type == "qwen2_5_vl"

    assert main(["tiny-checkpoint", "qwen2_5_vl", str(folder)]) == 2
    assert re.search("is not empty.*--force", capsys.readouterr().err)
    assert main(["tiny-checkpoint", "qwen2_5_vl", str(folder), "--force", "--seed", "3"]) == 0


def test_families_and_presets_that_cannot_be_written_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"'bert'.*qwen2_5_vl"):
        write_checkpoint("bert", tmp_path / "made")
    with pytest.raises(SetupError, match=r"'huge'.*tiny, small, base"):
        write_checkpoint("qwen2_5_vl", tmp_path / "made", preset="huge")  # type: ignore[arg-type]
    (tmp_path / "file").touch()
    with pytest.raises(SetupError, match="is a file"):
        write_checkpoint("qwen2_5_vl", tmp_path / "file")


def test_the_table_of_families_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    printed = capsys.readouterr().out
    assert all(family in printed for family in FAMILIES)
    assert "image" in printed
