"""Photographs for tests, as files."""

from __future__ import annotations

import io

from PIL import Image
from skimage import data


def photo(width: int = 256, height: int = 192, *, quality: int = 90) -> bytes:
    """A real photograph as a JPEG file of the given size in pixels."""
    whole = Image.fromarray(data.astronaut())
    image = whole.resize((width, height), Image.Resampling.BICUBIC)
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()
