"""The checksum of a slot."""

from __future__ import annotations

import xxhash

from encoder_svc.shared_memory import SharedMemory
from epd.encoder.v1.embedding_pb2 import Checksum, ChecksumAlgorithm


def slot_checksum(arena: SharedMemory, payload_offset: int, nbytes: int) -> Checksum:
    """XXH3-64 of a payload, as its bytes are now.

    Args:
        arena: where the slot is.
        payload_offset: where its payload begins, in bytes.
        nbytes: the bytes of the payload.
    """
    value = xxhash.xxh3_64_intdigest(arena.view[payload_offset : payload_offset + nbytes])
    return Checksum(algorithm=ChecksumAlgorithm.CHECKSUM_ALGORITHM_XXH3_64, value=value)
