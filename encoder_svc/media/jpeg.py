"""JPEG through libjpeg-turbo's own interface, where simplejpeg is installed: the same pixels as Pillow's, sooner.

Both are libjpeg-turbo with its exact transforms. What it finds odd in a file, however little, is left to Pillow, which
goes on where the reference does.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

try:
    import simplejpeg
except ImportError:  # an optional dependency
    simplejpeg = None

# Modes of Pillow in which both decoders give the same pixels; CMYK is converted by other formulas.
_MODES = frozenset({"RGB", "L"})


def decode_jpeg(data: bytes, mode: str) -> npt.NDArray[np.uint8] | None:
    """Decodes a whole JPEG file.

    Args:
        data: the file.
        mode: what Pillow says of it.

    Returns:
        Shape (height, width, 3), RGB, not turned. None: Pillow has to decode it.
    """
    if simplejpeg is None or mode not in _MODES:
        return None
    try:
        pixels: npt.NDArray[np.uint8] = simplejpeg.decode_jpeg(data, colorspace="RGB", strict=True)
    except ValueError:
        return None
    return pixels
