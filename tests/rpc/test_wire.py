"""Taking requests apart gives what the protobuf runtime gives, whatever the bytes; and what is taken out can go."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ByteSize

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.rpc import wire
from encoder_svc.rpc.server import RpcServer
from encoder_svc.rpc.wire import parse_encode_request
from encoder_svc.settings import Settings
from encoder_svc.telemetry.metrics import Metrics
from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.encoder_service_pb2_grpc import EncoderServiceStub
from epd.encoder.v1.media_pb2 import FrameSequence, MediaItem, Modality
from tests.rpc.scripted_runtime import ScriptedRuntime
from tests.rpc.statuses import reason_of
from tests.waiting import eventually

short_bytes = st.binary(max_size=40)
names = st.text(max_size=8)
small = st.integers(0, 2**31 - 1)
doubles = st.floats(allow_nan=False)

sources = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"data": st.one_of(short_bytes, st.binary(min_size=120, max_size=300))}),
    st.fixed_dictionaries({"uri": names}),
    st.fixed_dictionaries({"upload_id": names}),
    st.fixed_dictionaries({"content_key": short_bytes}),
    st.fixed_dictionaries({"frames": st.builds(FrameSequence, frames=st.lists(short_bytes, max_size=3), fps=doubles)}),
)
options: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"image": st.fixed_dictionaries({"min_pixels": small, "max_pixels": small})}),
    st.fixed_dictionaries({"video": st.fixed_dictionaries({"fps": doubles, "use_audio_in_video": st.booleans()})}),
    st.fixed_dictionaries({"audio": st.fixed_dictionaries({"start_seconds": doubles})}),
)


@st.composite
def items(draw: st.DrawFn) -> MediaItem:
    """Any item."""
    return MediaItem(
        part_idx=draw(small),
        modality=draw(st.integers(0, 9)),  # type: ignore[arg-type] # also what is no Modality
        mime_type=draw(names),
        content_sha256=draw(short_bytes),
        **draw(sources),
        **draw(options),
    )


@st.composite
def item_wires(draw: st.DrawFn) -> bytes:
    """Any item, or several of them run together: then the last source counts, and messages merge."""
    return b"".join(item.SerializeToString() for item in draw(st.lists(items(), min_size=1, max_size=3)))


@st.composite
def request_wires(draw: st.DrawFn) -> bytes:
    """Any request, with fields of a later version, in any order."""
    request = pb.EncodeRequest(
        request_id=draw(names),
        prompt_id=draw(names),
        num_parts=draw(small),
        receivers=draw(st.lists(names, max_size=2)),
        delivery=draw(st.integers(0, 5)),  # type: ignore[arg-type] # also what is no Delivery
        priority=draw(st.integers(-5, 5)),
        cache_salt=draw(short_bytes),
        lease_ttl=draw(st.one_of(st.none(), st.just({"seconds": 3}))),
        skip_layout=draw(st.booleans()),
    )
    later = [b"\xf8\x07\x05", b"\xf9\x07" + bytes(8), b"\xfd\x07" + bytes(4), b"\xfa\x07\x02hi", b"\x23\x08\x01\x24"]
    pieces = [request.SerializeToString(), *draw(st.lists(st.sampled_from(later), max_size=2))]
    pieces += [b"\x22" + wire._varint(len(item)) + item for item in draw(st.lists(item_wires(), max_size=4))]
    return b"".join(draw(st.permutations(pieces)))


def whole(parsed: tuple[pb.EncodeRequest, dict[int, bytes]]) -> pb.EncodeRequest:
    """The message that was taken apart."""
    request, files = parsed
    for index, item in enumerate(request.items):
        assert not item.data, "a file was left in the message"
        if index in files:
            assert item.WhichOneof("source") == "data"
            item.data = files[index]
    assert all(index < len(request.items) for index in files)
    return request


def both_agree(message: bytes) -> None:
    """The protobuf runtime and the code here make the same of some bytes."""
    try:
        expected = pb.EncodeRequest.FromString(message)
    except DecodeError:
        with pytest.raises(ServiceError) as refused:
            parse_encode_request(message)
        assert refused.value.reason is Reason.REQUEST_INVALID
    else:
        # As bytes: a NaN, which damage can make, is equal to nothing.
        taken_apart = whole(parse_encode_request(message))
        assert taken_apart.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)


@pytest.fixture(autouse=True, scope="module")
def scan_everything() -> Iterator[None]:
    """Small messages take the way of large ones."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "_SMALL_BYTES", -1)
        yield


@settings(max_examples=100, deadline=None)
@given(request_wires())
def test_any_request_comes_through_whole(message: bytes) -> None:
    both_agree(message)


@settings(max_examples=100, deadline=None)
@given(request_wires(), st.data())
def test_damaged_bytes_are_judged_as_by_protobuf(message: bytes, data: st.DataObject) -> None:
    damaged = bytearray(message)
    for _ in range(data.draw(st.integers(1, 3))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    both_agree(bytes(damaged[: data.draw(st.integers(0, len(damaged)))]))


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_judged_as_by_protobuf(message: bytes) -> None:
    both_agree(message)


def test_the_last_source_counts() -> None:
    def item(*sources: MediaItem) -> bytes:
        joined = b"".join(source.SerializeToString() for source in sources)
        return b"\x22" + wire._varint(len(joined)) + joined

    first, second = MediaItem(data=b"first"), MediaItem(data=b"second")
    uri = MediaItem(uri="data:,x")
    message = item(first, second) + item(first, uri) + item(uri, first) + item(uri)
    request, files = parse_encode_request(message)
    assert files == {0: b"second", 2: b"first"}
    assert [each.WhichOneof("source") for each in request.items] == ["data", "uri", "data", "uri"]


@dataclass(frozen=True)
class Service:
    """A served scripted runtime."""

    runtime: ScriptedRuntime
    channel: grpc.aio.Channel


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    limit = ByteSize(16 << 20)
    server = RpcServer(Settings(model=Path("/nowhere"), listen="127.0.0.1:0", max_inline_bytes=limit), Metrics())
    runtime = ScriptedRuntime()
    await server.start(runtime)
    async with grpc.aio.insecure_channel(server.target) as channel:
        yield Service(runtime, channel)
    await server.stop(grace=0)


def traced() -> int:
    """Bytes that live."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


async def test_media_go_when_the_runtime_lets_go_of_them(service: Service) -> None:
    runtime = service.runtime
    stub: Any = EncoderServiceStub(service.channel)
    size = 8 << 20
    request = pb.EncodeRequest(items=[MediaItem(modality=Modality.MODALITY_IMAGE, data=bytes(size))])
    tracemalloc.start()
    try:
        call = stub.Encode(request)
        await call.read()
        assert [item.files for item in runtime.commands[0].items] == [(bytes(size),)]
        assert traced() > 0.99 * size
        runtime.commands.clear()
        # The call goes on, and holds nothing of them. What was sent goes when the loop has seen that it was.
        await eventually(lambda: traced() < 1 << 20)
    finally:
        tracemalloc.stop()
    call.cancel()


@pytest.mark.parametrize("messages", [[], [b"\xff\xff"]], ids=["nothing", "no request"])
async def test_a_call_without_a_request_is_refused(service: Service, messages: list[bytes]) -> None:
    call = service.channel.stream_stream("/epd.encoder.v1.EncoderService/Encode", None, None)(iter(messages))
    with pytest.raises(grpc.aio.AioRpcError, match="request: is ") as refused:
        await call.read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(refused.value) == "REQUEST_INVALID"
    assert service.runtime.commands == []
