"""An encoder that does what a test tells it to, on a real gRPC server, for faults that a correct one never makes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from grpc_status import rpc_status

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.rpc.errors import to_status
from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2_grpc import EncoderServiceServicer, add_EncoderServiceServicer_to_server


class ScriptedEncoder(EncoderServiceServicer):
    """Tells the given chunks, serves the given bytes, and answers releases as told.

    Args:
        chunks: in the order in which they are told; each is moved to its call's ids.
        payload: what ``Fetch`` sends.
    """

    def __init__(self, chunks: Sequence[EmbeddingChunk] = (), payload: Callable[[], bytes] = bytes) -> None:
        self.chunks = list(chunks)
        self.payload = payload
        self.state = pb.LeaseState.LEASE_STATE_HELD
        self.release_failures = 0
        self.releases: list[list[pb.LeaseRelease]] = []
        self.fetches = 0
        self.encodes: list[pb.EncodeRequest] = []
        self.authorizations: list[str] = []
        """What the calls of `Encode` were authorized by."""
        self.refusals = 0
        """So many calls are refused for now."""
        self.cached: EmbeddingChunk | None = None
        """What ``Acquire`` finds."""
        self.acquires_go_on = asyncio.Event()
        """``Acquire`` answers. As long as this is not set, it waits."""
        self.acquires_go_on.set()
        self.acquires: list[pb.AcquireRequest] = []
        self.hang = False
        """The call never completes: only a cancel ends it."""
        self.ended = asyncio.Event()
        self.released = asyncio.Event()
        self.asked_to_cancel = asyncio.Event()
        self.target = ""

    async def Encode(  # noqa: N802 # the name of the call
        self, request: pb.EncodeRequest, context: Any
    ) -> AsyncIterator[pb.EncodeResponse]:
        # A cancel may come while a message is on its way: then it is not raised in here.
        context.add_done_callback(lambda _: self.ended.set())
        self.encodes.append(request)
        self.authorizations += [value for key, value in context.invocation_metadata() if key == "authorization"]
        if self.refusals:
            self.refusals -= 1
            full = ServiceError(Reason.ADMISSION_FULL, "come back in a moment", retry_after=0.01)
            await context.abort_with_status(rpc_status.to_status(to_status(full)))
        accepted = pb.Accepted(request_id="r", prompt_id="p", num_parts=len(request.items))
        accepted.encoder.instance_id, accepted.encoder.grpc_target = "1" * 32, self.target
        yield pb.EncodeResponse(events=[pb.Event(accepted=accepted)])
        yield pb.EncodeResponse(events=[pb.Event(chunk=chunk) for chunk in self.chunks])
        if self.hang:
            await asyncio.Event().wait()
        yield pb.EncodeResponse(events=[pb.Event(complete=pb.Complete(ready=len(request.items)))])

    async def Subscribe(  # noqa: N802 # the name of the call
        self, request: pb.SubscribeRequest, context: Any
    ) -> AsyncIterator[pb.SubscribeResponse]:
        for chunk in self.chunks:
            yield pb.SubscribeResponse(chunk=chunk)
        yield pb.SubscribeResponse(synced=pb.Synced(events=len(self.chunks)))
        await asyncio.Event().wait()

    async def Acquire(  # noqa: N802 # the name of the call
        self, request: pb.AcquireRequest, context: Any
    ) -> pb.AcquireResponse:
        self.acquires.append(request)
        await self.acquires_go_on.wait()
        if self.cached is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "it is not here")
        return pb.AcquireResponse(chunk=self.cached)

    async def Fetch(  # noqa: N802 # the name of the call
        self, request: pb.FetchRequest, context: Any
    ) -> AsyncIterator[pb.FetchResponse]:
        self.fetches += 1
        data = self.payload()
        for start in range(0, len(data), 64):
            yield pb.FetchResponse(data=data[start : start + 64])

    async def Release(  # noqa: N802 # the name of the call
        self, request: pb.ReleaseRequest, context: Any
    ) -> pb.ReleaseResponse:
        self.releases.append(list(request.leases))
        self.released.set()
        if self.release_failures:
            self.release_failures -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the answer is lost")
        return pb.ReleaseResponse(
            leases=[pb.LeaseStatus(lease_id=lease.lease_id, state=self.state) for lease in request.leases]
        )

    async def Cancel(  # noqa: N802 # the name of the call
        self, request: pb.CancelRequest, context: Any
    ) -> pb.CancelResponse:
        """Never answers."""
        self.asked_to_cancel.set()
        await asyncio.Event().wait()
        return pb.CancelResponse()

    @property
    def given_back(self) -> set[bytes]:
        """The leases that were released."""
        return {lease.lease_id for call in self.releases for lease in call}

    @property
    def outcomes(self) -> list[str]:
        """How the reads ended, as the client told."""
        return [pb.ReadOutcome.Name(lease.outcome)[len("READ_OUTCOME_") :] for call in self.releases for lease in call]

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Serves on a free port of the loopback, and tells the target."""
        server = grpc.aio.server()
        add_EncoderServiceServicer_to_server(self, server)
        self.target = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        try:
            yield self.target
        finally:
            await server.stop(None)
