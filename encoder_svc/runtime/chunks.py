"""Makes the chunks of the contract from what the runtime knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from google.protobuf.duration_pb2 import Duration

from encoder_svc.runtime.encoding import EncodedItem
from encoder_svc.runtime.leases import Lease
from encoder_svc.runtime.parts import Part
from encoder_svc.runtime.slots import Slot
from epd.encoder.v1.embedding_pb2 import (
    ChecksumAlgorithm,
    ChunkState,
    EmbeddingChunk,
    EncoderRef,
    InlineLocator,
    Locator,
)
from epd.internal.v1.engine_pb2 import EngineReady


@dataclass(frozen=True)
class ChunkWriter:
    """Knows what is the same in all chunks of a server."""

    instance_id: str
    grpc_target: str

    @cached_property
    def encoder(self) -> EncoderRef:
        """Names this server. Not to be changed."""
        return EncoderRef(instance_id=self.instance_id, grpc_target=self.grpc_target)

    def layout(self, layout: EmbeddingChunk, part: Part, fingerprint: bytes) -> EmbeddingChunk:
        """The LAYOUT chunk of a part, from what a media worker told."""
        chunk = _copy(layout)
        chunk.state = ChunkState.CHUNK_STATE_LAYOUT
        _name_part(chunk, part)
        chunk.encoder.CopyFrom(self.encoder)
        chunk.compatibility_fingerprint = fingerprint
        return chunk

    def ready(self, slot: Slot, engine: EngineReady, leases: Sequence[Lease], now: float) -> EmbeddingChunk:
        """The READY chunk of a FILLED slot, of no part yet.

        Without leases there is nothing that could be read, so it does not say where.
        """
        if not slot.chunk:
            slot.chunk = self._of_slot(slot, engine).SerializeToString()
        chunk = EmbeddingChunk.FromString(slot.chunk)
        if slot.name is not None:
            chunk.content_key = slot.name.content_key
        if not leases:
            for name in _READABLE:
                chunk.ClearField(name)
        for lease in leases:
            grant = chunk.leases.add()
            grant.receiver_id = lease.receiver
            grant.lease_id = lease.id
            write_duration(grant.ttl, lease.expires_at - now)
        return chunk

    def _of_slot(self, slot: Slot, engine: EngineReady) -> EmbeddingChunk:
        """What is the same in all READY chunks of a slot."""
        assert slot.layout is not None
        chunk = _copy(slot.layout)
        chunk.state = ChunkState.CHUNK_STATE_READY
        chunk.token_count_is_upper_bound = False
        chunk.encoder.CopyFrom(self.encoder)
        chunk.encoder.engine_boot_id = engine.boot_id
        chunk.compatibility_fingerprint = engine.model.compatibility_fingerprint
        chunk.checksum.algorithm = ChecksumAlgorithm.CHECKSUM_ALGORITHM_XXH3_64
        chunk.checksum.value = slot.checksum
        chunk.generation = slot.generation
        chunk.slot_key = slot.key
        chunk.locators.extend(self._locators(slot, engine))
        return chunk

    def ready_for(
        self,
        part: Part,
        slot: Slot,
        engine: EngineReady,
        leases: Sequence[Lease],
        encoded: EncodedItem | None,
        now: float,
    ) -> EmbeddingChunk:
        """The READY chunk of a part; ``encoded`` tells how it was made, None that it was cached."""
        chunk = self.ready(slot, engine, leases, now)
        _name_part(chunk, part)
        chunk.from_cache = encoded is None
        if encoded is not None:
            _write_timings(chunk, part, encoded)
        write_duration(chunk.timings.total, now - part.admitted_at)
        return chunk

    def _locators(self, slot: Slot, engine: EngineReady) -> list[Locator]:
        """Where a slot can be read, the fastest way first."""
        locators = [placed(locator, slot.offset) for locator in engine.locators]
        return [*locators, Locator(inline=InlineLocator())]


_READABLE = ("generation", "slot_key", "locators")
"""What tells where a slot is read."""


def placed(arena: Locator, offset: int) -> Locator:
    """From where the arena begins to where the slot does whose header is at ``offset``."""
    locator = Locator()
    locator.CopyFrom(arena)
    match locator.WhichOneof("location"):
        case "shared_memory":
            locator.shared_memory.slot_offset += offset
        case "mooncake":
            locator.mooncake.address += offset
        case "zeromq":
            locator.zeromq.slot_offset += offset
    return locator


def _copy(layout: EmbeddingChunk) -> EmbeddingChunk:
    chunk = EmbeddingChunk()
    chunk.CopyFrom(layout)
    return chunk


def _name_part(chunk: EmbeddingChunk, part: Part) -> None:
    command = part.request.command
    chunk.prompt_id = command.prompt_id
    chunk.request_id = command.request_id
    chunk.part_idx = part.item.part_idx
    chunk.num_parts = command.num_parts
    chunk.modality = part.item.modality


def _write_timings(chunk: EmbeddingChunk, part: Part, encoded: EncodedItem) -> None:
    item, timings = encoded.computation, chunk.timings
    write_duration(timings.fetch, part.fetch_seconds)
    write_duration(timings.queued, item.prepare_started_at - part.admitted_at - part.fetch_seconds)
    write_duration(timings.prepare, item.prepare_seconds)
    write_duration(timings.batch_wait, item.encode_started_at - item.prepared_at)
    write_duration(timings.forward, encoded.forward_seconds)
    write_duration(timings.stage, encoded.stage_seconds)
    timings.batch_items = encoded.batch_items
    timings.batch_patches = encoded.batch_patches


def duration(seconds: float) -> Duration:
    """``seconds`` as a message, not negative."""
    message = Duration()
    write_duration(message, seconds)
    return message


def write_duration(message: Duration, seconds: float) -> None:
    """Writes ``seconds``, not negative, into a message, in place."""
    message.seconds, message.nanos = divmod(max(0, round(seconds * 1e9)), 1_000_000_000)
