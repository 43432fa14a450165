"""Chunks for tests, as a correct encoder would make them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import xxhash

from epd.encoder.v1.embedding_pb2 import (
    Checksum,
    ChecksumAlgorithm,
    ChunkState,
    DataType,
    EmbeddingChunk,
    EncoderRef,
    InlineLocator,
    LeaseGrant,
    Locator,
    TensorSpec,
)
from epd.encoder.v1.media_pb2 import Modality

LEASE = bytes(range(16))
FINGERPRINT = bytes(range(32))


def rows(count: int = 6, width: int = 8, seed: int = 0) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((count, width), dtype=np.float32)


def layout(count: int = 6, width: int = 8, part_idx: int = 0, num_parts: int = 1) -> EmbeddingChunk:
    return EmbeddingChunk(
        prompt_id="p",
        request_id="r",
        part_idx=part_idx,
        num_parts=num_parts,
        modality=Modality.MODALITY_IMAGE,
        state=ChunkState.CHUNK_STATE_LAYOUT,
        grid_dim=[1, 2 * count, 2],
        token_count=count,
        tensors=[
            TensorSpec(name="embedding", dtype=DataType.DATA_TYPE_FLOAT32, shape=[count, width], strides=[width * 4, 4])
        ],
        nbytes=count * width * 4,
        encoder=EncoderRef(instance_id="1" * 32, grpc_target="127.0.0.1:1"),
        compatibility_fingerprint=FINGERPRINT,
    )


def ready(data: npt.NDArray[np.float32], part_idx: int = 0, num_parts: int = 1) -> EmbeddingChunk:
    chunk = layout(data.shape[0], data.shape[1], part_idx, num_parts)
    chunk.state = ChunkState.CHUNK_STATE_READY
    chunk.generation = 7
    chunk.slot_key = bytes(16)
    chunk.checksum.CopyFrom(
        Checksum(algorithm=ChecksumAlgorithm.CHECKSUM_ALGORITHM_XXH3_64, value=xxhash.xxh3_64_intdigest(data.tobytes()))
    )
    lease = LeaseGrant(lease_id=LEASE)
    lease.ttl.FromSeconds(60)
    chunk.leases.append(lease)
    chunk.locators.append(Locator(inline=InlineLocator()))
    return chunk
