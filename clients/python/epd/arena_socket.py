"""What the unix socket of a ``SharedMemoryLocator`` sends to whoever connects; docs/contract.md publishes it.

32 bytes, and with them (``SCM_RIGHTS``) one descriptor of the arena, open for reading only. All numbers are
little-endian::

    offset  size  field
         0     8  magic, ASCII "EPDARENA"
         8    16  the engine's boot id, as bytes
        24     8  the size of the arena in bytes

Then nothing: the connection stays open for as long as the arena is served, and its end is the arena's.
"""

from __future__ import annotations

import struct

_LAYOUT = struct.Struct("<8s16sQ")
_MAGIC = b"EPDARENA"
SIZE = _LAYOUT.size
assert SIZE == 32


def write(boot_id: str, nbytes: int) -> bytes:
    """The message of an engine.

    Args:
        boot_id: 32 hex digits.
        nbytes: the size of its arena.
    """
    return _LAYOUT.pack(_MAGIC, bytes.fromhex(boot_id), nbytes)


def parse(message: bytes) -> tuple[str, int]:
    """The boot id and the size that a message tells.

    Raises:
        ValueError: it is no such message.
    """
    if len(message) != SIZE or not message.startswith(_MAGIC):
        raise ValueError("no arena is served there")
    _, boot_id, nbytes = _LAYOUT.unpack(message)
    return boot_id.hex(), nbytes
