"""Photographs as JPEG files, each different from all others."""

from __future__ import annotations

import io
import itertools
import struct
from types import ModuleType

import numpy as np
from PIL import Image

from encoder_svc.errors import SetupError

_NAMES = ("astronaut", "chelsea", "coffee", "rocket")
"""Colour photographs that scikit-image's wheel holds."""
_QUALITY = 90
_NOISE = 6
"""Grey levels. It makes files different, and about as large as a camera's."""
_COMMENT = b"\xff\xfe"
_APPLICATION_DATA = b"\xff\xef"
_MAX_SEGMENT = 0xFFFF - 2
"""Payload bytes of a JPEG segment: its length, which counts itself, has two bytes (ITU-T T.81, B.1.1.4)."""


class Photographs:
    """A set of square photographs with noise of their own, and any number of files of them.

    Args:
        side: width and height in pixels.
        count: how many different pictures there are.
        seed: of the noise.

    Raises:
        SetupError: scikit-image is not installed.
    """

    def __init__(self, side: int, count: int = 64, seed: int = 0) -> None:
        self.side = side
        data = _photographs()
        generator = np.random.default_rng((seed, side))
        self._wholes = [np.asarray(Image.fromarray(getattr(data, name)()).resize((side, side))) for name in _NAMES]
        self.files = [_encode(self._wholes[index % len(self._wholes)], generator) for index in range(count)]
        self._numbers = itertools.count()

    def pictures(self) -> list[np.ndarray]:
        """The photographs without noise: uint8, shape (side, side, 3)."""
        return self._wholes

    def next(self) -> bytes:
        """A file that was never given before: another picture, with a number of its own in a comment segment.

        The comment keeps files different when the pictures come round again: different bytes are different content.
        """
        number = next(self._numbers)
        return with_segment(self.files[number % len(self.files)], _COMMENT, b"%d" % number)


def padded(file: bytes, nbytes: int) -> bytes:
    """A JPEG file made at least as large as asked by segments of application data, which decoders skip."""
    missing = max(0, nbytes - len(file))
    full = _segment(_APPLICATION_DATA, bytes(_MAX_SEGMENT))
    return b"".join((file[:2], full * -(-missing // len(full)), file[2:]))


def with_segment(file: bytes, marker: bytes, payload: bytes) -> bytes:
    """A JPEG file with one more segment, right after its first marker (SOI)."""
    return b"".join((file[:2], _segment(marker, payload), file[2:]))


def _segment(marker: bytes, payload: bytes) -> bytes:
    return b"".join((marker, struct.pack(">H", len(payload) + 2), payload))


def _encode(pixels: np.ndarray, generator: np.random.Generator) -> bytes:
    noise = generator.integers(-_NOISE, _NOISE, pixels.shape, dtype=np.int16, endpoint=True)
    noisy = np.clip(pixels.astype(np.int16) + noise, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noisy).save(file, "JPEG", quality=_QUALITY)
    return file.getvalue()


def _photographs() -> ModuleType:
    try:
        from skimage import data
    except ImportError:
        raise SetupError("photographs come from scikit-image: `pip install 'encoder-svc[bench]'`") from None
    module: ModuleType = data
    return module
