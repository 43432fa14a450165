"""``data:`` addresses of all kinds."""

from __future__ import annotations

import asyncio
import base64
import re
import threading
from urllib.parse import quote_from_bytes

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media import data_uri
from encoder_svc.media import fetch as media_fetch
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


def test_f20_the_limit_is_exact_and_seen_before_all_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
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
    decoded = 0
    from_base64 = data_uri._from_base64

    def counted(encoded: bytes, *, is_last: bool) -> bytes:
        nonlocal decoded
        data = from_base64(encoded, is_last=is_last)
        decoded += len(data)
        return data

    monkeypatch.setattr(data_uri, "_from_base64", counted)
    for characters, limit in ((64 << 20, 1000), (4 << 20, 2 << 20)):
        with pytest.raises(ServiceError) as failed:
            decode_data_uri("data:;base64," + "A" * characters, limit)
        assert failed.value.reason is Reason.FETCH_TOO_LARGE
        assert decoded <= limit + data_uri._SLICE


async def test_large_and_small_ones_through_the_fetcher() -> None:
    async with Fetcher(FetchPolicy()) as fetcher:
        for size in (10, 1 << 20):
            data = bytes(range(256)) * (size // 256) + b"end"
            uri = "DATA:image/png;base64," + base64.b64encode(data).decode()
            assert await fetcher.fetch(uri) == data
            with pytest.raises(ServiceError) as failed:
                await fetcher.fetch(uri, limit_bytes=len(data) - 1)
            assert failed.value.reason is Reason.FETCH_TOO_LARGE


def test_a_large_one_is_not_decoded_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(24 << 20)
    uri = "data:;base64," + base64.b64encode(data).decode()
    threads: list[threading.Thread] = []

    def decode(uri: str, limit: int) -> bytes:
        threads.append(threading.current_thread())
        return decode_data_uri(uri, limit)

    monkeypatch.setattr(media_fetch, "decode_data_uri", decode)

    async def fetched() -> bytes:
        async with Fetcher(FetchPolicy()) as fetcher:
            return await fetcher.fetch(uri)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(fetched()) == data
    assert len(threads) == 1
    assert threading.current_thread() not in threads
