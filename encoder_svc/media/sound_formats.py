"""The formats of sound files: how they begin, who decodes them, and whether a file is the beginning of a longer one."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.truncation import ends_inside_segment


@dataclass(frozen=True)
class SoundFormat:
    """One format."""

    title: str
    """As people call it."""
    begins: Callable[[bytes], bool]
    """A file whose first 16 bytes, behind any ID3 tag, are these has it."""
    container: str = ""
    """As FFmpeg names it, which decodes it. Empty: libsndfile does."""
    ends_early: Callable[[bytes], bool] = lambda _: False
    """The file itself says that it ought to be longer. Those that cannot tell are found out while decoding."""


def recognize(data: bytes) -> SoundFormat:
    """The format of a file.

    Raises:
        ServiceError: it has none of those that are known.
    """
    start = behind_tag(data)
    head = data[start : start + 16]
    for candidate in FORMATS:
        if candidate.begins(head):
            return candidate
    known = ", ".join(candidate.title for candidate in FORMATS)
    raise ServiceError(Reason.MEDIA_UNRECOGNIZED, f"the bytes are no sound that the server knows; send one of {known}")


def behind_tag(data: bytes) -> int:
    """Where a file begins behind the tag that music programs put before it (ID3v2.4, section 3.1)."""
    if data[:3] != b"ID3" or len(data) < 10:
        return 0
    size = 0
    for byte in data[6:10]:
        size = size << 7 | byte & 0x7F
    return 10 + size


def _riff_ends_early(data: bytes) -> bool:
    """The chunk of samples is longer than what is left.

    A size of 2³²−1 is that of a file over 4 GiB, which an earlier chunk holds (EBU Tech 3306), or was written by a
    program that could not go back.
    """
    order = ">" if data[:4] == b"FORM" else "<"
    position, long_size = 12, 0
    while position + 8 <= len(data):
        name, size = struct.unpack_from(f"{order}4sI", data, position)
        if name == b"ds64" and position + 24 <= len(data):
            (long_size,) = struct.unpack_from("<Q", data, position + 16)
        if name in (b"data", b"SSND", b"movi"):
            return position + 8 + (long_size if size == 0xFFFFFFFF else size) > len(data)
        position += 8 + size + size % 2
    return position > len(data)


def _ogg_ends_early(data: bytes) -> bool:
    """The last page is not whole (RFC 3533, section 6)."""
    page = data.rfind(b"OggS")
    if page + 27 > len(data):
        return True
    segments = data[page + 27 : page + 27 + data[page + 26]]
    return page + 27 + data[page + 26] + sum(segments) > len(data)


def _boxes_end_early(data: bytes) -> bool:
    """A box of the top level is not whole, or the one that tells of tracks is missing (ISO 14496-12, section 4.2)."""
    position, told = 0, False
    while position + 8 <= len(data):
        size, name = struct.unpack_from(">I4s", data, position)
        told |= name == b"moov"
        if size == 0:  # to the end of the file
            return not told
        if size == 1 and position + 16 <= len(data):
            (size,) = struct.unpack_from(">Q", data, position + 8)
        if size < 8:
            return False
        position += size
    return position != len(data) or not told


FORMATS = (
    SoundFormat("WAV", lambda h: h[:4] in (b"RIFF", b"RF64") and h[8:12] == b"WAVE", ends_early=_riff_ends_early),
    SoundFormat("AIFF", lambda h: h[:4] == b"FORM" and h[8:12] in (b"AIFF", b"AIFC"), ends_early=_riff_ends_early),
    SoundFormat("FLAC", lambda h: h[:4] == b"fLaC"),
    SoundFormat("Ogg", lambda h: h[:4] == b"OggS", ends_early=_ogg_ends_early),
    SoundFormat("MP3", lambda h: len(h) > 1 and h[0] == 0xFF and h[1] & 0xE6 == 0xE2),  # MPEG audio, layer III
    SoundFormat("AAC", lambda h: len(h) > 1 and h[0] == 0xFF and h[1] & 0xF6 == 0xF0, "aac"),  # ADTS
    SoundFormat("MP4", lambda h: h[4:8] in (b"ftyp", b"moov"), "mov", _boxes_end_early),
    SoundFormat("Matroska or WebM", lambda h: h[:4] == b"\x1aE\xdf\xa3", "matroska", ends_inside_segment),
    SoundFormat("AVI", lambda h: h[:4] == b"RIFF" and h[8:12] == b"AVI ", "avi", _riff_ends_early),
)
"""The formats that are decoded. Those with sound alone come first."""
