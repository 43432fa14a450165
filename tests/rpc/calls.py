"""Plain calls of the contract: a stub, requests with photographs, and what their streams said."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import numpy as np
import numpy.typing as npt

from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.embedding_pb2 import ChunkState, EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2_grpc import EncoderServiceStub
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from tests.photograph import photo
from tests.server_process import ServerProcess

PHOTO = photo(140, 112)
SECONDS = 150.0
"""Longer than any call here takes."""
NARROW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
"""Options of a channel that takes in a kilobyte of a stream that nobody reads, and no more."""
END_OF_STREAM: Any = grpc.aio.EOF  # type: ignore[attr-defined] # not in the stubs


def image(part_idx: int = 0, data: bytes = PHOTO) -> MediaItem:
    """An image item."""
    return MediaItem(part_idx=part_idx, modality=Modality.MODALITY_IMAGE, data=data)


@asynccontextmanager
async def calls_to(server: ServerProcess) -> AsyncIterator[Any]:
    """A stub on a channel of its own."""
    async with server.channel() as channel:
        yield EncoderServiceStub(channel)


async def events_of(call: Any) -> list[pb.Event]:
    """The events of an Encode call that were not read yet, to its end."""
    events: list[pb.Event] = []
    while (response := await call.read()) is not END_OF_STREAM:
        events.extend(response.events)
    return events


def encode_request(*items: MediaItem, **fields: Any) -> pb.EncodeRequest:
    """A request for one photograph, or for ``items``. It goes all the way, past the cache, unless told otherwise."""
    return pb.EncodeRequest(items=items or [image()], **{"cache_policy": pb.CACHE_POLICY_BYPASS, **fields})


async def encode(stub: Any, *items: MediaItem, **fields: Any) -> list[pb.Event]:
    """Sends an :func:`encode_request` and reads to the end."""
    return await events_of(stub.Encode(encode_request(*items, **fields), timeout=SECONDS))


def kinds(events: list[pb.Event]) -> list[str]:
    """What the events are: `accepted`, `layout`, `ready`, `part_failed`, `part_cancelled`, `complete`."""
    return [
        ChunkState.Name(event.chunk.state).removeprefix("CHUNK_STATE_").lower()
        if event.HasField("chunk")
        else str(event.WhichOneof("event"))
        for event in events
    ]


def ready_chunks(events: list[pb.Event]) -> list[EmbeddingChunk]:
    """The READY chunks, in order of parts."""
    chunks = [event.chunk for event in events if event.chunk.state == ChunkState.CHUNK_STATE_READY]
    return sorted(chunks, key=lambda chunk: chunk.part_idx)


def failures(events: list[pb.Event]) -> list[pb.PartFailed]:
    """The failed parts."""
    return [event.part_failed for event in events if event.HasField("part_failed")]


async def fetch(stub: Any, chunk: EmbeddingChunk) -> npt.NDArray[np.float32]:
    """The rows of a chunk, read in band: shape (token_count, hidden)."""
    request = pb.FetchRequest(lease_id=chunk.leases[0].lease_id)
    data = b"".join([piece.data async for piece in stub.Fetch(request, timeout=SECONDS)])
    assert len(data) == chunk.nbytes
    return np.frombuffer(data, dtype=np.float32).reshape([int(size) for size in chunk.tensors[0].shape])


async def release(stub: Any, *chunks: EmbeddingChunk) -> list[pb.LeaseState]:
    """Gives all leases of the chunks back; returns what became of them."""
    leases = [pb.LeaseRelease(lease_id=grant.lease_id) for chunk in chunks for grant in chunk.leases]
    answer = await stub.Release(pb.ReleaseRequest(leases=leases), timeout=SECONDS)
    return [lease.state for lease in answer.leases]


async def is_idle(server: ServerProcess) -> bool:
    """Nothing runs, and nothing is held: no request, no lease, no byte."""
    info = await server.info()
    load = info.load
    return (load.requests, load.leases, load.media_bytes, sum(load.parts.values())) == (0, 0, 0, 0) and all(
        engine.leased_bytes == engine.reserved_bytes == engine.batches_in_flight == 0 for engine in info.engines
    )
