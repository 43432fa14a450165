"""Makes the chunks of the contract from what the runtime knows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.duration_pb2 import Duration

from encoder_svc.runtime.encoding import EncodedPart
from encoder_svc.runtime.leases import Lease
from encoder_svc.runtime.parts import Part
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

    def layout(self, part: Part, fingerprint: bytes) -> EmbeddingChunk:
        """The LAYOUT chunk of a PREPARED part."""
        chunk = self._start(part)
        chunk.state = ChunkState.CHUNK_STATE_LAYOUT
        chunk.encoder.CopyFrom(self.encoder(None))
        chunk.compatibility_fingerprint = fingerprint
        return chunk

    def ready(self, encoded: EncodedPart, engine: EngineReady, leases: Sequence[Lease], now: float) -> EmbeddingChunk:
        """The READY chunk of a part whose slot is FILLED."""
        part = encoded.part
        slot = part.slot
        assert slot is not None
        chunk = self._start(part)
        chunk.state = ChunkState.CHUNK_STATE_READY
        chunk.token_count_is_upper_bound = False
        chunk.encoder.CopyFrom(self.encoder(engine))
        chunk.compatibility_fingerprint = engine.model.compatibility_fingerprint
        chunk.checksum.algorithm = ChecksumAlgorithm.CHECKSUM_ALGORITHM_XXH3_64
        chunk.checksum.value = slot.checksum
        chunk.generation = slot.generation
        chunk.slot_key = slot.key
        for lease in leases:
            chunk.leases.append(
                LeaseGrant(receiver_id=lease.receiver, lease_id=lease.id, ttl=duration(lease.expires_at - now))
            )
        if engine.mooncake_session:
            location = MooncakeLocator(
                session=engine.mooncake_session,
                address=engine.arena_address + slot.payload_offset,
                protocol=self.mooncake_protocol,
            )
            chunk.locators.append(Locator(mooncake=location))
        chunk.locators.append(Locator(inline=InlineLocator()))
        _write_timings(chunk, encoded, now)
        return chunk

    def _start(self, part: Part) -> EmbeddingChunk:
        assert part.layout is not None
        command = part.request.command
        chunk = EmbeddingChunk()
        chunk.CopyFrom(part.layout)
        chunk.prompt_id = command.prompt_id
        chunk.request_id = command.request_id
        chunk.part_idx = part.item.part_idx
        chunk.num_parts = command.num_parts
        chunk.modality = part.item.modality
        return chunk


def _write_timings(chunk: EmbeddingChunk, encoded: EncodedPart, now: float) -> None:
    part, timings = encoded.part, chunk.timings
    timings.queued.CopyFrom(duration(part.prepare_started_at - part.admitted_at))
    timings.prepare.CopyFrom(duration(part.prepare_seconds))
    timings.batch_wait.CopyFrom(duration(part.encode_started_at - part.prepared_at))
    timings.forward.CopyFrom(duration(encoded.forward_seconds))
    timings.stage.CopyFrom(duration(encoded.stage_seconds))
    timings.total.CopyFrom(duration(now - part.admitted_at))
    timings.batch_items = encoded.batch_items
    timings.batch_patches = encoded.batch_patches


def duration(seconds: float) -> Duration:
    """``seconds`` as a message, not negative."""
    nanoseconds = max(0, round(seconds * 1e9))
    return Duration(seconds=nanoseconds // 1_000_000_000, nanos=nanoseconds % 1_000_000_000)
