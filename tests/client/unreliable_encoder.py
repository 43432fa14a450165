"""An encoder whose calls meet the fates that a test draws, on a real gRPC server; it counts its leases."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import AsyncIterator, Iterable
from enum import Enum
from typing import Any

import grpc
import numpy as np
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1.health_pb2 import HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthServicer, add_HealthServicer_to_server

from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2_grpc import EncoderServiceServicer, add_EncoderServiceServicer_to_server
from epd.encoder.v1.media_pb2 import MediaItem
from tests.client.chunks import FINGERPRINT, layout, ready

ROWS, WIDTH = 1, 8
SHORT_TTL = 0.5


class Fate(Enum):
    """What a call meets."""

    GOOD = "good"
    BUSY = "busy"
    """Refused, with a time to come again."""
    UNREACHABLE = "unreachable"
    """It breaks before it is accepted."""
    CUT_AFTER_LAYOUT = "cut after the layouts"
    CUT_AFTER_READY = "cut after the first READY"
    FAULT = "fault"
    """The engine dies during the last part of the call."""
    REVOKED = "revoked"
    """The engine dies after READY: nothing can be read."""
    CONTRADICTION = "contradiction"
    """READY is not what LAYOUT said."""


def payload_of(item: MediaItem) -> bytes:
    """What an encoder makes of an item: ROWS x WIDTH floats."""
    return hashlib.sha256(item.data).digest()


def status_of(code: grpc.StatusCode, reason: str, retry_after: float) -> status_pb2.Status:
    details = []
    for detail in (
        error_details_pb2.ErrorInfo(reason=reason, domain="encoder-svc"),
        error_details_pb2.RetryInfo(retry_delay=Duration(nanos=int(retry_after * 1e9))),
    ):
        packed = AnyMessage()
        packed.Pack(detail)
        details.append(packed)
    return status_pb2.Status(code=code.value[0], message="as the test wants it", details=details)


class UnreliableEncoder(EncoderServiceServicer, HealthServicer):  # type: ignore[misc] # its class has no types
    """Answers each call as the next fate says, and the calls after those well."""

    def __init__(self, fates: Iterable[Fate] = ()) -> None:
        self.fates = list(fates)
        self.instance_id = secrets.token_hex(16)
        self.fingerprint = FINGERPRINT
        self.leases: dict[bytes, bytes] = {}
        """Live, with what can be read by them."""
        self.asked: list[tuple[str, list[int]]] = []
        """The prompt and the parts of each call."""
        self.target = ""
        self.silent = False
        """It answers nothing, and breaks nothing either."""
        self.released = asyncio.Event()
        """A release has come."""
        self.confirms = asyncio.Event()
        """It answers releases. As long as this is not set, they wait."""
        self.confirms.set()
        self._server: Any = None

    async def start(self) -> str:
        """Serves on a free port of the loopback, and tells the target."""
        self._server = grpc.aio.server(options=[("grpc.max_receive_message_length", 8 << 20)])
        add_EncoderServiceServicer_to_server(self, self._server)
        add_HealthServicer_to_server(self, self._server)
        self.target = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self.target

    async def stop(self) -> None:
        """Ends all calls."""
        server, self._server = self._server, None  # it must be gone before the event loop is
        if server is not None:
            await server.stop(None)

    async def Check(self, request: Any, context: Any) -> HealthCheckResponse:  # noqa: N802 # the name of the call
        await self._listen()
        return HealthCheckResponse(status=HealthCheckResponse.SERVING)

    async def GetServerInfo(  # noqa: N802 # the name of the call
        self, request: pb.GetServerInfoRequest, context: Any
    ) -> pb.GetServerInfoResponse:
        info = pb.GetServerInfoResponse(limits=pb.Limits(max_items=4, max_message_bytes=4 << 20))
        info.encoder.instance_id, info.encoder.grpc_target = self.instance_id, self.target
        info.model.compatibility_fingerprint, info.model.cache_namespace = self.fingerprint, bytes(32)
        return info

    async def Encode(  # noqa: N802 # the name of the call
        self, request: pb.EncodeRequest, context: Any
    ) -> AsyncIterator[pb.EncodeResponse]:
        fate = self.fates.pop(0) if self.fates else Fate.GOOD
        self.asked.append((request.prompt_id, [item.part_idx for item in request.items]))
        await self._listen()
        if fate is Fate.BUSY:
            await self._refuse(context, status_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "ADMISSION_FULL", 0.01))
        if fate is Fate.UNREACHABLE:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection is gone")
        accepted = pb.Accepted(request_id=request.request_id, prompt_id=request.prompt_id, num_parts=request.num_parts)
        accepted.encoder.instance_id, accepted.encoder.grpc_target = self.instance_id, self.target
        yield pb.EncodeResponse(events=[pb.Event(accepted=accepted)])
        yield pb.EncodeResponse(events=[pb.Event(chunk=self._layout(request, item)) for item in request.items])
        if fate is Fate.CUT_AFTER_LAYOUT:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection is gone")
        for item in request.items:
            if fate is Fate.FAULT and item is request.items[-1]:
                failed = pb.PartFailed(
                    prompt_id=request.prompt_id, request_id=request.request_id, part_idx=item.part_idx,
                    status=status_of(grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST", 0.01),
                )  # fmt: skip
                yield pb.EncodeResponse(events=[pb.Event(part_failed=failed)])
                continue
            chunk = self._ready(request, item, fate)
            if fate is Fate.CONTRADICTION:
                chunk.grid_dim[:] = [9, 9, 9]
            yield pb.EncodeResponse(events=[pb.Event(chunk=chunk)])
            if fate is Fate.CUT_AFTER_READY:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection is gone")
        yield pb.EncodeResponse(events=[pb.Event(complete=pb.Complete(ready=len(request.items)))])

    async def Fetch(  # noqa: N802 # the name of the call
        self, request: pb.FetchRequest, context: Any
    ) -> AsyncIterator[pb.FetchResponse]:
        if request.lease_id not in self.leases:
            await context.abort(grpc.StatusCode.ABORTED, "the lease was revoked")
        yield pb.FetchResponse(data=self.leases[request.lease_id])

    async def Release(  # noqa: N802 # the name of the call
        self, request: pb.ReleaseRequest, context: Any
    ) -> pb.ReleaseResponse:
        self.released.set()
        await self.confirms.wait()

        def state(lease: bytes) -> pb.LeaseState:
            held = self.leases.pop(lease, None) is not None
            return pb.LeaseState.LEASE_STATE_HELD if held else pb.LeaseState.LEASE_STATE_REVOKED

        return pb.ReleaseResponse(
            leases=[pb.LeaseStatus(lease_id=lease.lease_id, state=state(lease.lease_id)) for lease in request.leases]
        )

    async def _listen(self) -> None:
        if self.silent:
            await asyncio.Event().wait()

    async def _refuse(self, context: Any, status: status_pb2.Status) -> None:
        code = next(code for code in grpc.StatusCode if code.value[0] == status.code)
        metadata = (("grpc-status-details-bin", status.SerializeToString()),)
        await context.abort(code, status.message, metadata)

    def _layout(self, request: pb.EncodeRequest, item: MediaItem) -> EmbeddingChunk:
        return self._named(layout(ROWS, WIDTH, item.part_idx, request.num_parts), request)

    def _ready(self, request: pb.EncodeRequest, item: MediaItem, fate: Fate) -> EmbeddingChunk:
        data = payload_of(item)
        rows = np.frombuffer(data, np.float32).reshape(ROWS, WIDTH)
        chunk = self._named(ready(rows, item.part_idx, request.num_parts), request)
        chunk.content_key = hashlib.sha256(data).digest()
        chunk.leases[0].lease_id = secrets.token_bytes(16)
        if fate is not Fate.REVOKED:
            self.leases[chunk.leases[0].lease_id] = data
        if fate is Fate.CUT_AFTER_READY or (fate is Fate.CONTRADICTION and item is not request.items[0]):
            # Nobody may ever see it: it ends by its time, as every lease does. Whoever sees a contradiction gives its
            # lease back, and hears no more of the call.
            asyncio.get_running_loop().call_later(SHORT_TTL, self.leases.pop, chunk.leases[0].lease_id, None)
        return chunk

    def _named(self, chunk: EmbeddingChunk, request: pb.EncodeRequest) -> EmbeddingChunk:
        chunk.request_id, chunk.prompt_id = request.request_id, request.prompt_id
        chunk.encoder.instance_id, chunk.encoder.grpc_target = self.instance_id, self.target
        chunk.compatibility_fingerprint = self.fingerprint
        return chunk
