"""What is sent: JPEG files, no two of them equal."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from encoder_svc.bench.photographs import Photographs, padded


def decode(file: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))


def test_no_file_comes_twice_and_each_picture_differs() -> None:
    photographs = Photographs(56, count=5)
    files = [photographs.next() for _ in range(12)]
    assert len(set(files)) == 12
    assert len({decode(file).tobytes() for file in files}) == 5
    assert {decode(file).shape for file in files} == {(56, 56, 3)}


def test_pictures_are_photographs_and_not_noise() -> None:
    [file] = Photographs(224, count=1).files
    pixels = decode(file).astype(float)
    assert pixels.std() > 3 * np.abs(np.diff(pixels, axis=1)).mean(), "neighbours are alike in a photograph"


def test_equal_seeds_give_equal_files() -> None:
    assert Photographs(56, count=3).files == Photographs(56, count=3).files
    assert Photographs(56, count=3, seed=1).files != Photographs(56, count=3).files


def test_padding_changes_the_size_and_not_the_picture() -> None:
    file = Photographs(56, count=1).next()
    large = padded(file, 5_000_000)
    assert 5_000_000 <= len(large) < 5_000_000 + 0x10000
    assert np.array_equal(decode(large), decode(file))
    assert padded(file, 10) == file
