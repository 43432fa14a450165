"""``bench transport``: each transport beside the bare loop of its library, from one arena into one pool."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import grpc

from encoder_client import EmbeddingPool
from encoder_client.checksums import UNCHECKED, RunningChecksum
from encoder_client.in_place import InPlaceReads
from encoder_client.pool.embedding_pool import Slot
from encoder_client.stub import EncoderStub
from encoder_client.transports import Reader
from encoder_client.transports.inline import InlineReader
from encoder_client.transports.mooncake import MooncakeReader
from encoder_client.transports.shared_memory import SharedMemoryReader
from encoder_client.transports.zeromq import ZeroMqReader
from encoder_svc.bench.floors import (
    IN_PLACE_MILLISECONDS,
    INLINE_BYTES,
    INLINE_GIGABYTES_PER_SECOND,
    ONE_FRAME_BYTES,
    TRANSPORT_RATIO,
    ZEROMQ_OVER_ONE_FRAME,
)
from encoder_svc.bench.raw_loops import RawLoops, RawRead
from encoder_svc.bench.result import Chart, FloorCheck, Series, TransportFigures, TransportResult, shown_bytes
from encoder_svc.bench.run import Measurement
from encoder_svc.bench.transport_peer import Slots, TransportPeer
from encoder_svc.errors import SetupError
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, LeaseGrant, Locator

IN_PLACE = "shared_memory_in_place"
READ_SECONDS = 60.0
BATCH_READS = 8
"""Before the other side takes its turn: few, so that a neighbour who takes a core for a while takes it from both."""
BATCH_BYTES = 192 << 20
"""That one side moves at most before the other takes its turn."""
ROUND_BYTES = 64 << 20
"""That each side moves in a round, at least: else a few small ones are over within one moment of a neighbour's."""


@dataclass(frozen=True)
class TransportOptions:
    """What to measure."""

    transports: tuple[str, ...]
    sizes: tuple[int, ...]
    """Bytes of an embedding."""
    rounds: int
    """In which a transport and its raw loop take turns."""


async def measure_transport(run: Measurement, options: TransportOptions) -> TransportResult:
    """Reads slots by each transport and by its raw loop in turns; what comes over a network is checked, as always."""
    results: list[TransportFigures] = []
    with ExitStack() as stack:
        peer = run.start(stack, "the peer", TransportPeer(options.sizes))
        for name in options.transports:
            if name in peer.reasons:
                raise SetupError(f"{name} does not work here: {peer.reasons[name]}")
        pool = EmbeddingPool(max(options.sizes))
        async with _readers(options.transports, pool, peer) as (readers, raw):
            for name, reader in readers.items():
                for slots in peer.slots:
                    with run.display.stage(f"{name}, {shown_bytes(slots.nbytes)}", options.rounds) as advance:
                        slot = (await pool.reserve("bench", [slots.nbytes])).take(0)
                        turns = _Turns(reader, _raw_loops(name, raw), slots, slot)
                        for number in range(options.rounds + 1):
                            await turns.take_round(warm=number > 0)
                            advance(1)
                        results.append(turns.figures(name))
                        del turns, slot
    return TransportResult(**run.heading(), floors=_floors(results), charts=[_chart(results)], results=results)


@contextlib.asynccontextmanager
async def _readers(
    names: Sequence[str], pool: EmbeddingPool, peer: TransportPeer
) -> AsyncIterator[tuple[dict[str, Reader], RawLoops]]:
    channel = grpc.aio.insecure_channel(peer.grpc_target)
    mooncake = MooncakeReader(pool) if "mooncake" in names else None
    raw = RawLoops(peer, mooncake)
    readers: dict[str, Reader] = {}
    for name in names:
        match name:
            case "shared_memory":
                readers[name] = shared = SharedMemoryReader()
                readers[IN_PLACE] = _InPlace(shared)
            case "mooncake":
                assert mooncake is not None
                readers[name] = mooncake
            case "zeromq":
                readers[name] = ZeroMqReader()
            case _:
                readers[name] = InlineReader(lambda _: EncoderStub(channel))
    try:
        yield readers, raw
    finally:
        for reader in readers.values():
            reader.close()
        await raw.close()
        await channel.close(None)


def _raw_loops(name: str, raw: RawLoops) -> dict[str, RawRead]:
    """What a transport is compared with, first what its floor is of."""
    match name:
        case "shared_memory" | "shared_memory_in_place":
            return {"memcpy": raw.memcpy}
        case "mooncake":
            return {"blocking": raw.mooncake}
        case "zeromq":
            return {"frames": raw.zeromq, "one_frame": raw.zeromq_one_frame}
        case _:
            return {"messages": raw.grpc_messages, "bytes": raw.grpc_bytes}


