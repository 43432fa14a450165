"""HEIC through pillow-heif: the same checks as for every other image."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image
from skimage import data

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.image import ImageProbe

pillow_heif = pytest.importorskip("pillow_heif", reason="the extra heic is not installed")
PHOTOGRAPH = Image.fromarray(data.astronaut()).resize((120, 80))
MAX_PIXELS = 1_000_000


def saved(image: Image.Image, orientation: int = 1) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    pillow_heif.from_pillow(image).save(file, quality=95, exif=exif.tobytes())
    return file.getvalue()


def test_the_picture_is_the_one_that_was_saved() -> None:
    probe = ImageProbe(saved(PHOTOGRAPH), MAX_PIXELS)
    assert (probe.width, probe.height) == PHOTOGRAPH.size
    difference = np.abs(probe.decode().numpy().astype(int) - np.asarray(PHOTOGRAPH, dtype=int))
    assert difference.mean() < 3, "HEVC loses a little"


def test_it_is_upright() -> None:
    probe = ImageProbe(saved(PHOTOGRAPH, orientation=6), MAX_PIXELS)
    upright = np.asarray(PHOTOGRAPH.transpose(Image.Transpose.ROTATE_270), dtype=int)
    pixels = probe.decode().numpy().astype(int)
    assert pixels.shape == upright.shape
    assert (probe.height, probe.width) == upright.shape[:2]
    assert np.abs(pixels - upright).mean() < 3


def test_f20_one_with_too_many_pixels_is_refused_before_it_is_decoded() -> None:
    with pytest.raises(ServiceError) as caught:
        ImageProbe(saved(PHOTOGRAPH), 120 * 80 - 1)
    assert caught.value.reason is Reason.MEDIA_TOO_LARGE


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_one_that_is_cut_is_refused(share: float) -> None:
    whole = saved(PHOTOGRAPH)
    with pytest.raises(ServiceError) as caught:
        ImageProbe(whole[: int(share * len(whole))], MAX_PIXELS).decode()
    assert caught.value.reason in {Reason.MEDIA_CORRUPT, Reason.MEDIA_TRUNCATED}
