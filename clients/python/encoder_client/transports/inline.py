"""In band, by the ``Fetch`` call: works wherever gRPC does."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from encoder_client.cancellation import take_all
from encoder_client.checksums import RunningChecksum
from encoder_client.errors import from_rpc_error
from encoder_client.pool.embedding_pool import Slot
from encoder_client.stub import EncoderStub
from encoder_client.transports import TransportError
from epd.encoder.v1 import encoder_service_pb2 as service
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, EncoderRef, LeaseGrant, Locator
from epd.fetch_pieces import parse_piece

_KEPT_BYTES = 16 << 20
"""Blocks up to here stay with malloc when they are freed: far above the pieces that gRPC copies a few times over."""


class InlineReader:
    """Reads by ``Fetch``.

    Args:
        stub_of: gives the stub of the server that holds an embedding.
    """

    name = "inline"
    needs_checksum = True

    def __init__(self, stub_of: Callable[[EncoderRef], EncoderStub]) -> None:
        self._stub_of = stub_of
        self._has_read = False

    def reaches(self, locator: Locator) -> bool:
        """See :class:`~encoder_client.transports.Reader`."""
        return True

    async def read(
        self,
        chunk: EmbeddingChunk,
        locator: Locator,
        lease: LeaseGrant,
        slot: Slot,
        checksum: RunningChecksum,
        timeout: float,
    ) -> None:
        """See :class:`~encoder_client.transports.Reader`."""
        if not self._has_read:
            self._has_read = True
            _keep_pieces()
        target, position = slot.view, 0

        def take(piece: bytes) -> None:
            nonlocal position
            data = parse_piece(piece)
            end = position + len(data)
            if end > chunk.nbytes:
                raise TransportError(f"more than {chunk.nbytes} bytes came")
            # Before the copy: what gRPC has just put together is in the processor's cache.
            checksum.take(data, position)
            target[position:end] = data
            position = end

        try:
            await take_all(
                self._stub_of(chunk.encoder).fetch(service.FetchRequest(lease_id=lease.lease_id), timeout=timeout), take
            )
        except ValueError as error:
            raise TransportError(str(error)) from None
        except grpc.aio.AioRpcError as error:
            raise TransportError(str(from_rpc_error(error))) from None
        if position != chunk.nbytes:
            raise TransportError(f"{position} of {chunk.nbytes} bytes came")

    def close(self) -> None:
        """See :class:`~encoder_client.transports.Reader`. Channels are not this object's."""


def _keep_pieces() -> None:
    """Has malloc use the memory of pieces again. To fault each in anew takes a third of the time of a read.

    glibc does so once the process has freed something larger that was mapped for itself, as most have
    (M_MMAP_THRESHOLD, https://man7.org/linux/man-pages/man3/mallopt.3.html). These bytes are never touched, and cost
    no memory.
    """
    bytes(_KEPT_BYTES)
