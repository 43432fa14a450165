"""One read: choose a transport, read, check, release."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from time import monotonic

from encoder_client import chunk_checks
from encoder_client.checksums import checksum_function
from encoder_client.embedding import Embedding
from encoder_client.errors import EncoderError, ReadError
from encoder_client.pool import Slot
from encoder_client.releases import ReleaseBatcher
from encoder_client.transports import Reader, TransferStuckError, TransportError
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, LeaseGrant, Locator
from epd.encoder.v1.encoder_service_pb2 import LeaseState, ReadOutcome

logger = logging.getLogger("encoder_client")

_GOOD = (LeaseState.LEASE_STATE_HELD, LeaseState.LEASE_STATE_ALREADY_RELEASED)


class ChunkReader:
    """Reads chunks of one server.

    Args:
        readers: the transports that may be used, by name, the preferred first.
        receiver: whose leases are used.
        expected_fingerprint: 32 bytes, or empty for any.
        releases: where leases of the server are given back.
    """

    def __init__(
        self, readers: Mapping[str, Reader], receiver: str, expected_fingerprint: bytes, releases: ReleaseBatcher
    ) -> None:
        self._readers = readers
        self._receiver = receiver
        self._expected_fingerprint = expected_fingerprint
        self._releases = releases

    async def read(self, chunk: EmbeddingChunk, slot: Slot, timeout: float) -> Embedding:
        """Reads one embedding and gives its lease back, however the read ends.

        A transport that fails is followed by the next. Bytes that are damaged are read once more, by the next transport
        if there is one; the encoder is told in either case, so that it checks its own copy.

        Args:
            chunk: READY.
            slot: its memory, ``chunk.nbytes`` bytes.
            timeout: seconds that each transport may take.

        Raises:
            ChunkError: the chunk must not be used.
            ReadError: the bytes could not be had, were damaged, or the lease had ended.
        """
        chunk_checks.check_ready(chunk)
        lease = chunk_checks.lease_of(chunk, self._receiver)
        outcome = ReadOutcome.READ_OUTCOME_ABANDONED
        begun = monotonic()
        try:
            chunk_checks.check_fingerprint(chunk, self._expected_fingerprint)
            transport, slot, outcome = await self._read_and_check(chunk, lease, slot, timeout)
        except BaseException:
            await asyncio.shield(self._give_back(lease, outcome))
            raise
        seconds = monotonic() - begun
        if transport is None:
            await self._give_back(lease, outcome)
            if outcome == ReadOutcome.READ_OUTCOME_CORRUPT:
                raise ReadError(f"the bytes of part {chunk.part_idx} do not have its checksum")
            raise ReadError(f"no transport delivered part {chunk.part_idx}; the log says why each failed")
        await self._confirm(chunk, lease, outcome)
        return Embedding(chunk, slot, transport, seconds)

    async def _read_and_check(
        self, chunk: EmbeddingChunk, lease: LeaseGrant, slot: Slot, timeout: float
    ) -> tuple[str | None, Slot, ReadOutcome]:
        """Tries the transports. Returns the one that delivered good bytes, where, and what to tell the encoder."""
        locators = {locator.WhichOneof("location"): locator for locator in chunk.locators}
        usable = [(reader, locators[name]) for name, reader in self._readers.items() if name in locators]
        if not usable:
            offered = ", ".join(sorted(str(name) for name in locators))
            raise ReadError(f"part {chunk.part_idx} can be read by {offered} only, which this client cannot")
        checksum = checksum_function(chunk.checksum.algorithm)
        tries: list[tuple[Reader, Locator]] = usable if len(usable) > 1 else usable * 2
        corrupt = 0
        for reader, locator in tries:
            try:
                await reader.read(chunk, locator, lease, slot, timeout)
            except TransportError as error:
                if isinstance(error, TransferStuckError):
                    slot = Slot.outside(chunk.nbytes)
                # The text, not the error: its traceback would keep the slot for as long as the log record lives.
                logger.warning("%s did not deliver part %d: %s", reader.name, chunk.part_idx, str(error))
                continue
            if checksum is None or checksum(slot.view[: chunk.nbytes]) == chunk.checksum.value:
                outcome = ReadOutcome.READ_OUTCOME_CORRUPT if corrupt else ReadOutcome.READ_OUTCOME_OK
                return reader.name, slot, outcome
            logger.warning("the bytes of part %d that %s delivered are damaged", chunk.part_idx, reader.name)
            corrupt += 1
            if corrupt == 2:
                break
        return None, slot, ReadOutcome.READ_OUTCOME_CORRUPT if corrupt else ReadOutcome.READ_OUTCOME_TRANSPORT_FAILED

    async def _confirm(self, chunk: EmbeddingChunk, lease: LeaseGrant, outcome: ReadOutcome) -> None:
        """Releases the lease: only the answer tells that nobody reused the memory during the read."""
        try:
            state = await self._releases.release(lease.lease_id, outcome)
        except EncoderError as error:
            raise ReadError(f"the encoder did not confirm the read of part {chunk.part_idx}: {error}") from None
        if state not in _GOOD:
            name = LeaseState.Name(state).removeprefix("LEASE_STATE_")
            raise ReadError(f"the lease of part {chunk.part_idx} ended before the read did ({name}); ask for it again")

    async def _give_back(self, lease: LeaseGrant, outcome: ReadOutcome) -> None:
        try:
            await self._releases.release(lease.lease_id, outcome)
        except EncoderError as error:
            logger.info("a lease could not be given back, it will run out by itself: %s", error)
