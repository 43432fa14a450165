"""The encoder's side of ``bench transport``: an arena with filled slots, served as an engine and a front serve it.

Run as ``python -m encoder_svc.bench.transport_peer``, it serves until its standard input ends. Beside the real halves
it has those of the raw loops, which do nothing but send: a ZeroMQ socket, and a gRPC server as the generated classes
make it, with a stream of bytes without a message beside.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any, Self

import grpc
import numpy as np
import uvloop
import xxhash
import zmq
from google.protobuf.duration_pb2 import Duration

from encoder_svc.bench.partner import end_partner
from encoder_svc.engine.serving import serve_arena
from encoder_svc.engine.slot_places import SlotPlaces
from encoder_svc.errors import SetupError
from encoder_svc.heap import keep_large_blocks
from encoder_svc.runtime.slots import footprint
from encoder_svc.shared_memory import SharedMemory
from epd import slot_header
from epd.encoder.v1.embedding_pb2 import (
    Checksum,
    ChecksumAlgorithm,
    EmbeddingChunk,
    EncoderRef,
    InlineLocator,
    LeaseGrant,
    Locator,
)
from epd.encoder.v1.encoder_service_pb2 import FetchRequest, FetchResponse, TransportInfo
from epd.encoder.v1.encoder_service_pb2_grpc import EncoderServiceServicer, add_EncoderServiceServicer_to_server
from epd.internal.v1.engine_pb2 import ConfigureEngine

SLOTS_BYTES = 192 << 20
"""Of all slots of one size: far more than any cache holds, so that each read finds its source as cold as the last."""
MOST_SLOTS = 512
RAW_METHOD = "/bench.Raw/Stream"
PIECE_BYTES = 1 << 20
_LEASE = Duration(seconds=600)
_BOOT_ID = "be" * 16
_HOST = "127.0.0.1"


def slot_count(nbytes: int) -> int:
    """How many slots of a size are filled."""
    return min(MOST_SLOTS, max(3, SLOTS_BYTES // nbytes))


@dataclass(frozen=True)
class Slots:
    """All slots of one size."""

    nbytes: int
    chunks: Sequence[EmbeddingChunk]
    """READY, each with a lease."""


class TransportPeer:
    """The process, from entering this object until leaving it.

    Args:
        sizes: bytes of payloads.

    Raises:
        SetupError: on entering: it does not serve.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes
        self._process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in __exit__)
        self._folder = tempfile.TemporaryDirectory(prefix="encoder-svc-bench-")
        self.slots: Sequence[Slots] = ()
        self.reasons: dict[str, str] = {}
        """Why a transport does not work here, by its name."""
        self.grpc_target = ""
        self.raw_grpc_target = ""
        """Of the raw streams."""
        self.raw_zeromq = ""
        """Where the raw pair's other end is."""

    def __enter__(self) -> Self:
        socket = Path(self._folder.name) / "peer" / "arena"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "encoder_svc.bench.transport_peer", str(socket), *map(str, self._sizes)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, start_new_session=True,
        )  # fmt: skip
        try:
            self._read(self._process)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process is not None
        end_partner(self._process)
        self._log.close()
        self._folder.cleanup()

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            process.wait()
            self._log.seek(0)
            said = self._log.read().decode(errors="replace").strip().splitlines()
            raise SetupError(f"the peer to be read from ended; it said: {said[-1] if said else 'nothing'}")
        told: dict[str, Any] = json.loads(line)
        self.grpc_target, self.raw_grpc_target = told["grpc_target"], told["raw_grpc_target"]
        self.raw_zeromq, self.reasons = told["raw_zeromq"], told["reasons"]
        chunks = [EmbeddingChunk.FromString(bytes.fromhex(text)) for text in told["chunks"]]
        self.slots = [Slots(size, [chunk for chunk in chunks if chunk.nbytes == size]) for size in self._sizes]


def main() -> None:
    """Serves, tells where, and waits for the end of its input."""
    parser = argparse.ArgumentParser()
    parser.add_argument("socket")
    parser.add_argument("sizes", type=int, nargs="+")
    arguments = parser.parse_args()
    keep_large_blocks()  # as a front and an engine do
    uvloop.run(_serve(arguments.socket, arguments.sizes))


