"""One read: choose a transport, read, check, release."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from math import inf
from time import monotonic

from encoder_client import chunk_checks
from encoder_client.checksums import UNCHECKED, RunningChecksum
from encoder_client.embedding import Embedding
from encoder_client.errors import EncoderError, ReadError
from encoder_client.pool.embedding_pool import Slot
from encoder_client.releases import Releases
from encoder_client.transport_choice import TransportChoice
from encoder_client.transports import SlotClosedError, TransferStuckError, TransportError
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, LeaseGrant
from epd.encoder.v1.encoder_service_pb2 import LeaseState, ReadOutcome

logger = logging.getLogger("encoder_client")

SHORTEST_CONFIRMATION_SECONDS = 1.0
"""That the encoder has to confirm a read, also if the deadline is near: one that is well answers in milliseconds, and
little could be done elsewhere in less."""

_GOOD = (LeaseState.LEASE_STATE_HELD, LeaseState.LEASE_STATE_ALREADY_RELEASED)


class ChunkReader:
    """Reads chunks of one server.

    Args:
        choice: the client's transports.
        names: of those that may be used, the preferred first.
        receiver: whose leases are used.
        expected_fingerprint: 32 bytes, or empty for any.
        releases: where leases of the server are given back.
    """

    def __init__(
        self,
        choice: TransportChoice,
        names: Sequence[str],
        receiver: str,
        expected_fingerprint: bytes,
        releases: Releases,
    ) -> None:
        self._choice = choice
        self._names = names
        self._receiver = receiver
        self._expected_fingerprint = expected_fingerprint
        self._releases = releases

    async def read(self, chunk: EmbeddingChunk, slot: Slot, timeout: float, deadline: float | None = None) -> Embedding:
        """Reads one embedding and gives its lease back, however the read ends.

        A transport that fails is followed by the next, and avoided at that engine for a while. Bytes that are damaged
        are read once more, by the next transport if there is one; the encoder is told in either case, so that it checks
        its own copy.

        Args:
            chunk: READY.
            slot: its memory, ``chunk.nbytes`` bytes.
            timeout: seconds that all transports may take together. One that is followed by others gets half of what is
                left.
            deadline: until when it could be encoded elsewhere instead, in the time of the event loop. The encoder gets
                half of what is left to confirm the read. None: there is no such time.

        Raises:
            ChunkError: the chunk must not be used.
            ReadError: the bytes could not be had, were damaged, or the lease had ended.
        """
        lease = chunk_checks.lease_of(chunk, self._receiver)
        outcome = ReadOutcome.READ_OUTCOME_ABANDONED
        begun = monotonic()
        try:
            chunk_checks.check_ready(chunk)
            chunk_checks.check_fingerprint(chunk, self._expected_fingerprint)
            transport, slot, outcome = await self._read_and_check(chunk, lease, slot, timeout)
        except BaseException:
            await asyncio.shield(self._releases.give_back(lease.lease_id, outcome))
            raise
        seconds = monotonic() - begun
        if transport is None:
            await self._releases.give_back(lease.lease_id, outcome)
            if outcome == ReadOutcome.READ_OUTCOME_CORRUPT:
                raise ReadError(f"the bytes of part {chunk.part_idx} do not have its checksum")
            raise ReadError(f"no transport delivered part {chunk.part_idx}; the log says why each failed")
        await self._confirm(chunk, lease, outcome, inf if deadline is None else deadline)
        return Embedding(chunk, slot, transport, seconds)

    async def _read_and_check(
        self, chunk: EmbeddingChunk, lease: LeaseGrant, slot: Slot, timeout: float
    ) -> tuple[str | None, Slot, ReadOutcome]:
        """Tries the transports. Returns the one that delivered good bytes, where, and what to tell the encoder."""
        tries = self._choice.order(self._names, chunk, monotonic())
        if not tries:
            offered = ", ".join(sorted(str(locator.WhichOneof("location")) for locator in chunk.locators))
            raise ReadError(f"part {chunk.part_idx} can be read by {offered} only, which this client cannot")
        if len(tries) == 1:
            tries *= 2
        end = monotonic() + timeout
        corrupt = 0
        for number, (reader, locator) in enumerate(tries, start=1):
            left = max(end - monotonic(), 0.0)
            try:
                checksum = RunningChecksum(chunk.checksum) if reader.needs_checksum else UNCHECKED
                await reader.read(chunk, locator, lease, slot, checksum, left if number == len(tries) else left / 2)
            except SlotClosedError:
                raise ReadError(f"the encoder does not hold part {chunk.part_idx} any more; ask for it again") from None
            except TransportError as error:
                if isinstance(error, TransferStuckError):
                    slot = Slot.outside(chunk.nbytes)
                # The text, not the error: its traceback would keep the slot for as long as the log record lives.
                self._note_failure(reader.name, chunk, f"did not deliver part {chunk.part_idx}: {error}")
                continue
            if not reader.needs_checksum or checksum.matches(slot.view[: chunk.nbytes]):
                self._choice.delivered(reader.name, chunk)
                outcome = ReadOutcome.READ_OUTCOME_CORRUPT if corrupt else ReadOutcome.READ_OUTCOME_OK
                return reader.name, slot, outcome
            self._note_failure(reader.name, chunk, f"delivered part {chunk.part_idx} damaged")
            corrupt += 1
            if corrupt == 2:
                break
        return None, slot, ReadOutcome.READ_OUTCOME_CORRUPT if corrupt else ReadOutcome.READ_OUTCOME_TRANSPORT_FAILED

    def _note_failure(self, name: str, chunk: EmbeddingChunk, fault: str) -> None:
        pause = self._choice.failed(name, chunk, monotonic())
        logger.warning("%s %s; others go first for %.0f s", name, fault, pause)

    async def _confirm(self, chunk: EmbeddingChunk, lease: LeaseGrant, outcome: ReadOutcome, deadline: float) -> None:
        """Releases the lease: only the answer tells that nobody reused the memory during the read."""
        left = deadline - asyncio.get_running_loop().time()
        # After the deadline nobody would encode it elsewhere, and an answer that is late is better than none.
        patience = max(left / 2, SHORTEST_CONFIRMATION_SECONDS) if 0 < left < inf else None
        try:
            state = await self._releases.confirm(lease.lease_id, outcome, patience)
        except EncoderError as error:
            raise ReadError(f"the encoder did not confirm the read of part {chunk.part_idx}: {error}") from None
        if state not in _GOOD:
            name = LeaseState.Name(state).removeprefix("LEASE_STATE_")
            raise ReadError(f"the lease of part {chunk.part_idx} ended before the read did ({name}); ask for it again")
