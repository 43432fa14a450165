"""Still images: from the bytes of a file to upright RGB pixels.

The pixels are those of the reference, ``transformers.image_utils.load_image``: the first frame, decoded by Pillow,
turned as its EXIF orientation says, then ``convert("RGB")`` (alpha is dropped, CMYK and grey are converted, 16-bit RGB
keeps its upper bytes). Grey images of more than 8 bits are refused: the reference clips them to white.
"""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

# Importing a plugin registers its format; those that are not imported here are never tried.
from PIL import (
    AvifImagePlugin,  # noqa: F401
    BmpImagePlugin,  # noqa: F401
    ExifTags,
    GifImagePlugin,  # noqa: F401
    Image,
    ImageOps,
    JpegImagePlugin,  # noqa: F401
    PngImagePlugin,  # noqa: F401
    TiffImagePlugin,  # noqa: F401
    WebPImagePlugin,  # noqa: F401
    features,
)

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.jpeg import decode_jpeg
from encoder_svc.media.truncation import ends_early

try:
    from pillow_heif import register_heif_opener
except ImportError:  # an optional dependency
    _HEIC = False
else:
    register_heif_opener(thumbnails=False)
    _HEIC = True

# Formats by what their files begin with. Nothing else is opened: Pillow knows some 40 more, few of them hardened, one
# (EPS) starting another program.
_SIGNATURES: tuple[tuple[str, int, bytes], ...] = (
    ("JPEG", 0, b"\xff\xd8\xff"),
    ("PNG", 0, b"\x89PNG\r\n\x1a\n"),
    ("GIF", 0, b"GIF87a"),
    ("GIF", 0, b"GIF89a"),
    ("WEBP", 8, b"WEBP"),
    ("BMP", 0, b"BM"),
    ("TIFF", 0, b"II*\x00"),
    ("TIFF", 0, b"MM\x00*"),
    ("TIFF", 0, b"II+\x00"),
    ("TIFF", 0, b"MM\x00+"),
)
_AVIF = bool(features.check("avif"))
_HEIC_BRANDS = (b"heic", b"heix", b"heim", b"heis")
_KNOWN = ", ".join(
    ["JPEG", "PNG", "WEBP", "GIF", "BMP", *(["AVIF"] if _AVIF else []), *(["HEIC"] if _HEIC else []), "or TIFF"]
)

# Modes whose conversion to RGB clips what does not fit into 8 bits.
_DEEP_GREY_MODES = frozenset({"I", "F", "I;16", "I;16B", "I;16L", "I;16N"})

# Orientations that exchange width and height (EXIF 2.32, tag 274).
_TURNED = frozenset({5, 6, 7, 8})

# How an image is made upright, by its orientation.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

# What Pillow's decoders raise on damaged files.
_DAMAGE = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    EOFError,
    ArithmeticError,
    RuntimeError,  # the AVIF plugin
    struct.error,
    zlib.error,
)

# Pillow's own limit on pixels is fixed and warns first; ours is a setting, checked before anything is decoded.
Image.MAX_IMAGE_PIXELS = None