async def _serve(socket_path: str, sizes: Sequence[int]) -> None:
    from encoder_svc.rpc.callers import EncoderCallers
    from encoder_svc.rpc.generic_handlers import GenericHandlers
    from encoder_svc.rpc.servicer import EncoderServicer, add_encoder_servicer
    from encoder_svc.settings import Settings

    arena = SharedMemory.create("bench", sum(footprint(size) * slot_count(size) for size in sizes))
    places = SlotPlaces()
    asked = ConfigureEngine()
    asked.shared_memory.socket_path = socket_path
    asked.mooncake.host, asked.mooncake.protocol = _HOST, "tcp"
    asked.zeromq.listen = asked.zeromq.host = _HOST
    service = serve_arena(arena, places, _BOOT_ID, asked)
    locators = [*service.locators, Locator(inline=InlineLocator())]
    chunks = _fill(arena, places, sizes, locators)

    def read_slot(lease: bytes, offset: int, length: int) -> memoryview:
        slot = int.from_bytes(lease, "little")
        start = _slot_offset(chunks[slot]) + slot_header.SIZE + offset
        return arena.view[start : start + length]

    server = grpc.aio.server()
    # All that `Fetch` asks the front for.
    runtime: Any = SimpleNamespace(
        slot_nbytes=lambda lease: chunks[int.from_bytes(lease, "little")].nbytes, read_slot=read_slot
    )
    handlers: Any = GenericHandlers(server)
    settings = Settings(model=Path())
    servicer = EncoderServicer(runtime, settings, EncoderCallers(settings))
    add_encoder_servicer(servicer, handlers)
    port = server.add_insecure_port(f"{_HOST}:0")
    await server.start()
    raw_server = grpc.aio.server()
    add_EncoderServiceServicer_to_server(_RawServicer(arena), raw_server)
    service_name, method = RAW_METHOD.lstrip("/").split("/")
    raw = grpc.unary_stream_rpc_method_handler(_stream(arena))
    raw_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service_name, {method: raw}),))
    raw_port = raw_server.add_insecure_port(f"{_HOST}:0")
    await raw_server.start()
    told = {
        "grpc_target": f"{_HOST}:{port}",
        "raw_grpc_target": f"{_HOST}:{raw_port}",
        "raw_zeromq": _serve_raw_zeromq(arena),
        "reasons": {_name(info): info.reason for info in service.transports if not info.available},
        "chunks": [chunk.SerializeToString().hex() for chunk in chunks],
    }
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)
    await raw_server.stop(None)


def _fill(
    arena: SharedMemory, places: SlotPlaces, sizes: Sequence[int], locators: Sequence[Locator]
) -> list[EmbeddingChunk]:
    random = np.random.default_rng(0)
    chunks: list[EmbeddingChunk] = []
    offset = 0
    for size in sizes:
        for _ in range(slot_count(size)):
            start = offset + slot_header.SIZE
            arena.array(start, size)[:] = random.integers(0, 256, size, dtype=np.uint8)
            checksum, key = xxhash.xxh3_64_intdigest(arena.view[start : start + size]), random.bytes(16)
            places.add(offset, size)
            slot_header.open_slot(arena.view, offset, len(chunks) + 1, size, checksum, key)
            chunks.append(_chunk(len(chunks), offset, size, checksum, key, locators))
            offset += footprint(size)
    return chunks


def _chunk(
    number: int, offset: int, nbytes: int, checksum: int, key: bytes, locators: Sequence[Locator]
) -> EmbeddingChunk:
    from encoder_svc.runtime.chunks import placed

    return EmbeddingChunk(
        generation=number + 1,
        nbytes=nbytes,
        slot_key=key,
        checksum=Checksum(algorithm=ChecksumAlgorithm.CHECKSUM_ALGORITHM_XXH3_64, value=checksum),
        encoder=EncoderRef(engine_boot_id=_BOOT_ID),
        leases=[LeaseGrant(lease_id=number.to_bytes(16, "little"), ttl=_LEASE)],
        locators=[placed(locator, offset) for locator in locators],
    )


def _slot_offset(chunk: EmbeddingChunk) -> int:
    return next(place.shared_memory.slot_offset for place in chunk.locators if place.HasField("shared_memory"))


class _RawServicer(EncoderServiceServicer):
    """``Fetch`` as it is written on the generated classes: messages from the arena, no lease, no check.

    Args:
        arena: what is sent; the requests' ``offset`` is there.
    """

    def __init__(self, arena: SharedMemory) -> None:
        self._view = arena.view

    async def Fetch(  # noqa: N802 # the name of the call
        self, request: FetchRequest, context: Any
    ) -> AsyncIterator[FetchResponse]:
        for piece in _pieces(self._view, request.offset, request.length):
            yield FetchResponse(data=piece)


def _stream(arena: SharedMemory) -> Any:
    """Answers a request of two numbers by that many bytes of the arena from there, in no message."""

    async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
        start, nbytes = map(int, request.split())
        for piece in _pieces(arena.view, start, nbytes):
            yield piece

    return stream


def _pieces(view: memoryview, start: int, nbytes: int) -> Iterator[bytes]:
    end = start + nbytes
    for place in range(start, end, PIECE_BYTES):
        yield bytes(view[place : min(place + PIECE_BYTES, end)])


def _serve_raw_zeromq(arena: SharedMemory) -> str:
    """Answers each request of two numbers by that many bytes, in frames of so many."""
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
    port = socket.bind_to_random_port(f"tcp://{_HOST}")

    def serve() -> None:
        while True:
            start, nbytes, piece = map(int, socket.recv().split())
            end = start + nbytes
            frames = [arena.view[place : min(place + piece, end)] for place in range(start, end, piece)]
            socket.send_multipart(frames, copy=False)

    threading.Thread(target=serve, daemon=True).start()
    return f"tcp://{_HOST}:{port}"


def _name(info: TransportInfo) -> str:
    from epd.encoder.v1.embedding_pb2 import Transport

    return Transport.Name(info.transport).removeprefix("TRANSPORT_").lower()


if __name__ == "__main__":
    main()
