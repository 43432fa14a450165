"""The leases of one receiver: renewed, and given back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import grpc

from encoder_client import chunk_checks
from encoder_client.cancellation import answer
from encoder_client.connections import Connections
from encoder_client.durations import duration
from encoder_client.errors import EncoderError, ReadError, from_rpc_error
from epd.encoder.v1 import encoder_service_pb2 as service
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2 import LeaseState, ReadOutcome


class Leases:
    """Asks the encoders that granted them.

    Args:
        connections: to the encoders.
        receiver: whose leases they are.
        timeout: seconds that a renewal may take.
    """

    def __init__(self, connections: Connections, receiver: str, timeout: float) -> None:
        self._connections = connections
        self._receiver = receiver
        self._timeout = timeout

    async def renew(self, chunks: Sequence[EmbeddingChunk], ttl: float | None = None) -> list[float]:
        """See :meth:`EncoderClient.renew`."""
        if not chunks:
            return []
        leases = [chunk_checks.lease_of(chunk, self._receiver).lease_id for chunk in chunks]
        request = service.RenewRequest(lease_ids=leases, ttl=duration(ttl))
        try:
            stub = self._connections.stub_of(chunks[0].encoder)
            response = await answer(stub.renew(request, timeout=self._timeout))
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None
        if len(response.leases) != len(chunks):
            raise EncoderError(
                grpc.StatusCode.INTERNAL, f"{len(chunks)} leases were renewed and {len(response.leases)} answers came"
            )
        for chunk, status in zip(chunks, response.leases, strict=True):
            if status.state != LeaseState.LEASE_STATE_HELD:
                state = LeaseState.Name(status.state).removeprefix("LEASE_STATE_")
                raise ReadError(f"the lease of part {chunk.part_idx} cannot be renewed: it is {state}")
        return [status.ttl.ToNanoseconds() / 1e9 for status in response.leases]

    async def renew_one(self, chunk: EmbeddingChunk) -> float:
        """Renews one, by the server's default. Returns the seconds that it lives from now."""
        [seconds] = await self.renew([chunk])
        return seconds

    async def release(self, chunk: EmbeddingChunk) -> None:
        """Gives back the lease of an embedding that was used. If that fails, it runs out by itself."""
        lease = chunk_checks.lease_of(chunk, self._receiver)
        with suppress(EncoderError):
            await self._connections.releases_of(chunk.encoder).confirm(lease.lease_id, ReadOutcome.READ_OUTCOME_OK)

    async def abandon(self, chunks: Sequence[EmbeddingChunk]) -> None:
        """See :meth:`EncoderClient.abandon`."""
        waits = [
            self._connections.releases_of(chunk.encoder).give_back(lease.lease_id, ReadOutcome.READ_OUTCOME_ABANDONED)
            for chunk in chunks
            for lease in chunk.leases
            if lease.receiver_id == self._receiver
        ]
        await asyncio.gather(*waits, return_exceptions=True)