class ImageProbe:
    """An image whose header was read.

    Args:
        data: the file.
        max_pixels: pixels that are allowed.

    Raises:
        ServiceError: the bytes are no image of a known format, or a damaged one, or one with too many pixels.

    Example:
        >>> probe = ImageProbe(Path("cat.jpg").read_bytes(), max_pixels=64_000_000)
        >>> probe.decode().shape == (probe.height, probe.width, 3)
        True
    """

    def __init__(self, data: bytes, max_pixels: int) -> None:
        self._data = data
        self._format = _recognize(data)
        with self._damage_told("header"):
            self._image = Image.open(io.BytesIO(data), formats=(self._format,))
            width, height = self._image.size
            if width * height > max_pixels:
                raise ServiceError(
                    Reason.MEDIA_TOO_LARGE,
                    f"the image has {width}×{height} = {width * height} pixels and the server takes {max_pixels}; "
                    "make it smaller",
                )
            if self._image.mode in _DEEP_GREY_MODES:
                raise ServiceError(
                    Reason.MEDIA_UNSUPPORTED,
                    "the image is grey with more than 8 bits a pixel, which the model cannot see; save it with 8 bits",
                )
            turned = self._orientation() in _TURNED
        self._width, self._height = (height, width) if turned else (width, height)

    @property
    def width(self) -> int:
        """The upright width in pixels."""
        return self._width

    @property
    def height(self) -> int:
        """The upright height in pixels."""
        return self._height

    def decode(self) -> torch.Tensor:
        """Decodes the first frame.

        Returns:
            uint8, shape (height, width, 3), RGB, upright.

        Raises:
            ServiceError: the file is truncated or corrupt.
        """
        with self._damage_told("pixels"):
            pixels = self._decode_jpeg() if self._format == "JPEG" else None
            if pixels is None:
                pixels = np.array(ImageOps.exif_transpose(self._image).convert("RGB"))
        if pixels.shape != (self._height, self._width, 3):
            raise ServiceError(
                Reason.MEDIA_CORRUPT, "the image's pixels are not of the size that its header says; save it again"
            )
        return torch.from_numpy(pixels)

    def _decode_jpeg(self) -> npt.NDArray[np.uint8] | None:
        """The upright pixels, if they can be had without Pillow's decoder."""
        pixels = decode_jpeg(self._data, self._image.mode)
        if pixels is None or pixels.shape[1::-1] != self._image.size:
            return None
        turn = _TURNS.get(self._orientation())
        return pixels if turn is None else np.array(Image.fromarray(pixels).transpose(turn))

    def _orientation(self) -> int:
        """The EXIF orientation that is still to be applied to the size of the header."""
        if self._format == "TIFF":
            # TiffImageFile turns itself, its size already now.
            return 1
        if self._format == "PNG" and not _has_late_metadata(self._data):
            # PngImageFile.getexif decodes the whole image, in search of metadata behind the pixels.
            exif = Image.Image.getexif(self._image)
        else:
            exif = self._image.getexif()
        orientation = exif.get(ExifTags.Base.Orientation, 1)
        return orientation if isinstance(orientation, int) else 1

    @contextmanager
    def _damage_told(self, place: str) -> Iterator[None]:
        """Turns what Pillow raises into the error for the caller."""
        try:
            with warnings.catch_warnings():
                # Odd but readable files (a palette with partial transparency, say) are no news for a server's log.
                warnings.simplefilter("ignore")
                yield
        except _DAMAGE as error:
            if ends_early(self._format, self._data):
                raise ServiceError(
                    Reason.MEDIA_TRUNCATED, f"the {self._format} file ends too early; send the whole file"
                ) from error
            raise ServiceError(
                Reason.MEDIA_CORRUPT, f"the {place} of the {self._format} file cannot be decoded; save the image again"
            ) from error


def _recognize(data: bytes) -> str:
    for name, offset, signature in _SIGNATURES:
        if data[offset : offset + len(signature)] == signature:
            return name
    if data[4:8] == b"ftyp":
        brands = data[8 : struct.unpack_from(">I", data)[0]]
        if _AVIF and (b"avif" in brands or b"avis" in brands):
            return "AVIF"
        if _HEIC and any(brand in brands for brand in _HEIC_BRANDS):
            return "HEIF"
    raise ServiceError(Reason.MEDIA_UNRECOGNIZED, f"the bytes are no image that the server knows; send {_KNOWN}")


def _has_late_metadata(png: bytes) -> bool:
    """Behind the pixels is a chunk that can hold an orientation."""
    position, pixels_seen = 8, False
    while position + 8 <= len(png):
        length, kind = struct.unpack_from(">I4s", png, position)
        if kind == b"IDAT":
            pixels_seen = True
        elif pixels_seen and kind in (b"eXIf", b"iTXt", b"tEXt", b"zTXt"):
            return True
        position += 12 + length
    return False
