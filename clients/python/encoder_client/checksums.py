"""The checksums that a chunk can carry."""

from __future__ import annotations

from collections.abc import Callable

import xxhash

from encoder_client.errors import ChunkError
from epd.encoder.v1.embedding_pb2 import (
    CHECKSUM_ALGORITHM_CRC32C,
    CHECKSUM_ALGORITHM_UNSPECIFIED,
    CHECKSUM_ALGORITHM_XXH3_64,
    Checksum,
)


class RunningChecksum:
    """Compares a payload with its checksum, as far as it can while the payload comes.

    What has just come is in the processor's cache, where it is summed two to three times as fast as from memory.

    XXH3-64 with seed 0 always works; CRC-32C needs the package ``crc32c``.

    Args:
        expected: of the whole payload. Without an algorithm everything matches.

    Raises:
        ChunkError: this process cannot compute the algorithm, so the bytes could not be trusted.
    """

    def __init__(self, expected: Checksum) -> None:
        self._value = expected.value
        self._sums: _Xxh3 | _Crc32c | None
        match expected.algorithm:
            case algorithm if algorithm == CHECKSUM_ALGORITHM_UNSPECIFIED:
                self._sums = None
            case algorithm if algorithm == CHECKSUM_ALGORITHM_XXH3_64:
                self._sums = _Xxh3()
            case algorithm if algorithm == CHECKSUM_ALGORITHM_CRC32C:
                self._sums = _Crc32c()
            case algorithm:
                raise ChunkError(
                    "checksum", f"algorithm {int(algorithm)} is unknown to this client; update encoder-client"
                )
        self._summed = 0

    def take(self, piece: memoryview, offset: int) -> None:
        """A piece has come. It is summed now if all before it has been.

        Args:
            piece: its bytes, shape (length,).
            offset: where it begins in the payload.
        """
        if self._sums is not None and offset == self._summed:
            self._summed += len(piece)
            self._sums.update(piece)

    def matches(self, payload: memoryview) -> bool:
        """The payload, all of which has come, is the one that was summed by the encoder."""
        if self._sums is None:
            return True
        self.take(payload[self._summed :], self._summed)
        return self._sums.value() == self._value


class _Xxh3:
    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()
        self.update = self._state.update
        self.value = self._state.intdigest


class _Crc32c:
    def __init__(self) -> None:
        try:
            import crc32c
        except ImportError:
            raise ChunkError("checksum", "it is a CRC-32C; install the package crc32c to read such chunks") from None
        self._function: Callable[[memoryview, int], int] = crc32c.crc32c
        self._value = 0

    def update(self, piece: memoryview) -> None:
        self._value = self._function(piece, self._value)

    def value(self) -> int:
        return self._value


UNCHECKED = RunningChecksum(Checksum())
"""For what needs no checksum; has no state, so all such reads share it."""
