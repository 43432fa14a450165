"""The handlers of ``EncoderService``: each checks its message, asks the runtime, and answers.

Handlers are coroutines that write to their context, never generators: a generator that its caller leaves is not
reliably closed, and what it holds would leak. What a handler raises becomes a status in
:class:`~encoder_svc.rpc.errors.ErrorInterceptor`.
"""
# gRPC's names are not ours to choose.
# ruff: noqa: N802

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.rpc.callers import EncoderCallers
from encoder_svc.rpc.load_report import LOAD_REPORT_KEY, load_report
from encoder_svc.rpc.media_options import invalid
from encoder_svc.rpc.messages import encode_response, subscribe_response
from encoder_svc.rpc.outbox import Outbox
from encoder_svc.rpc.validation import (
    check_piece,
    check_upload_header,
    to_acquire_command,
    to_cancel_command,
    to_encode_command,
    to_releases,
    to_renewals,
    to_subscribe_command,
)
from encoder_svc.rpc.wire import parse_encode_request
from encoder_svc.runtime.chunks import duration
from encoder_svc.runtime.commands import EncodeCommand
from encoder_svc.runtime.service import EncoderRuntime
from encoder_svc.runtime.uploads import Upload
from encoder_svc.settings import Settings
from epd.callers_file import Permission
from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.encoder_service_pb2_grpc import EncoderServiceServicer, add_EncoderServiceServicer_to_server
from epd.fetch_pieces import write_piece

SERVICE = pb.DESCRIPTOR.services_by_name["EncoderService"].full_name
PIECE_BYTES = 1 << 20
"""Of a ``FetchResponse``, at most: larger messages are slower in band, and hold the loop."""

_END_OF_STREAM: Any = grpc.aio.EOF  # type: ignore[attr-defined] # not in the stubs


