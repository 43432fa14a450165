"""The checksums that a chunk can carry."""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from encoder_client.errors import ChunkError
from epd.encoder.v1.embedding_pb2 import (
    CHECKSUM_ALGORITHM_CRC32C,
    CHECKSUM_ALGORITHM_UNSPECIFIED,
    CHECKSUM_ALGORITHM_XXH3_64,
    ChecksumAlgorithm,
)


def checksum_function(algorithm: ChecksumAlgorithm) -> Callable[[memoryview], int] | None:
    """The function that computes a checksum over a slot's payload, or None if the chunk has no checksum.

    XXH3-64 with seed 0 always works; CRC-32C needs the package ``crc32c``.

    Raises:
        ChunkError: this process cannot compute the algorithm, so the bytes could not be trusted.
    """
    if algorithm == CHECKSUM_ALGORITHM_UNSPECIFIED:
        return None
    if algorithm == CHECKSUM_ALGORITHM_XXH3_64:
        return xxhash.xxh3_64_intdigest
    if algorithm == CHECKSUM_ALGORITHM_CRC32C:
        try:
            import crc32c
        except ImportError:
            raise ChunkError("checksum", "it is a CRC-32C; install the package crc32c to read such chunks") from None
        function: Callable[[memoryview], int] = crc32c.crc32c
        return function
    raise ChunkError("checksum", f"algorithm {int(algorithm)} is unknown to this client; update encoder-client")
