"""A chunk that lies is not used, and the error names the field."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_client.chunk_checks import (
    check_belongs,
    check_fingerprint,
    check_follows,
    check_ready,
    check_shape,
    lease_of,
)
from encoder_client.errors import ChunkError
from encoder_client.events import Accepted
from epd.encoder.v1.embedding_pb2 import ChunkState, DataType, EmbeddingChunk, EncoderRef
from tests.client.chunks import FINGERPRINT, layout, ready, rows

Change = Callable[[EmbeddingChunk], object]


def changed(chunk: EmbeddingChunk, change: Change) -> EmbeddingChunk:
    change(chunk)
    return chunk


def set_tensor(**fields: object) -> Change:
    def change(chunk: EmbeddingChunk) -> None:
        for name, value in fields.items():
            if isinstance(value, list):
                getattr(chunk.tensors[0], name)[:] = value
            else:
                setattr(chunk.tensors[0], name, value)

    return change


def set_field(**fields: object) -> Change:
    def change(chunk: EmbeddingChunk) -> None:
        for name, value in fields.items():
            setattr(chunk, name, value)

    return change


def test_a_correct_chunk_passes() -> None:
    check_shape(layout())
    check_ready(ready(rows()))
    check_follows(ready(rows()), layout())
    check_fingerprint(ready(rows()), FINGERPRINT)
    check_fingerprint(ready(rows()), b"")
    assert lease_of(ready(rows()), "").lease_id == bytes(range(16))


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("part_idx", set_field(part_idx=1)),
        ("nbytes", set_field(nbytes=0)),
        ("tensors", set_field(nbytes=191)),
        ("tensors", set_tensor(name="rows")),
        ("tensors", lambda chunk: chunk.ClearField("tensors")),
        ("tensors", lambda chunk: chunk.tensors.append(chunk.tensors[0])),
        ("tensors", set_tensor(byte_offset=4)),
        ("tensors", set_tensor(strides=[36, 4])),
        ("tensors.dtype", set_tensor(dtype=99)),
        ("tensors.dtype", set_tensor(dtype=DataType.DATA_TYPE_UNSPECIFIED)),
        ("tensors.shape", set_tensor(strides=[4])),
        ("tensors.shape", set_tensor(shape=[], strides=[])),
        ("tensors.shape", set_tensor(shape=[0, 8])),
        ("tensors.shape", set_tensor(shape=[1] * 9, strides=[4] * 9)),
        ("tensors.strides", set_tensor(byte_offset=2)),
        ("tensors.strides", set_tensor(strides=[30, 4])),
        ("tensors[0].shape", set_tensor(shape=[6], strides=[4])),
        ("token_count", set_field(token_count=5)),
        ("generation", set_field(generation=0)),
        ("state", set_field(state=ChunkState.CHUNK_STATE_LAYOUT)),
        ("state", set_field(state=ChunkState.CHUNK_STATE_UNSPECIFIED)),
        ("checksum", lambda chunk: chunk.ClearField("checksum")),
        ("locators", lambda chunk: chunk.ClearField("locators")),
        ("encoder", lambda chunk: chunk.ClearField("encoder")),
    ],
)
def test_f12_f13_a_wrong_field_is_named(field: str, change: Change) -> None:
    with pytest.raises(ChunkError) as caught:
        check_ready(changed(ready(rows()), change))
    assert caught.value.field == field


@given(
    shape=st.lists(st.integers(0, 2**64 - 1), max_size=4),
    strides=st.lists(st.integers(0, 2**64 - 1), max_size=4),
    offset=st.integers(0, 2**64 - 1),
    nbytes=st.integers(0, 2**64 - 1),
)
def test_f13_no_accepted_tensor_reaches_outside_its_bytes(
    shape: list[int], strides: list[int], offset: int, nbytes: int
) -> None:
    chunk = changed(layout(), set_tensor(shape=shape, strides=strides, byte_offset=offset))
    chunk.nbytes, chunk.token_count = nbytes, shape[0] % 2**32 if shape else 0
    try:
        check_shape(chunk)
    except ChunkError:
        return
    corners = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    assert offset + corners + 4 <= nbytes


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("prompt_id", set_field(prompt_id="q")),
        ("request_id", set_field(request_id="q")),
        ("part_idx", set_field(part_idx=1)),
        ("num_parts", set_field(num_parts=9)),
        ("modality", set_field(modality=3)),
        ("compatibility_fingerprint", set_field(compatibility_fingerprint=bytes(32))),
        ("token_count", set_field(token_count=5)),
        ("nbytes", set_field(nbytes=384)),
        ("grid_dim", lambda chunk: chunk.grid_dim.append(1)),
        ("tensors", set_tensor(dtype=DataType.DATA_TYPE_INT32)),
        ("placeholder_metadata", lambda chunk: chunk.placeholder_metadata.add(name="x")),
        ("encoder", lambda chunk: chunk.encoder.CopyFrom(EncoderRef(instance_id="2" * 32))),
    ],
)
def test_f12_f13_ready_must_be_what_layout_said(field: str, change: Change) -> None:
    with pytest.raises(ChunkError) as caught:
        check_follows(changed(ready(rows()), change), layout())
    assert caught.value.field == field


def test_a_content_key_that_layout_told_must_stay() -> None:
    told = layout()
    told.content_key = bytes(32)
    with pytest.raises(ChunkError, match="content_key"):
        check_follows(ready(rows()), told)


def test_ready_may_be_smaller_than_a_bound_and_not_larger() -> None:
    bound = layout(count=7)
    bound.token_count_is_upper_bound = True
    check_follows(ready(rows(6)), bound)
    with pytest.raises(ChunkError, match="token_count: 8 is more"):
        check_follows(ready(rows(8)), bound)


ACCEPTED = Accepted("r", "p", 1, EncoderRef())


@pytest.mark.parametrize(
    ("field", "accepted", "parts"),
    [
        ("request_id", Accepted("other", "p", 1, EncoderRef()), {0}),
        ("prompt_id", Accepted("r", "other", 1, EncoderRef()), {0}),
        ("num_parts", Accepted("r", "p", 2, EncoderRef()), {0}),
        ("part_idx", ACCEPTED, {1}),
    ],
)
def test_f12_a_chunk_of_another_call_is_refused(field: str, accepted: Accepted, parts: set[int]) -> None:
    check_belongs(layout(), ACCEPTED, {0})
    with pytest.raises(ChunkError) as caught:
        check_belongs(layout(), accepted, parts)
    assert caught.value.field == field


def test_another_models_embedding_is_refused() -> None:
    with pytest.raises(ChunkError, match="compatibility_fingerprint"):
        check_fingerprint(layout(), bytes(32))
    with pytest.raises(ChunkError, match="32 bytes"):
        check_fingerprint(changed(layout(), set_field(compatibility_fingerprint=b"short")), b"")


def test_without_a_lease_there_is_no_read() -> None:
    with pytest.raises(ChunkError, match="'lm-3'"):
        lease_of(ready(rows()), "lm-3")
    chunk = ready(rows())
    chunk.leases[0].lease_id = b"short"
    with pytest.raises(ChunkError, match="5 bytes"):
        lease_of(chunk, "")


def test_no_error_tells_a_lease_or_a_slot_key() -> None:
    chunk = ready(rows())
    with pytest.raises(ChunkError) as caught:
        lease_of(chunk, "lm-3")
    assert chunk.leases[0].lease_id.hex() not in str(caught.value)
    assert repr(chunk.leases[0].lease_id) not in str(caught.value)
