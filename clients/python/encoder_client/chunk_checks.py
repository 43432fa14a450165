"""What must be true of a chunk before anything is done with it.

A chunk comes from another process, maybe by way of a third: whatever would make a view reach outside its bytes, or put
one prompt's embedding into another, is refused here by name.
"""

from __future__ import annotations

from collections.abc import Collection

from encoder_client import dtypes
from encoder_client.errors import ChunkError
from encoder_client.events import Accepted
from epd.encoder.v1.embedding_pb2 import (
    CHECKSUM_ALGORITHM_UNSPECIFIED,
    CHUNK_STATE_READY,
    EmbeddingChunk,
    LeaseGrant,
    TensorSpec,
)

MAX_DIMENSIONS = 8
LEASE_BYTES = 16
FINGERPRINT_BYTES = 32

# All that LAYOUT tells and READY repeats; what a LAYOUT with an upper bound may leave open stands apart.
_SAME_ALWAYS = ("prompt_id", "request_id", "part_idx", "num_parts", "modality", "compatibility_fingerprint")
_SAME_UNLESS_BOUND = ("grid_dim", "token_count", "tensors", "nbytes", "placeholder_metadata")


def check_shape(chunk: EmbeddingChunk) -> None:
    """Checks that LAYOUT or READY describes tensors that lie inside its ``nbytes`` bytes.

    Raises:
        ChunkError: it does not.
    """
    if chunk.part_idx >= chunk.num_parts:
        raise ChunkError("part_idx", f"it is {chunk.part_idx}, and the prompt has {chunk.num_parts} parts")
    if not chunk.nbytes:
        raise ChunkError("nbytes", "it is 0: there is nothing to read")
    if not chunk.tensors or chunk.tensors[0].name != "embedding":
        raise ChunkError("tensors", "the first tensor is not named `embedding`")
    names = [tensor.name for tensor in chunk.tensors]
    if len(set(names)) != len(names):
        raise ChunkError("tensors", "two tensors have the same name")
    nbytes = chunk.nbytes
    for tensor in chunk.tensors:
        _check_tensor(tensor, nbytes)
    shape = chunk.tensors[0].shape
    if len(shape) != 2:
        raise ChunkError("tensors[0].shape", f"`embedding` has {len(shape)} dimensions, not rows and width")
    if shape[0] != chunk.token_count:
        raise ChunkError("token_count", f"it is {chunk.token_count}, and `embedding` has {shape[0]} rows")


def _check_tensor(tensor: TensorSpec, nbytes: int) -> None:
    where = f"tensor `{tensor.name}`"
    dtype, offset, shape, strides = tensor.dtype, tensor.byte_offset, list(tensor.shape), list(tensor.strides)
    if not dtypes.is_known(dtype):
        raise ChunkError("tensors.dtype", f"{where} has data type {dtype}, which this client does not know")
    if not 1 <= len(shape) <= MAX_DIMENSIONS or len(strides) != len(shape):
        raise ChunkError("tensors.shape", f"{where} has {len(shape)} dimensions and {len(strides)} strides")
    if 0 in shape:
        raise ChunkError("tensors.shape", f"{where} is empty: its shape is {shape}")
    size = dtypes.itemsize(dtype)
    end = offset + size
    misplaced = offset % size
    for count, stride in zip(shape, strides, strict=True):
        end += (count - 1) * stride
        misplaced = misplaced or stride % size
    if misplaced:
        raise ChunkError("tensors.strides", f"offset or strides of {where} are no multiples of {size}-byte elements")
    if end > nbytes:
        raise ChunkError("tensors", f"{where} ends at byte {end}, the slot at {nbytes}")


def check_ready(chunk: EmbeddingChunk) -> None:
    """Checks that a chunk is a complete READY.

    Raises:
        ChunkError: it is not, or its tensors do not lie inside its bytes.
    """
    if chunk.state != CHUNK_STATE_READY:
        raise ChunkError("state", "only a READY chunk can be read")
    check_shape(chunk)
    if not chunk.generation:
        raise ChunkError("generation", "it is 0: the chunk names no slot")
    if chunk.checksum.algorithm == CHECKSUM_ALGORITHM_UNSPECIFIED:
        raise ChunkError("checksum", "it is missing: bytes read over a network could not be trusted")
    if not chunk.locators:
        raise ChunkError("locators", "there are none: the bytes are nowhere to be read")
    if not chunk.encoder.instance_id:
        raise ChunkError("encoder", "it has no instance_id: nobody could be asked to release the lease")


