"""Checksums of payloads that come in pieces, against those of the libraries over the whole."""

from __future__ import annotations

import itertools
import os
from typing import cast

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from encoder_client import ChunkError
from encoder_client.checksums import RunningChecksum
from epd.encoder.v1.embedding_pb2 import CHECKSUM_ALGORITHM_XXH3_64, Checksum, ChecksumAlgorithm

PAYLOAD = memoryview(os.urandom(1000))
XXH3 = Checksum(algorithm=CHECKSUM_ALGORITHM_XXH3_64, value=xxhash.xxh3_64_intdigest(PAYLOAD))


def cut(places: list[int]) -> list[tuple[int, int]]:
    """The payload in pieces: offset and length of each."""
    edges = sorted({0, len(PAYLOAD), *places})
    return [(start, end - start) for start, end in itertools.pairwise(edges)]


@given(st.lists(st.integers(0, 1000), max_size=8).map(cut).flatmap(st.permutations), st.integers(0, 9))
def test_pieces_in_any_order_or_not_at_all(pieces: list[tuple[int, int]], told: int) -> None:
    checksum = RunningChecksum(XXH3)
    for offset, length in pieces[:told]:
        checksum.take(PAYLOAD[offset : offset + length], offset)
    assert checksum.matches(PAYLOAD)


@given(st.lists(st.integers(0, 1000), max_size=8).map(cut), st.integers(0, 999))
def test_one_wrong_byte_is_seen(pieces: list[tuple[int, int]], place: int) -> None:
    damaged = bytearray(PAYLOAD)
    damaged[place] ^= 1
    checksum = RunningChecksum(XXH3)
    for offset, length in pieces:
        checksum.take(memoryview(damaged)[offset : offset + length], offset)
    assert not checksum.matches(memoryview(damaged))


def test_without_an_algorithm_everything_matches() -> None:
    assert RunningChecksum(Checksum()).matches(PAYLOAD)


def test_an_algorithm_of_a_later_version_is_not_passed_over() -> None:
    with pytest.raises(ChunkError, match="update encoder-client"):
        RunningChecksum(Checksum(algorithm=cast("ChecksumAlgorithm", 77)))
