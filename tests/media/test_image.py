"""Still images, compared with what transformers' own loader gives, and what is refused."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin
from transformers.image_utils import load_image

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.image import ImageProbe

MAX_PIXELS = 4_000_000
ORIENTATION = 0x0112


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    channels = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4, "CMYK": 4}[mode]
    values = np.random.default_rng(width * height).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(values.squeeze(-1) if channels == 1 else values, mode=None if channels in (1, 3) else mode)


def saved(image: Image.Image, kind: str, **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def with_orientation(orientation: int, kind: str) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    return saved(noise(33, 20), kind, exif=exif)


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def deep_png(color_type: int, channels: int) -> bytes:
    """A PNG of 16 bits a sample, which Pillow cannot write."""
    values = np.random.default_rng(0).integers(0, 65536, (9, 12, channels)).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in values)
    header = struct.pack(">IIBBBBB", 12, 9, 16, color_type, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + png_chunk(b"IHDR", header)
        + png_chunk(b"IDAT", zlib.compress(rows))
        + png_chunk(b"IEND", b"")
    )


def late_exif_png() -> bytes:
    """A PNG that tells its orientation behind its pixels."""
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    plain = saved(noise(33, 20), "PNG")
    return plain[:-12] + png_chunk(b"eXIf", exif.tobytes()[6:]) + plain[-12:]


def xmp_png() -> bytes:
    """A PNG that tells its orientation in XMP."""
    text = PngImagePlugin.PngInfo()
    text.add_itxt("XML:com.adobe.xmp", '<x:xmpmeta tiff:Orientation="8"/>')
    return saved(noise(33, 20), "PNG", pnginfo=text)


def palette_png() -> bytes:
    """A palette whose entries are transparent to different degrees."""
    image = noise(40, 30).quantize(16)
    return saved(image, "PNG", transparency=bytes(range(0, 256, 16)))


def frames(kind: str) -> bytes:
    return saved(noise(24, 16), kind, save_all=True, append_images=[noise(24, 16).rotate(180)], duration=50)


EQUAL: dict[str, Callable[[], bytes]] = {
    "jpeg": lambda: saved(noise(64, 48), "JPEG"),
    "jpeg progressive": lambda: saved(noise(64, 48), "JPEG", progressive=True),
    "jpeg grey": lambda: saved(noise(31, 17, "L"), "JPEG"),
    "jpeg cmyk": lambda: saved(noise(31, 17, "CMYK"), "JPEG"),
    "jpeg of two pictures": lambda: saved(noise(32, 24), "MPO", save_all=True, append_images=[noise(16, 12)]),
    **{f"jpeg orientation {n}": partial(with_orientation, n, "JPEG") for n in range(1, 9)},
    "jpeg orientation of no meaning": lambda: with_orientation(99, "JPEG"),
    "png": lambda: saved(noise(64, 48), "PNG"),
    "png grey": lambda: saved(noise(64, 48, "L"), "PNG"),
    "png grey alpha": lambda: saved(noise(64, 48, "LA"), "PNG"),
    "png alpha": lambda: saved(noise(64, 48, "RGBA"), "PNG"),
    "png one bit": lambda: saved(noise(64, 48).convert("1"), "PNG"),
    "png palette": lambda: saved(noise(64, 48).quantize(8), "PNG"),
    "png palette with transparency": palette_png,
    "png 16 bits rgb": lambda: deep_png(2, 3),
    "png 16 bits rgba": lambda: deep_png(6, 4),
    "png 16 bits grey alpha": lambda: deep_png(4, 2),
    "png orientation": lambda: with_orientation(6, "PNG"),
    "png orientation behind the pixels": late_exif_png,
    "png orientation in xmp": xmp_png,
    "png 1x1": lambda: saved(noise(1, 1), "PNG"),
    "png 1x2000": lambda: saved(noise(1, 2000), "PNG"),
    "png 2000x1": lambda: saved(noise(2000, 1), "PNG"),
    "png animated": lambda: frames("PNG"),
    "webp": lambda: saved(noise(64, 48), "WEBP"),
    "webp alpha": lambda: saved(noise(64, 48, "RGBA"), "WEBP", lossless=True),
    "webp animated": lambda: frames("WEBP"),
    "webp orientation": lambda: with_orientation(5, "WEBP"),
    "avif orientation": lambda: with_orientation(6, "AVIF"),
    "gif": lambda: saved(noise(64, 48), "GIF"),
    "gif animated": lambda: frames("GIF"),
    "bmp": lambda: saved(noise(64, 48), "BMP"),
    "tiff": lambda: saved(noise(64, 48), "TIFF", compression="tiff_lzw"),
    "tiff cmyk": lambda: saved(noise(64, 48, "CMYK"), "TIFF"),
    **{f"tiff orientation {n}": partial(with_orientation, n, "TIFF") for n in range(1, 9)},
    "avif": lambda: saved(noise(64, 48), "AVIF"),
}


@pytest.mark.filterwarnings("ignore:Palette images with Transparency:UserWarning")  # by the reference
@pytest.mark.parametrize("name", EQUAL)
def test_pixels_equal_the_reference(name: str) -> None:
    data = EQUAL[name]()
    expected = np.asarray(load_image(Image.open(io.BytesIO(data))))
    probe = ImageProbe(data, MAX_PIXELS)
    assert (probe.height, probe.width) == expected.shape[:2]
    np.testing.assert_array_equal(probe.decode().numpy(), expected)


def test_heic_is_an_image_where_its_plugin_is_installed() -> None:
    pytest.importorskip("pillow_heif")
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    for data in (saved(noise(64, 48), "HEIF"), saved(noise(64, 48), "HEIF", exif=exif.tobytes())):
        expected = np.asarray(load_image(Image.open(io.BytesIO(data))))
        probe = ImageProbe(data, MAX_PIXELS)
        assert (probe.height, probe.width) == expected.shape[:2]
        np.testing.assert_array_equal(probe.decode().numpy(), expected)
        assert refusal(data, 64 * 48 - 1).reason is Reason.MEDIA_TOO_LARGE
        assert refusal(data[: len(data) // 2]).reason is Reason.MEDIA_TRUNCATED


def test_heic_is_refused_where_its_plugin_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder_svc.media.image._HEIC", False)
    assert refusal(b"\0\0\0\x1cftypheic\0\0\0\0mif1heicmiaf" + bytes(90)).reason is Reason.MEDIA_UNRECOGNIZED


def test_orientation_turns_the_picture() -> None:
    data = with_orientation(6, "PNG")
    upright = ImageProbe(data, MAX_PIXELS).decode().numpy()
    lying = np.asarray(Image.open(io.BytesIO(data)))
    np.testing.assert_array_equal(upright, np.rot90(lying, -1))


def refusal(data: bytes, max_pixels: int = MAX_PIXELS) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        ImageProbe(data, max_pixels).decode()
    return caught.value


@pytest.mark.parametrize(
    "data", [deep_png(0, 1), saved(Image.new("F", (8, 8)), "TIFF"), saved(Image.new("I", (8, 8)), "TIFF")]
)
def test_deep_grey_is_refused_because_the_reference_clips_it(data: bytes) -> None:
    assert refusal(data).reason is Reason.MEDIA_UNSUPPORTED
    assert "8 bits" in refusal(data).message


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF"])
@pytest.mark.parametrize("kept", [0.03, 0.3, 0.7])
def test_a_cut_file_is_told_from_a_damaged_one(kind: str, kept: float) -> None:
    options = {"compression": "tiff_lzw"} if kind == "TIFF" else {}
    data = saved(noise(64, 48), kind, **options)
    error = refusal(data[: int(len(data) * kept)])
    assert error.reason is Reason.MEDIA_TRUNCATED
    assert error.message == f"the {kind} file ends too early; send the whole file"


@pytest.mark.parametrize("kind", ["PNG", "GIF"])
def test_a_damaged_file_is_refused(kind: str) -> None:
    data = bytearray(saved(noise(64, 48), kind))
    middle = slice(len(data) // 3, len(data) // 3 + 200)
    data[middle] = bytes(value ^ 0x5A for value in data[middle])
    assert refusal(bytes(data)).reason is Reason.MEDIA_CORRUPT


@pytest.mark.parametrize("kind", ["PPM", "EPS", "TGA", "PCX", "ICNS", "JPEG2000", "DDS", "ICO", "SGI"])
def test_other_formats_are_not_even_opened(kind: str) -> None:
    assert refusal(saved(noise(64, 64), kind)).reason is Reason.MEDIA_UNRECOGNIZED


@pytest.mark.parametrize("data", [b"x", b"hello, world" * 9, b"%PDF-1.7\n" * 9, b"\0" * 100, b"RIFF0000WAVEfmt "])
def test_what_is_no_image_is_refused(data: bytes) -> None:
    error = refusal(data)
    assert error.reason is Reason.MEDIA_UNRECOGNIZED
    assert "JPEG" in error.message


@pytest.mark.parametrize("side", [60_000, 2**31 - 1])
def test_f20_a_bomb_is_refused_by_its_header(side: int) -> None:
    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0" * 10_000_000, 9)
    bomb = b"\x89PNG\r\n\x1a\n" + png_chunk(b"IHDR", header) + png_chunk(b"IDAT", pixels) + png_chunk(b"IEND", b"")
    error = refusal(bomb, 64_000_000)
    assert error.reason is Reason.MEDIA_TOO_LARGE
    assert "64000000" in error.message


def test_the_limit_is_on_the_pixel() -> None:
    data = saved(noise(40, 30), "PNG")
    assert ImageProbe(data, 1200).decode().shape == (30, 40, 3)
    assert refusal(data, 1199).reason is Reason.MEDIA_TOO_LARGE


def test_the_header_is_read_without_the_pixels() -> None:
    plain = saved(noise(64, 48), "PNG")
    start = plain.index(b"IDAT") + 4
    probe = ImageProbe(plain[:start] + b"\0" * (len(plain) - start - 12) + plain[-12:], MAX_PIXELS)
    assert (probe.width, probe.height) == (64, 48)
    with pytest.raises(ServiceError):
        probe.decode()


def test_f21_messages_hold_nothing_of_the_library_or_the_file() -> None:
    for data in (saved(noise(64, 48), "JPEG")[:200], b"\x89PNG\r\n\x1a\n" + b"secret" * 20):
        message = refusal(data).message
        assert "PIL" not in message
        assert "0x" not in message
        assert "secret" not in message


SOUND = [saved(noise(24, 16), kind) for kind in ("JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF")]


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_f05_any_damage_ends_in_pixels_or_in_a_refusal(data: st.DataObject) -> None:
    """Whatever is done to a file, nothing but ``ServiceError`` comes out."""
    file = bytearray(data.draw(st.sampled_from(SOUND)))
    del file[data.draw(st.integers(1, len(file))) :]
    for _ in range(data.draw(st.integers(0, 12))):
        file[data.draw(st.integers(0, len(file) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ServiceError):
        probe = ImageProbe(bytes(file), MAX_PIXELS)
        pixels = probe.decode()
        assert pixels.shape == (probe.height, probe.width, 3)
