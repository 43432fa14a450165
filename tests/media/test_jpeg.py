"""JPEG through simplejpeg: the pixels are Pillow's, whatever the file, and damage ends as it does with Pillow."""

from __future__ import annotations

import io
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from skimage import data

from encoder_svc.errors import ServiceError
from encoder_svc.media import jpeg
from encoder_svc.media.image import ImageProbe

simplejpeg = pytest.importorskip("simplejpeg")
PHOTOGRAPH = Image.fromarray(data.astronaut())


def saved(size: tuple[int, int], mode: str = "RGB", orientation: int = 1, **options: Any) -> bytes:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[274] = orientation
    PHOTOGRAPH.resize(size).convert(mode).save(file, "JPEG", exif=exif, **options)
    return file.getvalue()


def outcome(file: bytes) -> torch.Tensor | str:
    try:
        return ImageProbe(file, 10_000_000).decode()
    except ServiceError as error:
        return error.reason


def with_pillow(file: bytes) -> torch.Tensor | str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jpeg, "simplejpeg", None)
        return outcome(file)


def assert_same(file: bytes) -> None:
    ours, pillows = outcome(file), with_pillow(file)
    assert type(ours) is type(pillows)
    assert (
        torch.equal(ours, pillows)
        if isinstance(ours, torch.Tensor) and isinstance(pillows, torch.Tensor)
        else ours == pillows
    )


def test_pixels_are_pillows() -> None:
    used = 0
    for size, quality, subsampling, progressive, mode in product(
        ((512, 512), (97, 131), (1, 1)), (30, 95), ("4:4:4", "4:2:2", "4:2:0"), (False, True), ("RGB", "L", "CMYK")
    ):
        file = saved(size, mode, quality=quality, subsampling=subsampling, progressive=progressive)
        assert_same(file)
        used += jpeg.decode_jpeg(file, mode) is not None
    assert used == 72, "grey and coloured files are decoded by simplejpeg"


@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_turned_as_pillow_turns_them(orientation: int) -> None:
    assert_same(saved((40, 24), orientation=orientation))


def test_files_that_keep_rgb_are_the_same() -> None:
    assert_same(saved((64, 48), keep_rgb=True))


FILE = bytearray(saved((48, 32), quality=80))


@settings(max_examples=300, deadline=None)
@given(cut=st.integers(2, len(FILE)), changes=st.lists(st.tuples(st.integers(2, len(FILE) - 1), st.integers(0, 255))))
def test_damage_ends_as_with_pillow(cut: int, changes: list[tuple[int, int]]) -> None:
    file = bytearray(FILE)
    for place, value in changes:
        file[place] = value
    assert_same(bytes(file[:cut]))
