"""Families that transformers' own towers encode: tiles and their rows, and what else only some of them have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from encoder_svc.checkpoints.writer import write_checkpoint
from encoder_svc.engine.runner import Runner
from encoder_svc.engine.staging import HostStaging
from encoder_svc.errors import Reason
from encoder_svc.models.registry import open_adapter
from encoder_svc.shared_memory import SharedMemory
from encoder_svc.tensors import tensor_view
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from epd.internal.v1.engine_pb2 import BatchItem
from tests.models.cases.images import load, media, processed
from tests.models.encoding import DecodedPicture
from tests.models.family_cases import Prepared, prepare

TILED = ("llava_onevision", "internvl", "minicpmv4_6")
POOLED = {"siglip": "SiglipImageProcessor", "clip": "CLIPImageProcessor", "dinov2": "BitImageProcessor"}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Where the checkpoint of a family is; it is written when it is asked for first."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def find(family: str) -> Path:
        if not (folder / family).exists():
            write_checkpoint(family, folder / family)
        return folder / family

    return find


@pytest.fixture(scope="module", params=TILED)
def tiled(request: pytest.FixtureRequest, checkpoints: Any) -> SimpleNamespace:
    """A family with tiles, its media prepared and encoded one at a time."""
    adapter = open_adapter(checkpoints(request.param), "float32")
    tower = adapter.load_tower(torch.device("cpu"), lambda _step, _fraction: None)
    prepared = [prepare(adapter, medium) for medium in media()]
    alone = [tower.encode([one.input])[0][0] for one in prepared]
    return SimpleNamespace(adapter=adapter, tower=tower, prepared=prepared, alone=alone)


few = settings(
    max_examples=12,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def test_f35_media_are_of_different_numbers_of_tiles(tiled: SimpleNamespace) -> None:
    tokens = {one.layout.chunk.token_count for one in tiled.prepared}
    assert len(tokens) >= 3, "with equal numbers of tiles no slice could be misplaced"


@few
@given(order=st.lists(st.integers(0, 4), min_size=2, max_size=6))
def test_f35_tiles_of_any_batch_go_back_to_their_images(tiled: SimpleNamespace, order: list[int]) -> None:
    encoded = tiled.tower.encode([tiled.prepared[index].input for index in order])
    for index, (rows,) in zip(order, encoded, strict=True):
        torch.testing.assert_close(rows, tiled.alone[index], atol=1e-4, rtol=0)


sizes = st.tuples(st.integers(1, 900), st.integers(1, 900)).filter(lambda size: max(size) <= 200 * min(size))


def internvl_rows(processor: Any, height: int, width: int) -> int:
    return 16 * int(processor.get_number_of_image_patches(height, width, {"crop_to_patches": True}))


def onevision_rows(processor: Any, height: int, width: int) -> int:
    """As the processor of images and text counts, which is made without its tokenizer here."""
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

    whole: Any = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
    whole.image_processor, whole.num_image_tokens, whole.vision_aspect_ratio = processor, 81, "anyres_max_9"
    return int(whole._get_number_of_features(height, width, processor.size["height"], processor.size["width"]))


def mistral3_rows(processor: Any, height: int, width: int) -> int:
    from transformers.models.pixtral.image_processing_pil_pixtral import get_resize_output_image_size

    found = get_resize_output_image_size(torch.zeros(3, height, width).numpy(), 1540, 28, "channels_first")
    return int(found[0] * found[1] // 28**2)


def glm_rows(processor: Any, height: int, width: int) -> int:
    return int(processor.get_number_of_image_patches(height, width)) // 4


COUNTS = {
    "internvl": ("GotOcr2ImageProcessorPil", internvl_rows),
    "llava_onevision": ("LlavaOnevisionImageProcessorPil", onevision_rows),
    "mistral3": ("PixtralImageProcessorPil", mistral3_rows),
    "glm4v": ("Glm4vImageProcessorPil", glm_rows),
}


@pytest.mark.parametrize("family", COUNTS)
def test_f35_rows_are_as_many_as_the_references_placeholders(family: str, checkpoints: Any) -> None:
    import transformers

    name, count = COUNTS[family]
    adapter = open_adapter(checkpoints(family), "float32")
    processor = getattr(transformers, name).from_pretrained(checkpoints(family))

    @settings(max_examples=40, deadline=None)
    @given(size=sizes)
    def compare(size: tuple[int, int]) -> None:
        height, width = size
        layout = adapter.measure(MediaItem(modality=Modality.MODALITY_IMAGE), blank(height, width))
        assert layout.chunk.token_count == count(processor, height, width)

    compare()


def blank(height: int, width: int) -> DecodedPicture:
    return DecodedPicture(torch.zeros(height, width, 3, dtype=torch.uint8))


@pytest.fixture(scope="module")
def arenas() -> Iterator[tuple[SharedMemory, SharedMemory]]:
    pair = SharedMemory.create("input", 32 << 20), SharedMemory.create("arena", 16 << 20)
    yield pair
    for block in pair:
        block.close()


def batch_item(part: int, prepared: Prepared, arenas: tuple[SharedMemory, SharedMemory], bad: bool) -> BatchItem:
    """An item as the front gives it to an engine; a bad one's input says another size than its tiles have."""
    described, chunk = prepared.layout.input, prepared.layout.chunk
    item = BatchItem(
        part=part,
        modality=Modality.MODALITY_IMAGE,
        grid_dim=chunk.grid_dim,
        input=described,
        input_offset=part * (4 << 20),
        tensors=chunk.tensors,
        payload_offset=part * (2 << 20),
        nbytes=chunk.nbytes,
    )
    for spec, tensor in zip(described.tensors, prepared.input.tensors, strict=True):
        place = tensor_view(arenas[0], item.input_offset, spec)
        place.copy_(torch.full_like(tensor, 7) if bad and spec.name == "image_sizes" else tensor)
    return item


