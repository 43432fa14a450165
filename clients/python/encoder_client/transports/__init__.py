"""How the bytes of a slot are read. Each transport is one module with one ``read``."""

from __future__ import annotations

from typing import Protocol

from encoder_client.pool import Slot
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, LeaseGrant, Locator


class TransportError(Exception):
    """A transport did not deliver. The message is for the log; another transport may do better."""


class TransferStuckError(TransportError):
    """A transfer takes too long and cannot be stopped: it may still write to its slot, which nobody else may use."""


class Reader(Protocol):
    """A transport."""

    @property
    def name(self) -> str:
        """Its name, that of its locator in the contract: ``inline``, ``mooncake``, ..."""
        ...

    async def read(
        self, chunk: EmbeddingChunk, locator: Locator, lease: LeaseGrant, slot: Slot, timeout: float
    ) -> None:
        """Reads ``chunk.nbytes`` bytes into ``slot``.

        Args:
            chunk: a checked READY chunk.
            locator: the one of its locators that is this transport's.
            lease: the right to read.
            slot: at least ``chunk.nbytes`` bytes. It is not written after this has returned or raised
                anything but :class:`TransferStuckError`.
            timeout: seconds that the read may take.

        Raises:
            TransportError: the bytes did not come, or not as many.
            TransferStuckError: they may still come.
        """
        ...

    def close(self) -> None:
        """Lets go of what the transport holds. No read may begin after it."""
        ...