class _InPlace:
    """Reads in place: into nothing, since the bytes stay where they are."""

    name = SharedMemoryReader.name
    needs_checksum = False

    def __init__(self, reader: SharedMemoryReader) -> None:
        self._reads = InPlaceReads(reader, self._renew, self._release, 1 << 40)

    def reaches(self, locator: Locator) -> bool:
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
        embedding = await self._reads.read(chunk, locator, lease, timeout)
        if not embedding.intact:
            raise SetupError("a slot changed while it was looked at")

    def close(self) -> None:
        """What it reads by is closed by others."""

    async def _renew(self, chunk: EmbeddingChunk) -> float:
        return READ_SECONDS

    async def _release(self, chunk: EmbeddingChunk) -> None:
        pass


class _Turns:
    """One transport and its raw loops on slots of one size, in turns."""

    def __init__(self, reader: Reader, raw: dict[str, RawRead], slots: Slots, slot: Slot) -> None:
        self._reader = reader
        self._raw = raw
        self._slots = slots
        self._slot = slot
        self._number = 0
        self._seconds: list[float] = []
        self._raw_seconds: dict[str, list[float]] = {name: [] for name in raw}

    async def take_round(self, *, warm: bool) -> None:
        """Each side takes its turns. What is not warm is not counted: Mooncake's engine is set up by its first read."""
        nbytes = self._slots.nbytes
        reads = min(BATCH_READS, max(1, BATCH_BYTES // nbytes))
        for _ in range(max(1, ROUND_BYTES // (reads * nbytes))):
            await self._take_turns(BATCH_READS if isinstance(self._reader, _InPlace) else reads, warm=warm)

    async def _take_turns(self, reads: int, *, warm: bool) -> None:
        sides = ((self._read, self._seconds), *((self._raw[name], self._raw_seconds[name]) for name in self._raw))
        for read, seconds in sides:
            taken = [await read(self._next(), self._slot) for _ in range(reads)]
            if warm:
                seconds.extend(taken)

    def figures(self, name: str) -> TransportFigures:
        nbytes = self._slots.nbytes
        rate = nbytes / median(self._seconds) / 1e9
        raw = {name: nbytes / median(seconds) / 1e9 for name, seconds in self._raw_seconds.items()}
        first, one_frame, no_message = next(iter(raw.values())), raw.get("one_frame"), raw.get("bytes")
        return TransportFigures(
            transport=name,
            nbytes=nbytes,
            gigabytes_per_second=rate,
            raw_gigabytes_per_second=first,
            ratio=rate / first,
            checksum=self._reader.needs_checksum,
            milliseconds=1000 * median(self._seconds),
            raw_one_frame_gigabytes_per_second=one_frame,
            ratio_to_one_frame=rate / one_frame if one_frame else None,
            raw_bytes_gigabytes_per_second=no_message,
            ratio_to_bytes=rate / no_message if no_message else None,
        )

    def _next(self) -> EmbeddingChunk:
        self._number += 1
        return self._slots.chunks[self._number % len(self._slots.chunks)]

    async def _read(self, chunk: EmbeddingChunk, slot: Slot) -> float:
        reader = self._reader
        locator = next(place for place in chunk.locators if place.WhichOneof("location") == reader.name)
        begun = perf_counter()
        checksum = RunningChecksum(chunk.checksum) if reader.needs_checksum else UNCHECKED
        await reader.read(chunk, locator, chunk.leases[0], slot, checksum, READ_SECONDS)
        good = not reader.needs_checksum or checksum.matches(slot.view[: chunk.nbytes])
        seconds = perf_counter() - begun
        if not good:
            raise SetupError(f"{reader.name} delivered damaged bytes")
        return seconds


def _floors(results: Sequence[TransportFigures]) -> list[FloorCheck]:
    floors = []
    for figures in results:
        floor = TRANSPORT_RATIO.get((figures.transport, figures.nbytes))
        if floor is not None:
            floors.append(floor.check(f"{figures.name}.ratio", figures.ratio))
        if figures.transport == IN_PLACE:
            floors.append(IN_PLACE_MILLISECONDS.check(f"{figures.name}.milliseconds", figures.milliseconds))
        if figures.ratio_to_one_frame is not None and figures.nbytes >= ONE_FRAME_BYTES:
            floors.append(ZEROMQ_OVER_ONE_FRAME.check(f"{figures.name}.ratio_to_one_frame", figures.ratio_to_one_frame))
        if figures.transport == "inline" and figures.nbytes == INLINE_BYTES:
            rate = figures.gigabytes_per_second
            floors.append(INLINE_GIGABYTES_PER_SECOND.check(f"{figures.name}.gigabytes_per_second", rate))
    return floors


def _chart(results: Sequence[TransportFigures]) -> Chart:
    names = list(dict.fromkeys(figures.transport for figures in results if figures.transport != IN_PLACE))
    sizes = [shown_bytes(figures.nbytes) for figures in results if figures.transport == names[0]]
    series = []
    for name in names:
        mine = [figures for figures in results if figures.transport == name]
        series.append(Series(label=name, x=list(sizes), y=[figures.gigabytes_per_second for figures in mine]))
    return Chart(
        title="reads, with checksum where one is needed",
        x_label="embedding",
        y_label="GB/s",
        kind="bars",
        series=series,
    )
