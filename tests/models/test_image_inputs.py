"""What image families of transformers are given: pixels are the reference's, and what cannot be is refused."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from encoder_svc.checkpoints.writer import write_checkpoint
from encoder_svc.errors import Reason, ServiceError, SetupError
from encoder_svc.models.registry import open_adapter
from epd.encoder.v1.media_pb2 import IMAGE_DETAIL_HIGH, ImageOptions, MediaItem, Modality
from tests.models.cases.images import media, processed
from tests.models.encoding import DecodedPicture
from tests.models.family_cases import prepare
from tests.models.pictures import PICTURES, Picture


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Where the checkpoint of a family is; it is written when it is asked for first."""
    folder = tmp_path_factory.mktemp("checkpoints")

    def find(family: str) -> Path:
        if not (folder / family).exists():
            write_checkpoint(family, folder / family)
        return folder / family

    return find


def blank(height: int, width: int) -> DecodedPicture:
    return DecodedPicture(torch.zeros(height, width, 3, dtype=torch.uint8))


def test_normalising_in_the_tower_is_bit_for_bit_the_processors(checkpoints: Any) -> None:
    adapter: Any = open_adapter(checkpoints("llava"), "float32")
    for medium in media():
        expected = processed(checkpoints("llava"), medium, "CLIPImageProcessor", {})["pixel_values"]
        assert torch.equal(adapter._inputs.normalisation(prepare(adapter, medium).input.tensors[0]), expected)


@pytest.mark.parametrize(
    ("family", "options", "told"),
    [
        ("llava", ImageOptions(max_pixels=1000), "max_pixels"),
        ("llava", ImageOptions(detail=IMAGE_DETAIL_HIGH), "no levels of detail"),
        ("kimi_k25", ImageOptions(min_pixels=1000), "min_pixels"),
        ("glm4v", ImageOptions(detail=IMAGE_DETAIL_HIGH), "no levels of detail"),
    ],
)
def test_options_that_a_family_has_not_are_refused(
    family: str, options: ImageOptions, told: str, checkpoints: Any
) -> None:
    adapter = open_adapter(checkpoints(family), "float32")
    with pytest.raises(ServiceError, match=told) as refused:
        adapter.measure(MediaItem(modality=Modality.MODALITY_IMAGE, image=options), blank(40, 40))
    assert refused.value.reason is Reason.REQUEST_INVALID


@pytest.mark.parametrize("family", ["llava", "glm4v", "internvl"])
def test_long_strips_are_refused(family: str, checkpoints: Any) -> None:
    adapter = open_adapter(checkpoints(family), "float32")
    with pytest.raises(ServiceError, match="200"):
        adapter.measure(MediaItem(modality=Modality.MODALITY_IMAGE), blank(28, 28 * 201))


@pytest.mark.parametrize(
    ("file", "field", "value", "told"),
    [
        ("preprocessor_config.json", "image_processor_type", "NoSuchProcessor", "NoSuchProcessorPil"),
        ("preprocessor_config.json", "image_processor_type", "AutoModel", "AutoModelPil"),
        ("preprocessor_config.json", "image_std", [1.0, 0.0, 1.0], "image_std"),
        ("config.json", "vision_config", {"model_type": "vit"}, "'vit'"),
        ("config.json", "vision_feature_layer", "last", "config.json"),
    ],
)
def test_a_checkpoint_that_cannot_be_served_is_refused_at_start(
    file: str, field: str, value: Any, told: str, tmp_path: Path, checkpoints: Any
) -> None:
    for source in checkpoints("llava").iterdir():
        (tmp_path / source.name).symlink_to(source)
    content = json.loads((tmp_path / file).read_text())
    (tmp_path / file).unlink()
    (tmp_path / file).write_text(json.dumps({**content, field: value}))
    with pytest.raises(SetupError, match=told):
        open_adapter(tmp_path, "float32")


GOLDEN: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "golden_patches.json").read_text())


@pytest.mark.parametrize("family", GOLDEN)
def test_patches_are_those_of_the_processors_with_torchvision(family: str, checkpoints: Any) -> None:
    adapter = open_adapter(checkpoints(family), "float32")
    pictures = {picture.name: picture for picture in PICTURES}
    for name, golden in GOLDEN[family].items():
        probe = DecodedPicture(pictures[name].pixels())
        layout = adapter.measure(MediaItem(modality=Modality.MODALITY_IMAGE), probe)
        assert list(layout.chunk.grid_dim) == golden["grid"], name
        assert hashlib.sha256(layout.prepared[0].numpy().tobytes()).hexdigest() == golden["patches_uint8"], name


def test_kimi_vls_pixels_are_pillows(checkpoints: Any) -> None:
    adapter: Any = open_adapter(checkpoints("kimi_vl"), "float32")
    picture = Picture(1301, 1707)
    shown = cut(adapter, picture)
    # 92 · 121 patches are more than 4096.
    scale = math.sqrt(4096 / (92 * 121))
    width, height = int(1707 * scale), int(1301 * scale)
    resized = Image.fromarray(picture.pixels().numpy()).resize((width, height), Image.Resampling.BICUBIC)
    assert shown.shape[0] % 28 == shown.shape[1] % 28 == 0
    assert torch.equal(shown[:height, :width], torch.from_numpy(np.array(resized)))
    assert not shown[height:].any()
    assert not shown[:, width:].any()


def cut(adapter: Any, picture: Picture) -> torch.Tensor:
    """The picture that patches in merge blocks show together; uint8, shape (height, width, 3)."""
    layout = adapter.measure(MediaItem(modality=Modality.MODALITY_IMAGE), DecodedPicture(picture.pixels()))
    rows, columns = layout.chunk.grid_dim
    blocks = layout.prepared[0].view(rows // 2, columns // 2, 2, 2, 3, 14, 14).transpose(1, 2)
    lines: torch.Tensor = blocks.reshape(rows, columns, 3, 14, 14)
    return lines.permute(0, 3, 1, 4, 2).reshape(rows * 14, columns * 14, 3)


def test_a_medium_of_another_modality_is_refused(checkpoints: Any) -> None:
    adapter = open_adapter(checkpoints("llava"), "float32")
    with pytest.raises(ServiceError) as refused:
        adapter.measure(MediaItem(modality=Modality.MODALITY_AUDIO), blank(9, 9))
    assert refused.value.reason is Reason.MODALITY_UNSUPPORTED