@pytest.mark.parametrize("tiled", ["llava_onevision"], indirect=True)
@few
@given(chosen=st.lists(st.tuples(st.integers(0, 4), st.booleans()), min_size=1, max_size=6))
def test_f05_a_bad_item_at_any_place_among_tiled_ones_fails_alone(
    tiled: SimpleNamespace, arenas: tuple[SharedMemory, SharedMemory], chosen: list[tuple[int, bool]]
) -> None:
    # The tiny picture has two tiles, whatever size is told.
    chosen = [(index, bad and len(tiled.prepared[index].input.tensors[0]) != 2) for index, bad in chosen]
    runner = Runner(tiled.tower, torch.device("cpu"), *arenas, HostStaging())
    items = [batch_item(part, tiled.prepared[index], arenas, bad) for part, (index, bad) in enumerate(chosen)]
    outcome = runner.run(items)
    for item, result, (index, bad) in zip(items, outcome.results, chosen, strict=True):
        assert result.reason == (Reason.FORWARD_FAILED if bad else "")
        if not bad:
            rows = tensor_view(arenas[1], item.payload_offset, item.tensors[0])
            torch.testing.assert_close(rows, tiled.alone[index], atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", POOLED)
def test_an_images_one_vector_is_the_references(family: str, checkpoints: Any) -> None:
    adapter = open_adapter(checkpoints(family), "float32")
    tower = adapter.load_tower(torch.device("cpu"), lambda _step, _fraction: None)
    prepared = [prepare(adapter, medium) for medium in media()]
    model = load(checkpoints(family))
    assert [spec.name for spec in prepared[0].layout.chunk.tensors] == ["embedding", "pooled_embedding"]
    for medium, (_, pooled) in zip(media(), tower.encode([one.input for one in prepared]), strict=True):
        pixels = processed(checkpoints(family), medium, POOLED[family], {})["pixel_values"]
        with torch.inference_mode():
            call = model if family == "dinov2" else model.get_image_features
            expected = call(pixel_values=pixels).pooler_output
        torch.testing.assert_close(pooled, expected, atol=1e-4, rtol=0)
        assert expected.std() > 0.1


def test_pixtral_in_llava_and_the_names_that_transformers_saves(tmp_path: Path) -> None:
    from transformers import LlavaConfig, LlavaForConditionalGeneration, PixtralImageProcessorPil

    text = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    vision = {"model_type": "pixtral", "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    config = LlavaConfig(
        text_config={**text, "num_attention_heads": 2, "vocab_size": 300},
        vision_config={**vision, "num_attention_heads": 4, "head_dim": 64, "patch_size": 16, "image_size": 320},
        vision_feature_select_strategy="full",
        vision_feature_layer=-1,
        image_token_index=299,
    )
    torch.manual_seed(0)
    model: Any = LlavaForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    PixtralImageProcessorPil(size={"longest_edge": 320}, patch_size=16).save_pretrained(tmp_path)

    adapter = open_adapter(tmp_path, "float32")
    tower = adapter.load_tower(torch.device("cpu"), lambda _step, _fraction: None)
    prepared = [prepare(adapter, medium) for medium in media()]
    encoded = tower.encode([one.input for one in prepared])
    for medium, one, (rows,) in zip(media(), prepared, encoded, strict=True):
        inputs = processed(tmp_path, medium, "PixtralImageProcessor", {})
        with torch.inference_mode():
            features = model.get_image_features(inputs["pixel_values"], image_sizes=inputs["image_sizes"])
        torch.testing.assert_close(rows, features.pooler_output[0], atol=1e-4, rtol=0)
        assert list(one.layout.chunk.grid_dim) == [size // 16 for size in inputs["image_sizes"][0].tolist()]


def test_a_family_that_is_described_needs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of docs/models.md."""
    from transformers import PaliGemmaConfig, PaliGemmaForConditionalGeneration, SiglipImageProcessorPil

    from encoder_svc.models.image_families import DESCRIPTIONS, ImageFamily
    from encoder_svc.models.image_rows import class_token_rows, patch_grid
    from encoder_svc.models.registry import FAMILIES, Family

    rows = ImageFamily("PaliGemmaModel", class_token_rows, patch_grid, processor="SiglipImageProcessor")
    monkeypatch.setitem(DESCRIPTIONS, ("paligemma", ""), rows)
    monkeypatch.setitem(
        FAMILIES,
        "paligemma",
        Family(
            model_type="paligemma",
            architectures=("PaliGemmaForConditionalGeneration",),
            modalities=(Modality.MODALITY_IMAGE,),
            tensors=("embedding",),
            prefixes=("model.vision_tower.", "model.multi_modal_projector.", "vision_tower.", "multi_modal_projector."),
            adapter="encoder_svc.models.transformers_images:make_adapter",
            verified="embeddings",
        ),
    )
    text = {"model_type": "gemma", "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 16}
    vision = {"model_type": "siglip_vision_model", "hidden_size": 256, "intermediate_size": 256, "image_size": 112}
    config = PaliGemmaConfig(
        text_config={**text, "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 300},
        vision_config={**vision, "num_hidden_layers": 2, "num_attention_heads": 4, "vision_use_head": False},
        projection_dim=64,
        image_token_index=299,
    )
    torch.manual_seed(0)
    model: Any = PaliGemmaForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    SiglipImageProcessorPil(size={"height": 112, "width": 112}).save_pretrained(tmp_path)

    adapter = open_adapter(tmp_path, "float32")
    tower = adapter.load_tower(torch.device("cpu"), lambda _step, _fraction: None)
    prepared = [prepare(adapter, medium) for medium in media()]
    for medium, (found,) in zip(media(), tower.encode([one.input for one in prepared]), strict=True):
        pixels = processed(tmp_path, medium, "SiglipImageProcessor", {})["pixel_values"]
        with torch.inference_mode():
            (expected,) = model.get_image_features(pixels).pooler_output
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
