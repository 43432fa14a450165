"""Pictures as JPEG files, each different from all others."""

from __future__ import annotations

import io
import itertools
import struct

import numpy as np
from PIL import Image

_DRAWN = 16
"""Different pictures; files go round them."""
_CELL = 16
"""Pixels of a side of the patches of colour that a picture is made of."""
_NOISE = 6
"""Grey levels. It makes files about as large as a camera's."""
_QUALITY = 90
_COMMENT = b"\xff\xfe"


class Pictures:
    """Square pictures of smooth colours with noise.

    Args:
        side: width and height in pixels.
        seed: sets of different seeds have no picture in common.
    """

    def __init__(self, side: int, seed: int = 0) -> None:
        self._files = [_draw(side, np.random.default_rng((seed, side, number))) for number in range(_DRAWN)]
        self._numbers = itertools.count()

    def next(self) -> bytes:
        """A file that was never given before: a number in a comment segment (ITU-T T.81, B.2.4.5) sets it apart.

        vLLM and the encoders both name an image by its file's bytes, so such a file is new to all of them.
        """
        number = next(self._numbers)
        file = self._files[number % _DRAWN]
        payload = b"%d" % number
        return file[:2] + _COMMENT + struct.pack(">H", len(payload) + 2) + payload + file[2:]


def _draw(side: int, generator: np.random.Generator) -> bytes:
    coarse = generator.integers(0, 256, (side // _CELL + 1, side // _CELL + 1, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(coarse).resize((side, side), Image.Resampling.BICUBIC), np.int16)
    noise = generator.integers(-_NOISE, _NOISE, smooth.shape, dtype=np.int16, endpoint=True)
    file = io.BytesIO()
    Image.fromarray((smooth + noise).clip(0, 255).astype(np.uint8)).save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()
