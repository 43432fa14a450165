"""The 64 bytes before every payload in an arena. Readers of shared memory check them; docs/contract.md publishes them.

All numbers are little-endian::

    offset  size  field
         0     8  magic, ASCII "EPDSLOT1"
         8     8  generation, 0 while the slot may not be read
        16     8  nbytes, the payload's length
        24     8  checksum, XXH3-64 of the payload
        32    16  slot key
        48    16  zero
"""

from __future__ import annotations

import struct
from hmac import compare_digest

SIZE = 64
_LAYOUT = struct.Struct("<8sQQQ16s16x")
_GENERATION = struct.Struct("<Q")
_GENERATION_OFFSET = 8
_MAGIC = b"EPDSLOT1"
assert _LAYOUT.size == SIZE


def open_slot(arena: memoryview, offset: int, generation: int, nbytes: int, checksum: int, key: bytes) -> None:
    """Marks the slot at ``offset`` as readable. The generation is written last: a reader sees all of it or none."""
    _LAYOUT.pack_into(arena, offset, _MAGIC, 0, nbytes, checksum, key)
    _GENERATION.pack_into(arena, offset + _GENERATION_OFFSET, generation)


def close_slot(arena: memoryview, offset: int) -> None:
    """Marks the slot at ``offset`` as not readable, before its payload may change."""
    _GENERATION.pack_into(arena, offset + _GENERATION_OFFSET, 0)


def read_generation(arena: memoryview, offset: int) -> int:
    """The generation word of the slot at ``offset``."""
    generation: int = _GENERATION.unpack_from(arena, offset + _GENERATION_OFFSET)[0]
    return generation


def is_open(arena: memoryview, offset: int, generation: int, nbytes: int, key: bytes) -> bool:
    """The slot at ``offset`` is the named one, may be read, and lies inside the arena.

    Args:
        arena: all of it.
        offset: of the header, in bytes.
        generation: of the slot, not 0.
        nbytes: of the payload.
        key: of the slot, 16 bytes.
    """
    if not generation or offset % SIZE or offset + SIZE + nbytes > len(arena):
        return False
    magic, held, length, _, secret = _LAYOUT.unpack_from(arena, offset)
    same = (magic, held, length) == (_MAGIC, generation, nbytes)
    return same and compare_digest(secret, key)
