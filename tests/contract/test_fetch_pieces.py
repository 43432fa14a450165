"""Pieces written and parsed by hand are what the protobuf runtime writes and parses."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epd.encoder.v1.encoder_service_pb2 import FetchResponse
from epd.fetch_pieces import parse_piece, write_piece

LENGTHS = st.one_of(st.integers(0, 300), st.sampled_from([127, 128, 16_383, 16_384, 1 << 20]))


@given(LENGTHS)
def test_what_is_written_is_the_message(length: int) -> None:
    data = bytes(range(256)) * (length // 256 + 1)
    wire = write_piece(memoryview(data)[:length])
    assert FetchResponse.FromString(wire) == FetchResponse(data=data[:length])
    assert parse_piece(wire) == data[:length]
    assert parse_piece(FetchResponse(data=data[:length]).SerializeToString()) == data[:length]


@given(st.binary(max_size=40))
def test_whatever_comes_is_parsed_as_the_runtime_does_it_or_refused(wire: bytes) -> None:
    try:
        expected = FetchResponse.FromString(wire).data
    except Exception:  # it has an error of its own
        with pytest.raises(ValueError, match="no FetchResponse"):
            parse_piece(wire)
    else:
        assert parse_piece(wire) == expected


def test_a_field_of_a_later_version_is_passed_over() -> None:
    assert bytes(parse_piece(FetchResponse(data=b"rows").SerializeToString() + b"\x10\x07")) == b"rows"
