"""Makes the chunks of the contract from what the runtime knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    LeaseGrant,
    Locator,
    MooncakeLocator,
)
from epd.internal.v1.engine_pb2 import EngineReady


@dataclass(frozen=True)
class ChunkWriter:
    """Knows what is the same in all chunks of a server."""

    instance_id: str
    grpc_target: str
    mooncake_protocol: str

    def encoder(self, engine: EngineReady | None) -> EncoderRef:
        """Names this server, and the engine if one holds the embedding."""
        boot_id = engine.boot_id if engine is not None else ""
        return EncoderRef(instance_id=self.instance_id, engine_boot_id=boot_id, grpc_target=self.grpc_target)

    def layout(self, layout: EmbeddingChunk, part: Part, fingerprint: bytes) -> EmbeddingChunk:
        """The LAYOUT chunk of a part, from what a media worker told."""
        chunk = _copy(layout)
        chunk.state = ChunkState.CHUNK_STATE_LAYOUT
        _name_part(chunk, part)
        chunk.encoder.CopyFrom(self.encoder(None))
        chunk.compatibility_fingerprint = fingerprint
        return chunk

    def ready(self, slot: Slot, engine: EngineReady, leases: Sequence[Lease], now: float) -> EmbeddingChunk:
        """The READY chunk of a FILLED slot, of no part yet.

        Without leases there is nothing that could be read, so it does not say where.
        """
        assert slot.layout is not None
        chunk = _copy(slot.layout)
        chunk.state = ChunkState.CHUNK_STATE_READY
        chunk.token_count_is_upper_bound = False
        chunk.encoder.CopyFrom(self.encoder(engine))
        chunk.compatibility_fingerprint = engine.model.compatibility_fingerprint
        chunk.checksum.algorithm = ChecksumAlgorithm.CHECKSUM_ALGORITHM_XXH3_64
        chunk.checksum.value = slot.checksum
        if slot.name is not None:
            chunk.content_key = slot.name.content_key
        if leases:
            chunk.generation = slot.generation
            chunk.slot_key = slot.key
            chunk.leases.extend(
                LeaseGrant(receiver_id=lease.receiver, lease_id=lease.id, ttl=duration(lease.expires_at - now))
                for lease in leases
            )
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
        chunk.timings.total.CopyFrom(duration(now - part.admitted_at))
        return chunk

    def _locators(self, slot: Slot, engine: EngineReady) -> list[Locator]:
        """Where a slot can be read, the fastest way first."""
        locators = [Locator(inline=InlineLocator())]
        if engine.mooncake_session:
            location = MooncakeLocator(
                session=engine.mooncake_session,
                address=engine.arena_address + slot.payload_offset,
                protocol=self.mooncake_protocol,
            )
            locators.insert(0, Locator(mooncake=location))
        return locators


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
    timings.fetch.CopyFrom(duration(part.fetch_seconds))
    timings.queued.CopyFrom(duration(item.prepare_started_at - part.admitted_at - part.fetch_seconds))
    timings.prepare.CopyFrom(duration(item.prepare_seconds))
    timings.batch_wait.CopyFrom(duration(item.encode_started_at - item.prepared_at))
    timings.forward.CopyFrom(duration(encoded.forward_seconds))
    timings.stage.CopyFrom(duration(encoded.stage_seconds))
    timings.batch_items = encoded.batch_items
    timings.batch_patches = encoded.batch_patches


def duration(seconds: float) -> Duration:
    """``seconds`` as a message, not negative."""
    nanoseconds = max(0, round(seconds * 1e9))
    return Duration(seconds=nanoseconds // 1_000_000_000, nanos=nanoseconds % 1_000_000_000)
