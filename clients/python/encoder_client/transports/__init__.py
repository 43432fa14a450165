"""How the bytes of a slot are read. Each transport is one module with one ``read``."""

from __future__ import annotations

from typing import Protocol

from encoder_client.checksums import RunningChecksum
from encoder_client.pool.embedding_pool import Slot
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, LeaseGrant, Locator

TRANSPORTS = ("shared_memory", "mooncake", "zeromq", "inline")
"""All, the preferred first."""


class TransportError(Exception):
    """A transport did not deliver. The message is for the log; another transport may do better."""


class SlotClosedError(TransportError):
    """The slot is not what it was: its lease has ended, or its engine. No transport can deliver it any more."""


class TransferStuckError(TransportError):
    """A transfer takes too long and cannot be stopped: it may still write to its slot, which nobody else may use."""


class Reader(Protocol):
    """A transport."""

    @property
    def name(self) -> str:
        """Its name, that of its locator in the contract: ``inline``, ``mooncake``, ..."""
        ...

    @property
    def needs_checksum(self) -> bool:
        """What it delivers must be compared with the chunk's checksum: it came over a network."""
        ...

    def reaches(self, locator: Locator) -> bool:
        """What the locator names can be reached from here, as far as that is known without a try."""
        ...

    async def read(
        self,
        chunk: EmbeddingChunk,
        locator: Locator,
        lease: LeaseGrant,
        slot: Slot,
        checksum: RunningChecksum,
        timeout: float,
    ) -> None:
        """Reads ``chunk.nbytes`` bytes into ``slot``.

        Args:
            chunk: a checked READY chunk.
            locator: the one of its locators that is this transport's.
            lease: the right to read.
            slot: at least ``chunk.nbytes`` bytes. It is not written after this has returned or raised
                anything but :class:`TransferStuckError`.
            checksum: of the payload; it may be given the pieces as they come. Whoever reads looks at it in the end, if
                :attr:`needs_checksum` says so.
            timeout: seconds that the read may take.

        Raises:
            TransportError: the bytes did not come, or not as many.
            TransferStuckError: they may still come.
            SlotClosedError: the encoder's memory is used for something else by now.
        """
        ...

    def close(self) -> None:
        """Lets go of what the transport holds. No read may begin after it."""
        ...
