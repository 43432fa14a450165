"""Pixels, bit for bit as transformers' torchvision-backed Qwen2VLImageProcessor makes them, and what is refused."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl import image_processing_pil_qwen2_vl as reference

from encoder_svc.errors import Reason, ServiceError, SetupError
from encoder_svc.models.adapter import Adapter
from encoder_svc.models.image_patches import read_image_preprocessing, smart_resize
from encoder_svc.models.registry import open_adapter
from epd.encoder.v1.media_pb2 import ImageDetail, ImageOptions, MediaItem, Modality, VideoOptions
from tests.models.encoding import DecodedPicture, image_item, pixel_values, prepare
from tests.models.pictures import PICTURES, Picture

FOLDER = Path(__file__).parent
GOLDEN: dict[str, Any] = json.loads((FOLDER / "golden_pixels.json").read_text())
ORACLE_PYTHON = "ENCODER_SVC_ORACLE_PYTHON"


@pytest.fixture(scope="module")
def adapter(tiny_checkpoint: Path) -> Adapter:
    return open_adapter(tiny_checkpoint, "float32")


def digest(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_pixels_are_those_of_the_torchvision_backed_processor(adapter: Adapter, picture: Picture) -> None:
    layout, prepared = prepare(adapter, picture)
    golden = GOLDEN[picture.name]
    assert list(layout.chunk.grid_dim) == golden["grid"]
    assert digest(prepared.tensors[0]) == golden["patches_uint8"]
    assert digest(pixel_values(prepared.tensors[0])) == golden["pixel_values_float32"]


@pytest.mark.skipif(
    ORACLE_PYTHON not in os.environ,
    reason=f"set {ORACLE_PYTHON} to a Python with torchvision (tests/models/make_golden.py says how to make one)",
)
def test_the_golden_pixels_are_what_the_oracle_says_today() -> None:
    oracle = subprocess.run(
        [os.environ[ORACLE_PYTHON], FOLDER / "make_golden.py"], capture_output=True, text=True, check=True
    )
    assert json.loads(oracle.stdout) == GOLDEN


@settings(deadline=None, max_examples=500)
@given(
    height=st.integers(1, 6000),
    width=st.integers(1, 6000),
    factor=st.sampled_from([28, 32]),
    min_pixels=st.integers(1, 500_000),
    spread=st.integers(0, 2_000_000),
)
def test_sizes_are_those_of_the_reference(height: int, width: int, factor: int, min_pixels: int, spread: int) -> None:
    try:
        expected = reference.smart_resize(height, width, factor, min_pixels, min_pixels + spread)
    except ValueError:
        with pytest.raises(ServiceError) as refused:
            smart_resize(height, width, factor, min_pixels, min_pixels + spread)
        assert refused.value.reason == Reason.MEDIA_UNSUPPORTED
        return
    assert smart_resize(height, width, factor, min_pixels, min_pixels + spread) == expected


def refusal(adapter: Adapter, item: MediaItem, height: int = 64, width: int = 64) -> ServiceError:
    with pytest.raises(ServiceError) as refused:
        adapter.measure(item, DecodedPicture(torch.zeros(height, width, 3, dtype=torch.uint8)))
    return refused.value


@pytest.mark.parametrize(("height", "width"), [(1, 2000), (2000, 1), (1, 201)])
def test_a_picture_too_long_for_the_model_is_refused_with_its_size(adapter: Adapter, height: int, width: int) -> None:
    error = refusal(adapter, image_item(Picture(height, width)), height, width)
    assert error.reason == Reason.MEDIA_UNSUPPORTED
    assert f"{width}×{height}" in error.message
    assert "200:1" in error.message


def test_a_level_of_detail_is_refused(adapter: Adapter) -> None:
    item = MediaItem(modality=Modality.MODALITY_IMAGE, image=ImageOptions(detail=ImageDetail.IMAGE_DETAIL_HIGH))
    error = refusal(adapter, item)
    assert (error.reason, error.field) == (Reason.REQUEST_INVALID, "options.detail")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (ImageOptions(min_pixels=5000, max_pixels=4000), "options.min_pixels"),
        (ImageOptions(max_pixels=100), "options.max_pixels"),
        (ImageOptions(min_pixels=28 * 28 * 1280 + 1), "options.min_pixels"),
        (ImageOptions(min_pixels=1 << 40, max_pixels=1 << 41), "options.min_pixels"),
    ],
)
def test_bounds_that_no_size_meets_are_refused(adapter: Adapter, options: ImageOptions, field: str) -> None:
    error = refusal(adapter, MediaItem(modality=Modality.MODALITY_IMAGE, image=options))
    assert (error.reason, error.field) == (Reason.REQUEST_INVALID, field)


def test_other_media_and_their_options_are_refused(adapter: Adapter) -> None:
    assert refusal(adapter, MediaItem(modality=Modality.MODALITY_AUDIO)).reason == Reason.MODALITY_UNSUPPORTED
    item = MediaItem(modality=Modality.MODALITY_IMAGE, video=VideoOptions(fps=1.0))
    assert refusal(adapter, item).reason == Reason.REQUEST_INVALID


def test_a_layout_says_all_that_the_language_side_needs(adapter: Adapter) -> None:
    layout, prepared = prepare(adapter, Picture(97, 131))
    chunk = layout.chunk
    rows, columns = 6, 10
    assert list(chunk.grid_dim) == [1, rows, columns]
    assert chunk.token_count == rows * columns // 4
    (tensor,) = chunk.tensors
    assert (tensor.name, list(tensor.shape), list(tensor.strides)) == ("embedding", [15, 256], [1024, 4])
    assert chunk.nbytes == 15 * 1024
    (value,) = chunk.placeholder_metadata
    assert (value.name, list(value.shape), list(value.ints.values)) == ("image_grid_thw", [1, 3], [1, rows, columns])
    assert (chunk.image.width, chunk.image.height) == (131, 97)
    assert (chunk.image.resized_width, chunk.image.resized_height) == (columns * 14, rows * 14)
    assert layout.input.patches == rows * columns == prepared.tensors[0].shape[0]
    assert layout.input.nbytes == prepared.tensors[0].nbytes


def test_bounds_of_the_checkpoint_are_read_as_transformers_reads_them() -> None:
    edges = {"size": {"shortest_edge": 1000, "longest_edge": 2000}}
    assert read_image_preprocessing(edges).min_pixels == 1000
    both = read_image_preprocessing({**edges, "min_pixels": 1500, "max_pixels": None})
    assert (both.min_pixels, both.max_pixels) == (1500, 2000)
    defaults = read_image_preprocessing({})
    assert (defaults.min_pixels, defaults.max_pixels) == (56 * 56, 28 * 28 * 1280)


@pytest.mark.parametrize(
    ("settings_of_the_processor", "named"),
    [
        ({"resample": 2}, "resample"),
        ({"do_resize": False}, "do_resize"),
        ({"patch_size": "wide"}, "patch_size"),
        ({"min_pixels": 9000, "max_pixels": 4000}, "min_pixels"),
    ],
)
def test_preprocessing_that_we_do_not_do_is_refused_at_start(
    settings_of_the_processor: dict[str, Any], named: str
) -> None:
    with pytest.raises(SetupError, match=named):
        read_image_preprocessing(settings_of_the_processor)
