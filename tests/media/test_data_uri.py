"""``data:`` addresses of all kinds."""

from __future__ import annotations

import asyncio
import base64
import re
import time
from urllib.parse import quote_from_bytes

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media import data_uri
from encoder_svc.media.data_uri import decode_data_uri
from encoder_svc.media.fetch import Fetcher
from encoder_svc.media.fetch_policy import FetchPolicy

LIMIT = 256 << 10


@pytest.mark.parametrize(
    ("uri", "data"),
    [
        ("data:,", b""),
        ("data:,hello", b"hello"),
        ("data:,a%20b%2Cc+d", b"a b,c+d"),
        ("data:text/plain;charset=utf-8,%e2%82%ac", "€".encode()),
        ("data:,€", "€".encode()),
        ("data:,100%", b"100%"),
        ("data:,%zz", b"%zz"),
        ("data:,a#fragment,%00", b"a"),
        ("data:;base64,", b""),
        ("data:;base64,aGVsbG8=", b"hello"),
        ("data:;base64,aGVsbG8", b"hello"),
        ("data:;base64,aGVsbG8%3D", b"hello"),
        ("data:;base64,%61%47VsbG8=#x", b"hello"),
        ("data:image/png;base64,aGVs\r\nbG8=\n", b"hello"),
        ("data:image/png;charset=x;BASE64 ,aGVsbG8=", b"hello"),
        ("data:base64,aGVsbG8=", b"aGVsbG8="),
        ("data:;base64;x=y,aGVsbG8=", b"aGVsbG8="),
    ],
)
def test_it_is_read_as_browsers_read_it(uri: str, data: bytes) -> None:
    assert decode_data_uri(uri, LIMIT) == data


@pytest.mark.parametrize(
    "uri",
    [
        "data:", "data:;base64", "data:" + "x" * 2000 + ",a", "data:;base64,a", "data:;base64,aGVsbG8==",
        "data:;base64,=",
        "data:;base64,aaaa=", "data:;base64,aaaa====", "data:;base64,a===", "data:;base64,aG=VsbG8",
        "data:;base64,aGVsbG8=aGVsbG8=", "data:;base64,a-_b", "data:;base64,aGV!",
        "data:;base64,€€€€",
        "data:;base64,aGVsbG8=" + "aaaa" * 50_000, "data:;base64," + "aaaa" * 50_000 + "=",
    ],
)  # fmt: skip
def test_damage_is_told(uri: str) -> None:
    with pytest.raises(ServiceError) as failed:
        decode_data_uri(uri, LIMIT)
    assert failed.value.reason is Reason.REQUEST_INVALID
    assert "aGV" not in failed.value.message


@given(data=st.binary(max_size=400), width=st.integers(1, 80), escaped=st.booleans(), slices=st.integers(1, 97))
def test_whatever_the_slices_cut_through_the_bytes_are_the_same(
    data: bytes, width: int, escaped: bool, slices: int
) -> None:
    text = base64.b64encode(data).decode()
    wrapped = "\r\n".join(re.findall(f".{{1,{width}}}", text))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(data_uri, "_SLICE", slices)
        patch.setattr(data_uri, "_ESCAPED_SLICE", slices)
        patch.setattr(data_uri, "_PAUSE", 0)
        assert (
            decode_data_uri("data:;base64," + (quote_from_bytes(text.encode(), "") if escaped else wrapped), LIMIT)
            == data
        )
        assert decode_data_uri("data:," + quote_from_bytes(data, ""), LIMIT) == data
        assert decode_data_uri("data:," + "".join(f"%{byte:02x}" for byte in data), LIMIT) == data


def test_f20_the_limit_is_exact_and_seen_before_all_is_decoded() -> None:
    for size in (1000, LIMIT):
        data = bytes(size)
        for uri in (
            "data:;base64," + base64.b64encode(data).decode(),
            "data:," + "%00" * size,
            "data:;base64," + "".join(f"%{byte:02x}" for byte in base64.b64encode(data)),
        ):
            assert decode_data_uri(uri, size) == data
            with pytest.raises(ServiceError) as failed:
                decode_data_uri(uri, size - 1)
            assert failed.value.reason is Reason.FETCH_TOO_LARGE
    huge = "data:;base64," + "AAAA" * (16 << 20)
    begun = time.thread_time()
    with pytest.raises(ServiceError) as failed:
        decode_data_uri(huge, 1000)
    assert failed.value.reason is Reason.FETCH_TOO_LARGE
    assert time.thread_time() - begun < 0.05


async def test_large_and_small_ones_through_the_fetcher() -> None:
    async with Fetcher(FetchPolicy()) as fetcher:
        for size in (10, 1 << 20):
            data = bytes(range(256)) * (size // 256) + b"end"
            uri = "DATA:image/png;base64," + base64.b64encode(data).decode()
            assert await fetcher.fetch(uri) == data
            with pytest.raises(ServiceError) as failed:
                await fetcher.fetch(uri, limit_bytes=len(data) - 1)
            assert failed.value.reason is Reason.FETCH_TOO_LARGE


def test_a_large_one_is_not_decoded_on_the_loop() -> None:
    data = bytes(24 << 20)
    uri = "data:;base64," + base64.b64encode(data).decode()

    async def busy() -> tuple[float, int]:
        loop_seconds = time.thread_time()
        async with Fetcher(FetchPolicy()) as fetcher:
            loop_seconds = time.thread_time()
            fetched = await fetcher.fetch(uri)
            loop_seconds = time.thread_time() - loop_seconds
        return loop_seconds, len(fetched)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        loop_seconds, size = runner.run(busy())
    assert size == len(data)
    # The processor time of the loop's thread; decoding takes several times as long.
    assert loop_seconds < 0.05
