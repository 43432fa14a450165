"""The references of ``bench transport``: what each transport's library does when nothing is built on it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from time import perf_counter
from typing import Any

import grpc
import numpy as np
import zmq

from encoder_client.pool.embedding_pool import Slot
from encoder_client.transports.mapped_arena import MappedArena
from encoder_client.transports.mooncake import MooncakeReader
from encoder_svc.bench.transport_peer import PIECE_BYTES, RAW_METHOD, TransportPeer
from epd import slot_header
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2 import FetchRequest
from epd.encoder.v1.encoder_service_pb2_grpc import EncoderServiceStub

RawRead = Callable[[EmbeddingChunk, Slot], Awaitable[float]]
"""Moves as many bytes as a chunk has into a slot, checks nothing, and tells the seconds that it took."""
OPEN_SECONDS = 5.0


class RawLoops:
    """One raw loop for each transport, with what it needs.

    Args:
        peer: what is read.
        mooncake: whose engine is used, since a process can have only one. None: Mooncake does not work here.
    """

    def __init__(self, peer: TransportPeer, mooncake: MooncakeReader | None) -> None:
        self._mooncake = mooncake
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket: zmq.Socket[bytes] = self._context.socket(zmq.REQ)
        self._socket.linger = 0
        self._socket.connect(peer.raw_zeromq)
        self._channel = grpc.aio.insecure_channel(peer.raw_grpc_target)
        self._stub: Any = EncoderServiceStub(self._channel)
        self._stream: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(
            RAW_METHOD, request_serializer=None, response_deserializer=None
        )
        self._arena: MappedArena | None = None

    async def memcpy(self, chunk: EmbeddingChunk, slot: Slot) -> float:
        """A copy out of the arena, mapped once more: no other memory is as cold, and lies in pages of the same kind."""
        place = next(locator.shared_memory for locator in chunk.locators if locator.HasField("shared_memory"))
        if self._arena is None:
            self._arena = MappedArena.open(place.socket_path, chunk.encoder.engine_boot_id, OPEN_SECONDS)
        source = self._arena.payload(chunk, place.slot_offset)
        target = np.frombuffer(slot.view, np.uint8, chunk.nbytes)
        begun = perf_counter()
        np.copyto(target, source)
        return perf_counter() - begun

    async def mooncake(self, chunk: EmbeddingChunk, slot: Slot) -> float:
        """``transfer_sync_read``."""
        assert self._mooncake is not None
        place = next(locator.mooncake for locator in chunk.locators if locator.HasField("mooncake"))
        begun = perf_counter()
        code = self._mooncake.engine.transfer_sync_read(place.session, slot.address, place.address, chunk.nbytes)
        seconds = perf_counter() - begun
        assert code == 0
        return seconds

    async def zeromq(self, chunk: EmbeddingChunk, slot: Slot) -> float:
        """A pair of sockets and one answer, in frames as large as the transport's pieces."""
        return self._request(chunk, slot, PIECE_BYTES)

    async def zeromq_one_frame(self, chunk: EmbeddingChunk, slot: Slot) -> float:
        """A pair of sockets and one answer, in one frame."""
        return self._request(chunk, slot, chunk.nbytes)

    def _request(self, chunk: EmbeddingChunk, slot: Slot, piece: int) -> float:
        start = next(locator.zeromq.slot_offset for locator in chunk.locators if locator.HasField("zeromq"))
        view = slot.view
        begun = perf_counter()
        self._socket.send(b"%d %d %d" % (start, chunk.nbytes, piece))
        for place in range(0, chunk.nbytes, piece):
            self._socket.recv_into(view[place : place + piece])
        return perf_counter() - begun

    async def grpc_messages(self, chunk: EmbeddingChunk, slot: Slot) -> float:
        """The stub and the servicer that protoc generates: the same messages, which go nowhere."""
        start = _payload_start(chunk)
        begun = perf_counter()
        async for _ in self._stub.Fetch(FetchRequest(offset=start, length=chunk.nbytes)):
            pass
        return perf_counter() - begun

    async def grpc_bytes(self, chunk: EmbeddingChunk, slot: Slot) -> float:
        """A stream of bytes without a message, in pieces of the same size, which go nowhere."""
        start = _payload_start(chunk)
        begun = perf_counter()
        async for _ in self._stream(b"%d %d" % (start, chunk.nbytes)):
            pass
        return perf_counter() - begun

    async def close(self) -> None:
        """Closes what it holds."""
        if self._arena is not None:
            self._arena.close()
        self._socket.close()
        self._context.term()
        await self._channel.close(None)


def _payload_start(chunk: EmbeddingChunk) -> int:
    """Where a chunk's bytes begin in the peer's arena."""
    place = next(locator.shared_memory for locator in chunk.locators if locator.HasField("shared_memory"))
    return place.slot_offset + slot_header.SIZE
