"""Whether a file ends before its own structure does: an image, a video, or a container of sound.

It tells a caller whose upload was cut from one whose file is damaged.
"""

from __future__ import annotations

import struct


def ends_early(file_format: str, data: bytes) -> bool:
    """The file is a beginning of a longer one.

    Args:
        file_format: JPEG, PNG, GIF, WEBP, BMP, TIFF, AVIF, HEIF, AVI, MP4 or Matroska.
        data: the file.
    """
    match file_format:
        case "JPEG":
            return not data.rstrip(b"\0\n\r ").endswith(b"\xff\xd9")  # EOI
        case "PNG":
            return not _has_png_end(data)
        case "GIF":
            return not data.rstrip(b"\0\n\r ").endswith(b";")  # trailer
        case "WEBP" | "AVI":
            return len(data) < 12 or struct.unpack_from("<I", data, 4)[0] + 8 > len(data)  # RIFF size
        case "BMP":
            return len(data) < 26 or struct.unpack_from("<I", data, 2)[0] > len(data)  # bfSize
        case "TIFF":
            return _ends_before_directory(data)
        case "AVIF" | "HEIF" | "MP4":
            return _ends_inside_box(data)
        case "Matroska":
            return ends_inside_segment(data)
    return False


def ends_inside_segment(data: bytes) -> bool:
    """An element of the top level of Matroska is not whole (RFC 8794, sections 4 to 6).

    What was recorded live may be of unknown size, and then does not tell.
    """
    position = 0
    while position + 4 < len(data):
        position += _number_width(data[position])  # its id
        if position >= len(data):
            return True
        width = _number_width(data[position])
        unknown = (1 << 7 * width) - 1
        size = int.from_bytes(data[position : position + width], "big") & unknown
        if size == unknown:
            return False
        position += width + size
    return position > len(data)


def _number_width(first: int) -> int:
    """Bytes of a number of variable size, by its first byte."""
    return 9 - first.bit_length() if first else 8


def _has_png_end(data: bytes) -> bool:
    position = 8
    while position + 12 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, position)
        if kind == b"IEND":
            return True
        position += 12 + length
    return False


def _ends_before_directory(data: bytes) -> bool:
    order = "<" if data[:2] == b"II" else ">"
    if len(data) < 16:
        return True
    big = struct.unpack_from(order + "H", data, 2)[0] == 43
    position = struct.unpack_from(order + ("Q" if big else "I"), data, 8 if big else 4)[0]
    count_format, entry_bytes = ("Q", 20) if big else ("H", 12)
    count_bytes = struct.calcsize(count_format)
    if position + count_bytes > len(data):
        return True
    entries = struct.unpack_from(order + count_format, data, position)[0]
    next_directory_bytes = 8 if big else 4
    return bool(position + count_bytes + entries * entry_bytes + next_directory_bytes > len(data))


def _ends_inside_box(data: bytes) -> bool:
    position = 0
    while position < len(data):
        if position + 16 > len(data):
            return True
        size = struct.unpack_from(">I", data, position)[0]
        if size == 0:  # up to the end of the file, however long it is
            return False
        if size == 1:
            size = struct.unpack_from(">Q", data, position + 8)[0]
        if size < 8:
            return False
        position += size
    return position > len(data)