class EncoderServicer(EncoderServiceServicer):
    """Answers the calls of the contract from a runtime.

    Args:
        runtime: decides everything.
        settings: the limits of messages.
        callers: decides who may call. Every handler begins by asking it.
    """

    def __init__(self, runtime: EncoderRuntime, settings: Settings, callers: EncoderCallers) -> None:
        self._runtime = runtime
        self._settings = settings
        self._callers = callers

    async def Encode(self, _: Any, context: Any) -> None:
        """Writes the events of the request until it is complete; whatever else ends the call abandons it."""
        identity = self._callers.admit(context, Permission.ENCODE)
        outbox = Outbox()
        call = self._runtime.submit(await self._read_command(context, identity), outbox.put)
        # The media now belong to the runtime alone, which lets go of them long before this call ends.
        try:
            complete = False
            while not complete:
                events, complete = await outbox.take()
                await context.write(encode_response(events))
        finally:
            # What was given to gRPC may have been read, also if its write failed: only the rest is known to be untold.
            call.abandon(outbox.rest())
            context.set_trailing_metadata(((LOAD_REPORT_KEY, load_report(self._runtime.load())),))

    async def _read_command(self, context: Any, identity: str) -> EncodeCommand:
        wire = await context.read()
        if wire is _END_OF_STREAM:
            raise invalid("request", "is missing")
        request, data = parse_encode_request(wire)
        remaining = context.time_remaining()
        return to_encode_command(
            request,
            data,
            self._settings,
            identity=identity,
            deadline=None if remaining is None else self._runtime.now() + remaining,
            new_id=_new_id,
        )

    async def Fetch(self, request: pb.FetchRequest, context: Any) -> None:
        """Writes the bytes in pieces. The lease is looked at for each, so that none is sent after its end."""
        self._callers.admit(context, Permission.READ)
        nbytes = self._runtime.slot_nbytes(request.lease_id)
        end = request.offset + request.length if request.length else nbytes
        if request.offset > nbytes or end > nbytes:
            raise ServiceError(
                Reason.RANGE_INVALID,
                f"the slot has {nbytes} bytes; bytes {request.offset} to {end} are not in it",
                field="length" if request.offset <= nbytes else "offset",
            )
        for offset in range(request.offset, end, PIECE_BYTES):
            view = self._runtime.read_slot(request.lease_id, offset, min(PIECE_BYTES, end - offset))
            await context.write(write_piece(view))

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        """Gives leases back."""
        self._callers.admit(context, Permission.READ)
        states = self._runtime.release(to_releases(request))
        return pb.ReleaseResponse(
            leases=[
                pb.LeaseStatus(lease_id=lease.lease_id, state=state)
                for lease, state in zip(request.leases, states, strict=True)
            ]
        )

    async def Renew(self, request: pb.RenewRequest, context: Any) -> pb.RenewResponse:
        """Extends leases."""
        self._callers.admit(context, Permission.READ)
        leases, ttl = to_renewals(request, self._settings)
        return pb.RenewResponse(
            leases=[
                pb.LeaseStatus(lease_id=lease, state=outcome.state, ttl=duration(outcome.ttl))
                for lease, outcome in zip(leases, self._runtime.renew(leases, ttl), strict=True)
            ]
        )

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:
        """Cancels the caller's own parts that are not READY."""
        command = to_cancel_command(request, identity=self._callers.admit(context, Permission.ENCODE))
        outcome = self._runtime.cancel(command)
        return pb.CancelResponse(requests=outcome.requests, parts=outcome.parts)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        """Tells what the server is and is doing."""
        self._callers.admit(context, Permission.INFO)
        return self._runtime.describe()

    async def Upload(self, request_iterator: AsyncIterator[pb.UploadRequest], context: Any) -> pb.UploadResponse:
        """Takes a file in pieces; one that does not come whole is forgotten."""
        identity = self._callers.admit(context, Permission.ENCODE)
        upload: Upload | None = None
        header = pb.UploadHeader()
        try:
            async for request in request_iterator:
                kind = request.WhichOneof("message")
                if kind == "header" and upload is None:
                    header = request.header
                    check_upload_header(header)
                    upload = self._runtime.begin_upload(identity, header.total_bytes)
                elif kind == "piece" and upload is not None:
                    check_piece(request.piece)
                    self._runtime.add_to_upload(upload, request.piece)
                else:
                    raise invalid("message", "the header comes first, once, then the pieces")
            if upload is None:
                raise invalid("message", "the header is missing")
            finished = self._runtime.finish_upload(upload, header.sha256)
        finally:
            if upload is not None:
                self._runtime.abandon_upload(upload)
        response = pb.UploadResponse(upload_id=finished.id, sha256=finished.sha256)
        response.expiry.FromNanoseconds(time.time_ns() + int(finished.seconds * 1e9))
        return response

    async def Acquire(self, request: pb.AcquireRequest, context: Any) -> None:
        """Leases what is cached. A caller that leaves before its answer is written has no use for its lease."""
        identity = self._callers.admit(context, Permission.READ)
        command = to_acquire_command(request, self._settings, identity=identity)
        chunk = self._runtime.acquire(command)
        try:
            await context.write(pb.AcquireResponse(chunk=chunk))
        except BaseException:
            self._runtime.take_back(chunk)
            raise

    async def Subscribe(self, request: pb.SubscribeRequest, context: Any) -> None:
        """Tells a receiver what is addressed to it, for as long as it listens."""
        command = to_subscribe_command(request, identity=self._callers.admit(context, Permission.READ))
        changed = asyncio.Event()
        subscription = self._runtime.subscribe(command, changed.set)
        try:
            while True:
                changed.clear()
                # A write waits for a consumer that is slow; what happens meanwhile changes what is told next.
                while (event := subscription.take()) is not None:
                    await context.write(subscribe_response(event))
                await changed.wait()
        finally:
            subscription.leave()


def add_encoder_servicer(servicer: EncoderServicer, server: Any) -> None:
    """Puts the handlers on a server, which takes the first that is added for a method.

    To gRPC ``Encode`` is a stream of requests as they came: on the wire that is no other thing than the one request of
    the contract. For a single request, gRPC would keep both its bytes and its message until the call ends. ``Acquire``
    is a stream with one response, since gRPC does not tell whether a single response was written. What ``Fetch`` writes
    is serialised already.
    """
    encode = grpc.stream_stream_rpc_method_handler(
        servicer.Encode, response_serializer=pb.EncodeResponse.SerializeToString
    )
    fetch = grpc.unary_stream_rpc_method_handler(servicer.Fetch, request_deserializer=pb.FetchRequest.FromString)
    acquire = grpc.unary_stream_rpc_method_handler(
        servicer.Acquire,
        request_deserializer=pb.AcquireRequest.FromString,
        response_serializer=pb.AcquireResponse.SerializeToString,
    )
    handlers = {"Encode": encode, "Fetch": fetch, "Acquire": acquire}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    add_EncoderServiceServicer_to_server(servicer, server)


def _new_id() -> str:
    return secrets.token_hex(16)
