"""The calls of the encoder, typed: generated stubs carry no types."""

from __future__ import annotations

import grpc

from epd.encoder.v1 import encoder_service_pb2 as service
from epd.encoder.v1.encoder_service_pb2_grpc import EncoderServiceStub


class EncoderStub:
    """The calls that this library makes, on one channel.

    Args:
        channel: where they go.
    """

    def __init__(self, channel: grpc.aio.Channel) -> None:
        stub = EncoderServiceStub(channel)
        self.encode: grpc.aio.UnaryStreamMultiCallable[service.EncodeRequest, service.EncodeResponse] = stub.Encode
        self.subscribe: grpc.aio.UnaryStreamMultiCallable[service.SubscribeRequest, service.SubscribeResponse] = (
            stub.Subscribe
        )
        self.fetch: grpc.aio.UnaryStreamMultiCallable[service.FetchRequest, service.FetchResponse] = stub.Fetch
        self.release: grpc.aio.UnaryUnaryMultiCallable[service.ReleaseRequest, service.ReleaseResponse] = stub.Release
        self.renew: grpc.aio.UnaryUnaryMultiCallable[service.RenewRequest, service.RenewResponse] = stub.Renew
        self.acquire: grpc.aio.UnaryUnaryMultiCallable[service.AcquireRequest, service.AcquireResponse] = stub.Acquire
        self.cancel: grpc.aio.UnaryUnaryMultiCallable[service.CancelRequest, service.CancelResponse] = stub.Cancel
        self.server_info: grpc.aio.UnaryUnaryMultiCallable[
            service.GetServerInfoRequest, service.GetServerInfoResponse
        ] = stub.GetServerInfo