def lease_of(chunk: EmbeddingChunk, receiver: str) -> LeaseGrant:
    """The receiver's lease.

    Raises:
        ChunkError: the chunk has none for it.
    """
    for lease in chunk.leases:
        if lease.receiver_id == receiver:
            if len(lease.lease_id) != LEASE_BYTES:
                raise ChunkError("leases", f"a lease is {len(lease.lease_id)} bytes long, not {LEASE_BYTES}")
            return lease
    who = f"the receiver {receiver!r}" if receiver else "the caller"
    raise ChunkError("leases", f"there is none for {who}; there are {len(chunk.leases)} for others")


def check_follows(ready: EmbeddingChunk, layout: EmbeddingChunk) -> None:
    """Checks that READY is what LAYOUT announced.

    Raises:
        ChunkError: a field differs.
    """
    for field in _SAME_ALWAYS:
        if getattr(ready, field) != getattr(layout, field):
            raise ChunkError(field, "READY and LAYOUT of the part differ in it")
    if ready.encoder.instance_id != layout.encoder.instance_id:
        raise ChunkError("encoder", "READY and LAYOUT of the part come from different servers")
    if layout.content_key and ready.content_key != layout.content_key:
        raise ChunkError("content_key", "READY and LAYOUT of the part differ in it")
    if layout.token_count_is_upper_bound:
        for field in ("token_count", "nbytes"):
            if getattr(ready, field) > getattr(layout, field):
                raise ChunkError(field, f"{getattr(ready, field)} is more than LAYOUT's bound {getattr(layout, field)}")
        return
    for field in _SAME_UNLESS_BOUND:
        if getattr(ready, field) != getattr(layout, field):
            raise ChunkError(field, "READY and LAYOUT of the part differ in it")


def check_same_content(ready: EmbeddingChunk, known: EmbeddingChunk) -> None:
    """Checks that two READY chunks, of whichever requests and encoders, describe the same content of the same part.

    Raises:
        ChunkError: a field differs.
    """
    for field in ("prompt_id", "part_idx", "num_parts", "modality", "compatibility_fingerprint", *_SAME_UNLESS_BOUND):
        if getattr(ready, field) != getattr(known, field):
            raise ChunkError(field, "it is not that of the part's other chunk")
    if ready.content_key != known.content_key:
        raise ChunkError("content_key", "it is not that of the part's other chunk: these are two contents")


def check_replaces(chunk: EmbeddingChunk, earlier: EmbeddingChunk) -> None:
    """Checks that a chunk of a later try, maybe by another encoder, is what an earlier try told.

    Args:
        chunk: LAYOUT or READY.
        earlier: LAYOUT or READY of the same part.

    Raises:
        ChunkError: a field differs.
    """
    fields = ["modality", "num_parts", "compatibility_fingerprint"]
    if not earlier.token_count_is_upper_bound:
        fields += _SAME_UNLESS_BOUND
    for field in fields:
        if getattr(chunk, field) != getattr(earlier, field):
            raise ChunkError(field, "two tries of the part, maybe by two encoders, differ in it")


def check_belongs(chunk: EmbeddingChunk, accepted: Accepted, parts: Collection[int]) -> None:
    """Checks that a chunk belongs to a call.

    Args:
        chunk: LAYOUT or READY.
        accepted: what the encoder answered to the call.
        parts: the ``part_idx`` of the call's items.

    Raises:
        ChunkError: it is another call's, or of a part that was not asked for.
    """
    if chunk.request_id != accepted.request_id:
        raise ChunkError("request_id", "it is another request's")
    if chunk.prompt_id != accepted.prompt_id:
        raise ChunkError("prompt_id", "it is another prompt's")
    if chunk.num_parts != accepted.num_parts:
        raise ChunkError("num_parts", f"it is {chunk.num_parts}, and the prompt has {accepted.num_parts}")
    if chunk.part_idx not in parts:
        raise ChunkError("part_idx", f"the call did not ask for part {chunk.part_idx}")


def check_fingerprint(chunk: EmbeddingChunk, expected: bytes) -> None:
    """Checks that the embedding fits the receiver's model.

    Args:
        chunk: LAYOUT or READY.
        expected: 32 bytes, or empty for any.

    Raises:
        ChunkError: other weights, dtype, preprocessing or width made it.
    """
    if len(chunk.compatibility_fingerprint) != FINGERPRINT_BYTES:
        raise ChunkError("compatibility_fingerprint", f"it is not {FINGERPRINT_BYTES} bytes long")
    if expected and chunk.compatibility_fingerprint != expected:
        raise ChunkError(
            "compatibility_fingerprint", "other weights, dtype, preprocessing or width made it than the receiver needs"
        )
