"""The calls of the encoder, typed: generated stubs carry no types."""

from __future__ import annotations

from functools import partial
from typing import Any

import grpc

from epd.encoder.v1 import encoder_service_pb2 as service
from epd.encoder.v1.encoder_service_pb2_grpc import EncoderServiceStub

Metadata = tuple[tuple[str, str], ...]

_FETCH = "/epd.encoder.v1.EncoderService/Fetch"


class EncoderStub:
    """The calls that this library makes, on one channel.

    Args:
        channel: where they go.
        metadata: goes with each call.
    """

    def __init__(self, channel: grpc.aio.Channel, metadata: Metadata = ()) -> None:
        calls: Any = EncoderServiceStub(channel)
        # Answers as they came: `epd.fetch_pieces` takes them apart without a copy.
        calls.Fetch = channel.unary_stream(_FETCH, service.FetchRequest.SerializeToString, response_deserializer=None)
        stub: Any = _WithMetadata(calls, metadata) if metadata else calls
        self.encode: grpc.aio.UnaryStreamMultiCallable[service.EncodeRequest, service.EncodeResponse] = stub.Encode
        self.subscribe: grpc.aio.UnaryStreamMultiCallable[service.SubscribeRequest, service.SubscribeResponse] = (
            stub.Subscribe
        )
        self.fetch: grpc.aio.UnaryStreamMultiCallable[service.FetchRequest, bytes] = stub.Fetch
        self.release: grpc.aio.UnaryUnaryMultiCallable[service.ReleaseRequest, service.ReleaseResponse] = stub.Release
        self.renew: grpc.aio.UnaryUnaryMultiCallable[service.RenewRequest, service.RenewResponse] = stub.Renew
        self.acquire: grpc.aio.UnaryUnaryMultiCallable[service.AcquireRequest, service.AcquireResponse] = stub.Acquire
        self.cancel: grpc.aio.UnaryUnaryMultiCallable[service.CancelRequest, service.CancelResponse] = stub.Cancel
        self.server_info: grpc.aio.UnaryUnaryMultiCallable[
            service.GetServerInfoRequest, service.GetServerInfoResponse
        ] = stub.GetServerInfo


class _WithMetadata:
    """A stub whose calls take metadata along."""

    def __init__(self, stub: Any, metadata: Metadata) -> None:
        self._stub = stub
        self._metadata = metadata

    def __getattr__(self, method: str) -> Any:
        return partial(getattr(self._stub, method), metadata=self._metadata)
