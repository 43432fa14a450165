"""The language-only worker says what the whole model says, given the embeddings that the whole model's tower makes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import Qwen2_5_VLForConditionalGeneration

from encoder_client.language import CheckpointError, ExpandedPrompt, LanguageOnlyModel, PlaceholderError
from encoder_svc.checkpoints import write_checkpoint
from epd.encoder.v1.embedding_pb2 import ChunkState, DataType, EmbeddingChunk, Int64List, PlaceholderValue, TensorSpec
from epd.encoder.v1.media_pb2 import Modality

GRIDS = ((1, 6, 8), (1, 4, 4), (1, 10, 6))
NEW_TOKENS = 12


@dataclass(frozen=True)
class WholeModel:
    """The whole model, its answer, and what its tower made."""

    pixel_values: torch.Tensor
    rows: tuple[torch.Tensor, ...]
    token_ids: list[int]
    first_logits: torch.Tensor


def layout(part: int, rows: int, width: int, grid: tuple[int, ...], num_parts: int = len(GRIDS)) -> EmbeddingChunk:
    return EmbeddingChunk(
        prompt_id="p",
        request_id="r",
        part_idx=part,
        num_parts=num_parts,
        modality=Modality.MODALITY_IMAGE,
        state=ChunkState.CHUNK_STATE_LAYOUT,
        grid_dim=grid,
        token_count=rows,
        nbytes=rows * width * 4,
        tensors=[
            TensorSpec(name="embedding", dtype=DataType.DATA_TYPE_FLOAT32, shape=[rows, width], strides=[width * 4, 4])
        ],
        placeholder_metadata=[
            PlaceholderValue(name="image_grid_thw", ints=Int64List(values=grid), shape=[1, 3]),
        ],
    )


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    write_checkpoint("qwen2_5_vl", folder, preset="tiny")
    return folder


@pytest.fixture(scope="module")
def language(checkpoint: Path) -> LanguageOnlyModel:
    return LanguageOnlyModel.load(checkpoint)


@pytest.fixture(scope="module")
def layouts(language: LanguageOnlyModel) -> list[EmbeddingChunk]:
    rows = [t * h * w // 4 for t, h, w in GRIDS]
    return [layout(i, n, language.hidden_size, grid) for i, (n, grid) in enumerate(zip(rows, GRIDS, strict=True))]


@pytest.fixture(scope="module")
def prompt(language: LanguageOnlyModel, layouts: list[EmbeddingChunk]) -> ExpandedPrompt:
    images = [{"type": "image"} for _ in GRIDS]
    return language.expand([{"role": "user", "content": [*images, {"type": "text", "text": "compare"}]}], layouts)


@pytest.fixture(scope="module")
def whole(checkpoint: Path, prompt: ExpandedPrompt) -> WholeModel:
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.float32).eval()
    grid = torch.tensor(GRIDS)
    patches = int(grid.prod(-1).sum())
    pixels = torch.randn(patches, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        rows = model.get_image_features(pixels, grid).pooler_output
        answer = model.generate(
            input_ids=prompt.input_ids,
            attention_mask=torch.ones_like(prompt.input_ids),
            mm_token_type_ids=prompt.mm_token_type_ids,
            pixel_values=pixels,
            image_grid_thw=grid,
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            return_dict_in_generate=True,
            output_logits=True,
        )
    return WholeModel(
        pixels, tuple(rows), answer.sequences[0, prompt.input_ids.shape[1] :].tolist(), answer.logits[0][0]
    )


def test_tokens_and_first_logits_equal_the_whole_models(
    language: LanguageOnlyModel, prompt: ExpandedPrompt, whole: WholeModel
) -> None:
    answer = language.generate(prompt, whole.rows, max_new_tokens=NEW_TOKENS, first_logits=True)
    assert answer.token_ids == whole.token_ids
    assert answer.first_logits is not None
    torch.testing.assert_close(answer.first_logits, whole.first_logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "spoil",
    [torch.zeros_like, lambda rows: rows.flip(0), lambda rows: rows + 1e-3],
    ids=["zeroed", "rows in reverse", "off by a thousandth"],
)
def test_wrong_embeddings_fail_the_comparison(
    language: LanguageOnlyModel,
    prompt: ExpandedPrompt,
    whole: WholeModel,
    spoil: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    spoilt = [spoil(rows) for rows in whole.rows]
    answer = language.generate(prompt, spoilt, max_new_tokens=1, first_logits=True)
    assert answer.first_logits is not None
    assert not torch.allclose(answer.first_logits, whole.first_logits, atol=1e-5, rtol=0)


def test_swapped_images_fail_the_comparison(
    language: LanguageOnlyModel, layouts: list[EmbeddingChunk], whole: WholeModel, prompt: ExpandedPrompt
) -> None:
    swapped = [layout(0, layouts[1].token_count, language.hidden_size, GRIDS[1]), *layouts[1:]]
    swapped[1] = layout(1, layouts[0].token_count, language.hidden_size, GRIDS[0])
    images = [{"type": "image"} for _ in GRIDS]
    other = language.expand([{"role": "user", "content": [*images, {"type": "text", "text": "compare"}]}], swapped)
    assert other.input_ids.shape == prompt.input_ids.shape
    rows = (whole.rows[1], whole.rows[0], whole.rows[2])
    answer = language.generate(other, rows, max_new_tokens=1, first_logits=True)
    assert answer.first_logits is not None
    assert not torch.allclose(answer.first_logits, whole.first_logits, atol=1e-5, rtol=0)


def test_a_stream_gives_the_same_tokens(language: LanguageOnlyModel, prompt: ExpandedPrompt, whole: WholeModel) -> None:
    assert list(language.stream(prompt, whole.rows, max_new_tokens=NEW_TOKENS)) == whole.token_ids


def test_a_stream_that_is_left_ends_the_generation(
    language: LanguageOnlyModel, prompt: ExpandedPrompt, whole: WholeModel
) -> None:
    tokens = language.stream(prompt, whole.rows, max_new_tokens=100_000, min_new_tokens=100_000)
    assert next(iter(tokens)) == whole.token_ids[0]
    tokens.close()  # type: ignore[attr-defined]  # it joins the thread: this returns only if the generation has ended
    assert language.generate(prompt, whole.rows, max_new_tokens=1).token_ids == whole.token_ids[:1]


def test_a_fault_of_the_generation_reaches_who_streams(
    language: LanguageOnlyModel, prompt: ExpandedPrompt, whole: WholeModel
) -> None:
    with pytest.raises(ValueError, match="num_beams"):
        list(language.stream(prompt, whole.rows, num_beams=2))


def test_f44_no_tower_tensor_is_read_and_no_tower_memory_allocated(
    checkpoint: Path, language: LanguageOnlyModel
) -> None:
    sizes: dict[str, int] = {}
    for file in checkpoint.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            sizes |= {name: opened.get_tensor(name).nbytes for name in opened.keys()}  # noqa: SIM118 # it is no dictionary
    tower = {name for name in sizes if "visual." in name}
    read = language.weights
    assert tower
    assert set(read.left_out) == tower
    assert set(read.tensors) == set(sizes) - tower
    assert read.nbytes == sum(size for name, size in sizes.items() if name not in tower)
    assert language.tower_parameters == 0
    assert language.parameters * 4 == read.nbytes


def test_f44_a_file_of_tower_tensors_only_is_not_opened(checkpoint: Path, tmp_path: Path) -> None:
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "model.safetensors.index.json").unlink()
    for name in index["weight_map"]:
        if "visual." in name:
            index["weight_map"][name] = "towers.safetensors"  # which is not there: opening it would fail
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "towers.safetensors" not in LanguageOnlyModel.load(tmp_path).weights.files


def test_a_missing_tensor_is_named(checkpoint: Path, tmp_path: Path) -> None:
    index = json.loads((checkpoint / "model.safetensors.index.json").read_text())
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "model.safetensors.index.json").unlink()
    del index["weight_map"]["model.layers.0.mlp.up_proj.weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight"):
        LanguageOnlyModel.load(tmp_path)


def test_a_missing_file_is_named(checkpoint: Path, tmp_path: Path) -> None:
    for file in checkpoint.iterdir():
        if file.name != "model-00001-of-00003.safetensors":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(CheckpointError, match="model-00001-of-00003"):
        LanguageOnlyModel.load(tmp_path)


def test_a_folder_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="model_type"):
        LanguageOnlyModel.load(tmp_path)


def test_bfloat16_agrees_with_the_whole_model_in_bfloat16(
    checkpoint: Path, prompt: ExpandedPrompt, whole: WholeModel
) -> None:
    model: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        rows = model.get_image_features(whole.pixel_values, torch.tensor(GRIDS)).pooler_output
        answer = model(
            input_ids=prompt.input_ids,
            mm_token_type_ids=prompt.mm_token_type_ids,
            pixel_values=whole.pixel_values,
            image_grid_thw=torch.tensor(GRIDS),
        )
    language = LanguageOnlyModel.load(checkpoint, dtype=torch.bfloat16)
    mine = language.generate(prompt, tuple(rows), max_new_tokens=1, first_logits=True).first_logits
    assert mine is not None
    torch.testing.assert_close(mine, answer.logits[0, -1].float(), atol=8e-2, rtol=0)


class TestPlaceholders:
    def test_each_part_has_as_many_tokens_as_rows(self, prompt: ExpandedPrompt, layouts: list[EmbeddingChunk]) -> None:
        image_token = 268
        assert [span.length for span in prompt.spans] == [chunk.token_count for chunk in layouts]
        for span in prompt.spans:
            inside = prompt.input_ids[0, span.start : span.start + span.length]
            assert (inside == image_token).all()
        assert int((prompt.input_ids == image_token).sum()) == sum(span.length for span in prompt.spans)
        assert torch.equal(prompt.values["image_grid_thw"], torch.tensor(GRIDS))

    def test_layouts_may_come_in_any_order(
        self, language: LanguageOnlyModel, prompt: ExpandedPrompt, layouts: list[EmbeddingChunk]
    ) -> None:
        images = [{"type": "image"} for _ in GRIDS]
        messages = [{"role": "user", "content": [*images, {"type": "text", "text": "compare"}]}]
        again = language.expand(messages, [layouts[2], layouts[0], layouts[1]])
        assert torch.equal(again.input_ids, prompt.input_ids)
        assert torch.equal(again.values["image_grid_thw"], prompt.values["image_grid_thw"])

    def test_more_placeholders_than_parts(self, language: LanguageOnlyModel, layouts: list[EmbeddingChunk]) -> None:
        with pytest.raises(PlaceholderError, match="more placeholders"):
            language.expand("<|image_pad|>" * 4, layouts)

    def test_fewer_placeholders_than_parts(self, language: LanguageOnlyModel, layouts: list[EmbeddingChunk]) -> None:
        with pytest.raises(PlaceholderError, match="2 placeholders for 3 parts"):
            language.expand("<|image_pad|>" * 2, layouts)

    def test_a_missing_layout(self, language: LanguageOnlyModel, layouts: list[EmbeddingChunk]) -> None:
        with pytest.raises(PlaceholderError, match=r"parts \[0, 2\]"):
            language.expand("<|image_pad|>" * 2, [layouts[0], layouts[2]])

    def test_another_modality(self, language: LanguageOnlyModel, layouts: list[EmbeddingChunk]) -> None:
        sound = EmbeddingChunk()
        sound.CopyFrom(layouts[0])
        sound.modality = Modality.MODALITY_AUDIO
        with pytest.raises(PlaceholderError, match="placeholder 0 is for IMAGE, and part 0 is AUDIO"):
            language.expand("<|image_pad|>", [sound])

    def test_missing_placeholder_metadata(self, language: LanguageOnlyModel, layouts: list[EmbeddingChunk]) -> None:
        bare = EmbeddingChunk()
        bare.CopyFrom(layouts[0])
        bare.ClearField("placeholder_metadata")
        with pytest.raises(PlaceholderError, match="image_grid_thw"):
            language.expand("<|image_pad|>", [bare])

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda rows: rows[:-1], "part 0 has shape"),
            (lambda rows: torch.cat([rows, rows[:1]]), "part 0 has shape"),
            (lambda rows: rows[:, :-1], "part 0 has shape"),
            (lambda rows: rows.to(torch.float16), "part 0 is torch.float16"),
        ],
        ids=["a row short", "a row extra", "too narrow", "another dtype"],
    )
    def test_f13_rows_that_do_not_fit_are_refused_by_name(
        self,
        language: LanguageOnlyModel,
        prompt: ExpandedPrompt,
        whole: WholeModel,
        change: Callable[[torch.Tensor], torch.Tensor],
        message: str,
    ) -> None:
        with pytest.raises(PlaceholderError, match=message):
            language.generate(prompt, [change(whole.rows[0]), *whole.rows[1:]])

    def test_f13_a_missing_embedding(
        self, language: LanguageOnlyModel, prompt: ExpandedPrompt, whole: WholeModel
    ) -> None:
        with pytest.raises(PlaceholderError, match=r"parts \[2\] are missing"):
            language.generate(prompt, whole.rows[:2])

    def test_f13_an_embedding_too_many(
        self, language: LanguageOnlyModel, prompt: ExpandedPrompt, whole: WholeModel
    ) -> None:
        with pytest.raises(PlaceholderError, match="4 embeddings"):
            language.generate(prompt, [*whole.rows, whole.rows[0]])
