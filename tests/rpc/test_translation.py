"""What ``rpc/`` makes of the runtime's answers, over a real channel."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.rpc.server import RpcServer
from encoder_svc.rpc.servicer import PIECE_BYTES
from encoder_svc.rpc.validation import MAX_PIECE_BYTES
from encoder_svc.runtime.events import ChunkEvent, Completed, LeaseRevoked, PartCancelled, PartFailed, Synced
from encoder_svc.settings import Settings
from encoder_svc.telemetry.metrics import Metrics
from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2_grpc import EncoderServiceStub
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from tests.rpc.calls import END_OF_STREAM, NARROW, SECONDS, events_of
from tests.rpc.scripted_runtime import ScriptedRuntime
from tests.rpc.statuses import reason_of, retry_of, status_of
from tests.waiting import eventually

REQUEST = pb.EncodeRequest(
    request_id="r", items=[MediaItem(part_idx=i, modality=Modality.MODALITY_IMAGE, data=b"x") for i in range(2)]
)


class Service:
    """A served scripted runtime and a stub to call it by."""

    def __init__(self, runtime: ScriptedRuntime, target: str, channel: grpc.aio.Channel, metrics: Metrics) -> None:
        self.runtime = runtime
        self.target = target
        self.stub: Any = EncoderServiceStub(channel)
        self.metrics = metrics

    def counted(self, method: str, code: str) -> float:
        """How many calls of a method ended so."""
        labels = {"method": method, "code": code}
        return self.metrics.registry.get_sample_value("encoder_svc_requests_total", labels) or 0.0


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    metrics = Metrics()
    server = RpcServer(Settings(model=Path("/nowhere"), listen="127.0.0.1:0"), metrics)
    runtime = ScriptedRuntime()
    await server.start(runtime)
    async with grpc.aio.insecure_channel(server.target) as channel:
        yield Service(runtime, server.target, channel, metrics)
    await server.stop(grace=0)


async def test_events_that_are_ready_together_travel_together(service: Service) -> None:
    call = service.stub.Encode(REQUEST)
    assert [event.WhichOneof("event") for event in (await call.read()).events] == ["accepted"]
    error = ServiceError(Reason.ENGINE_LOST, "the engine died")
    sink = service.runtime.sinks[0]
    sink(PartCancelled("p", "r", 0))
    sink(PartFailed("p", "r", 1, error))
    sink(Completed(ready=0, failed=1, cancelled=1, from_cache=0, total_seconds=1.5))
    events = (await call.read()).events
    assert [event.WhichOneof("event") for event in events] == ["part_cancelled", "part_failed", "complete"]
    assert reason_of(events[1].part_failed) == "ENGINE_LOST"
    assert retry_of(events[1].part_failed) == 1.0
    assert events[2].complete.total.ToMilliseconds() == 1500
    assert await call.read() is END_OF_STREAM
    assert await call.code() is grpc.StatusCode.OK
    await service.runtime.call.abandoned.wait()


async def test_f27_leaving_the_call_abandons_the_request(service: Service) -> None:
    call = service.stub.Encode(REQUEST)
    await call.read()
    call.cancel()
    await service.runtime.call.abandoned.wait()
    await eventually(lambda: service.counted("Encode", "CANCELLED") == 1)


async def test_the_runtime_learns_what_a_caller_that_left_was_not_told(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    async with grpc.aio.insecure_channel(service.target, options=NARROW) as channel:
        stub: Any = EncoderServiceStub(channel)
        call = stub.Encode(REQUEST)
        await call.read()
        sink = service.runtime.sinks[0]
        sink(ChunkEvent(EmbeddingChunk(prompt_id="p" * 10_000)))  # nobody reads it, so it is being written
        for _ in range(2):  # until the call has taken it
            await stub.GetServerInfo(pb.GetServerInfoRequest())
        untold = [PartCancelled("p", "r", 0), PartCancelled("p", "r", 1)]
        for event in untold:
            sink(event)
        call.cancel()
        await service.runtime.call.abandoned.wait()
    assert service.runtime.call.untold == untold
    await eventually(lambda: service.counted("Encode", "CANCELLED") == 1)
    assert not caplog.records, "that a caller leaves is no fault"


async def test_the_callers_deadline_reaches_the_runtime(service: Service) -> None:
    call = service.stub.Encode(REQUEST, timeout=SECONDS)
    await call.read()
    deadline = service.runtime.commands[0].deadline
    assert deadline is not None
    # gRPC may count the time that is left a little above what was given.
    assert service.runtime.now() < deadline < service.runtime.now() + SECONDS + 1
    call.cancel()


async def test_the_callers_deadline_ends_the_call(service: Service) -> None:
    # The first limit is long enough for the request to arrive, unless this machine is very busy.
    for seconds in (0.5, 5.0, 50.0):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await events_of(service.stub.Encode(REQUEST, timeout=seconds))
        assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        if service.runtime.submitted.is_set():
            break
    await service.runtime.call.abandoned.wait()


async def test_a_call_without_deadline_has_none(service: Service) -> None:
    call = service.stub.Encode(REQUEST)
    await call.read()
    assert service.runtime.commands[0].deadline is None
    call.cancel()


async def test_a_refusal_ends_the_call_with_its_status(service: Service) -> None:
    service.runtime.fault = ServiceError(Reason.ADMISSION_FULL, "the server is full; wait", retry_after=3)
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await service.stub.Encode(REQUEST).read()
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert failed.value.details() == "the server is full; wait"
    assert (reason_of(failed.value), retry_of(failed.value)) == ("ADMISSION_FULL", 3)
    assert service.counted("Encode", "RESOURCE_EXHAUSTED") == 1


async def test_f21_an_unexpected_error_is_told_without_its_text(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.runtime.fault = ValueError("10.0.0.7 data:image/png;base64,secret")
    with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as failed:
        await service.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert reason_of(failed.value) == "INTERNAL"
    assert b"secret" not in status_of(failed.value).SerializeToString()
    assert "unexpected error in GetServerInfo" in caplog.text
    service.runtime.fault = None
    assert (await service.stub.GetServerInfo(pb.GetServerInfoRequest())).encoder.instance_id == "me"


async def test_fetch_sends_the_range_in_pieces(service: Service) -> None:
    payload = service.runtime.payload = bytes(range(256)) * (10 << 10)  # 2.5 MiB
    pieces = [piece.data async for piece in service.stub.Fetch(pb.FetchRequest(lease_id=b"l"))]
    assert [len(piece) for piece in pieces] == [PIECE_BYTES, PIECE_BYTES, PIECE_BYTES // 2]
    assert b"".join(pieces) == payload
    some = [piece.data async for piece in service.stub.Fetch(pb.FetchRequest(lease_id=b"l", offset=7, length=9))]
    assert some == [payload[7:16]]
    at_end = pb.FetchRequest(lease_id=b"l", offset=len(payload))
    assert [piece async for piece in service.stub.Fetch(at_end)] == []


@pytest.mark.parametrize(("offset", "length"), [(0, 11), (10, 1), (11, 0), (2**64 - 1, 2**64 - 1)])
async def test_fetch_refuses_a_range_outside(service: Service, offset: int, length: int) -> None:
    service.runtime.payload = bytes(10)
    with pytest.raises(grpc.aio.AioRpcError, match="the slot has 10 bytes") as failed:
        await service.stub.Fetch(pb.FetchRequest(lease_id=b"l", offset=offset, length=length)).read()
    assert failed.value.code() is grpc.StatusCode.OUT_OF_RANGE
    assert service.runtime.reads == []


async def test_fetch_looks_at_the_lease_before_each_piece(service: Service) -> None:
    service.runtime.payload = bytes(3 * PIECE_BYTES)
    service.runtime.read_faults[PIECE_BYTES] = ServiceError(Reason.LEASE_EXPIRED, "the lease ran out")
    call = service.stub.Fetch(pb.FetchRequest(lease_id=b"l"))
    assert len((await call.read()).data) == PIECE_BYTES
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call.read()
    assert reason_of(failed.value) == "LEASE_EXPIRED"


async def test_leases_are_answered_in_order(service: Service) -> None:
    leases = [pb.LeaseRelease(lease_id=b"one"), pb.LeaseRelease(lease_id=b"")]
    released = await service.stub.Release(pb.ReleaseRequest(leases=leases))
    states = [pb.LEASE_STATE_HELD, pb.LEASE_STATE_UNKNOWN]
    assert [(lease.lease_id, lease.state) for lease in released.leases] == list(zip([b"one", b""], states, strict=True))
    renewed = await service.stub.Renew(pb.RenewRequest(lease_ids=[b"one"], ttl={"seconds": 2}))
    assert [lease.ttl.ToMilliseconds() for lease in renewed.leases] == [2000]


async def test_cancel_goes_to_the_runtime(service: Service) -> None:
    answer = await service.stub.Cancel(pb.CancelRequest(prompt_id="p"))
    assert (answer.requests, answer.parts) == (1, 2)
    assert [(command.kind, command.id) for command in service.runtime.cancels] == [("prompt", "p")]


async def test_an_upload_goes_to_the_runtime_piece_by_piece(service: Service) -> None:
    header = pb.UploadRequest(header=pb.UploadHeader(total_bytes=5, sha256=bytes(32)))
    answer = await service.stub.Upload(iter([header, *(pb.UploadRequest(piece=piece) for piece in (b"ab", b"cde"))]))
    (upload,) = service.runtime.uploads
    assert (upload.total_bytes, service.runtime.pieces) == (5, [b"ab", b"cde"])
    assert (answer.upload_id, answer.sha256) == (upload.id, bytes(32))
    # The clock of the day may be set meanwhile.
    assert 0 < answer.expiry.ToNanoseconds() / 1e9 - time.time() < 61


BAD_UPLOADS = {
    "nothing": [],
    "no header": [pb.UploadRequest(piece=b"x")],
    "two headers": [pb.UploadRequest(header=pb.UploadHeader(total_bytes=1))] * 2,
    "an empty message": [pb.UploadRequest(header=pb.UploadHeader(total_bytes=1)), pb.UploadRequest()],
    "a short digest": [pb.UploadRequest(header=pb.UploadHeader(total_bytes=1, sha256=b"short"))],
    "a piece too large": [
        pb.UploadRequest(header=pb.UploadHeader(total_bytes=1)),
        pb.UploadRequest(piece=bytes(MAX_PIECE_BYTES + 1)),
    ],
}


@pytest.mark.parametrize("messages", BAD_UPLOADS.values(), ids=BAD_UPLOADS.keys())
async def test_a_wrong_upload_is_refused_and_abandoned(service: Service, messages: list[pb.UploadRequest]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await service.stub.Upload(iter(messages))
    assert reason_of(failed.value) == "REQUEST_INVALID"
    assert service.runtime.abandoned == service.runtime.uploads


async def test_f27_leaving_an_upload_abandons_it(service: Service) -> None:
    call = service.stub.Upload()
    await call.write(pb.UploadRequest(header=pb.UploadHeader(total_bytes=9)))
    await eventually(lambda: len(service.runtime.uploads) == 1)
    call.cancel()
    await eventually(lambda: service.runtime.abandoned == service.runtime.uploads)


async def test_an_acquire_goes_to_the_runtime(service: Service) -> None:
    request = pb.AcquireRequest(
        content_key=bytes(32), receivers=["", "lm"], prompt_id="p", part_idx=1, num_parts=2, lease_ttl={"seconds": 3}
    )
    assert (await service.stub.Acquire(request)).chunk.prompt_id == "p"
    (command,) = service.runtime.acquired
    assert (command.content_key, command.receivers, command.prompt_id) == (bytes(32), ("", "lm"), "p")
    assert (command.part_idx, command.num_parts, command.lease_ttl, command.identity) == (1, 2, 3, "")


async def test_a_receiver_is_told_every_kind_of_event_and_how_its_subscription_ends(service: Service) -> None:
    subscription = service.runtime.subscription
    fault = ServiceError(Reason.LEASE_EXPIRED, "too late")
    subscription.tell(ChunkEvent(EmbeddingChunk(prompt_id="p", part_idx=1)))
    subscription.tell(Synced(events=1))
    call = service.stub.Subscribe(pb.SubscribeRequest(receiver_id="lm-3/tp0", incarnation=7))
    assert (await call.read()).chunk.part_idx == 1
    assert (await call.read()).synced == pb.Synced(events=1)
    subscription.tell(PartFailed("p", "r", 2, ServiceError(Reason.MEDIA_CORRUPT, "own words")))
    subscription.tell(PartCancelled("p", "r", 3))
    subscription.tell(LeaseRevoked(bytes(16), "p", "r", 4, fault))
    failed = (await call.read()).part_failed
    assert (failed.prompt_id, failed.request_id, failed.part_idx) == ("p", "r", 2)
    assert failed.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert (await call.read()).part_cancelled == pb.PartCancelled(prompt_id="p", request_id="r", part_idx=3)
    revoked = (await call.read()).lease_revoked
    assert (revoked.lease_id, revoked.prompt_id, revoked.request_id, revoked.part_idx) == (bytes(16), "p", "r", 4)
    assert revoked.status.message == "too late"
    assert not subscription.left.is_set()
    subscription.tell(ServiceError(Reason.SUBSCRIPTION_SUPERSEDED, "another one"))
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call.read()
    assert (ended.value.code(), reason_of(ended.value)) == (grpc.StatusCode.ABORTED, "SUBSCRIPTION_SUPERSEDED")
    await subscription.left.wait()
    (command,) = service.runtime.subscribed
    assert (command.identity, command.receiver, command.incarnation) == ("", "lm-3/tp0", 7)


async def test_a_receiver_that_leaves_is_noticed(service: Service) -> None:
    call = service.stub.Subscribe(pb.SubscribeRequest(receiver_id="lm"))
    await eventually(lambda: len(service.runtime.subscribed) == 1)
    call.cancel()
    await service.runtime.subscription.left.wait()


async def test_f39_a_receiver_that_does_not_read_is_not_written_to(service: Service) -> None:
    subscription = service.runtime.subscription
    subscription.events.extend([ChunkEvent(EmbeddingChunk(prompt_id="p" * 50_000))] * 2000)
    call = service.stub.Subscribe(pb.SubscribeRequest(receiver_id="lm"))
    await eventually(lambda: len(subscription.events) < 2000)

    async def nothing_more_is_written() -> bool:
        left = len(subscription.events)
        for _ in range(50):
            await service.stub.GetServerInfo(pb.GetServerInfoRequest())
        return len(subscription.events) == left

    # Other calls are answered; between them nothing more is written once what is under way is full.
    await eventually(nothing_more_is_written)
    assert len(subscription.events) > 1000
    for _ in range(2000):
        assert (await call.read()).HasField("chunk")
    call.cancel()


@pytest.mark.parametrize("name", ["", "x" * 257, "a\nb"])
async def test_a_receiver_needs_a_proper_name(service: Service, name: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="receiver_id") as failed:
        await service.stub.Subscribe(pb.SubscribeRequest(receiver_id=name)).read()
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert service.runtime.subscribed == []
