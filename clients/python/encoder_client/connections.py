"""Channels to the encoders whose embeddings a client reads."""

from __future__ import annotations

import grpc
from grpc_health.v1.health_pb2_grpc import HealthStub

from encoder_client.releases import ReleaseBatcher
from encoder_client.stub import EncoderStub
from epd.encoder.v1.embedding_pb2 import EncoderRef

_CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", 64 << 20),
    # A server that vanished without a word is noticed. The server lets clients ping every 10 s, also without a call;
    # one that does not would close the connection, so this must not be less than what servers allow.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # An encoder that comes back is found soon: gRPC itself would wait up to two minutes between two tries.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)


class Connections:
    """One channel for each encoder, made when it is first needed.

    Args:
        target: the encoder that calls go to.
        credentials: TLS, for all encoders; None speaks plain text.
        release_timeout: seconds that giving a lease back may take.
    """

    def __init__(self, target: str, credentials: grpc.ChannelCredentials | None, release_timeout: float) -> None:
        self._target = target
        self._credentials = credentials
        self._release_timeout = release_timeout
        self._instance = ""
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._stubs: dict[str, EncoderStub] = {}
        self._releases: dict[str, ReleaseBatcher] = {}

    @property
    def stub(self) -> EncoderStub:
        """The calls of the encoder at the target."""
        return self._stub(self._target)

    @property
    def health(self) -> HealthStub:
        """The health service of the encoder at the target."""
        return HealthStub(self._channel(self._target))

    def note_encoder(self, encoder: EncoderRef) -> None:
        """Learns which server answers at the target.

        Its chunks are read on the same channel, whatever address it tells others.
        """
        self._instance = encoder.instance_id

    def stub_of(self, encoder: EncoderRef) -> EncoderStub:
        """The calls of the encoder that holds an embedding."""
        return self._stub(self._target_of(encoder))

    def releases_of(self, encoder: EncoderRef) -> ReleaseBatcher:
        """Where leases of that encoder are given back."""
        target = self._target_of(encoder)
        if target not in self._releases:
            self._releases[target] = ReleaseBatcher(self._stub(target), self._release_timeout)
        return self._releases[target]

    async def close(self) -> None:
        """Sends the releases that are pending, then ends all channels."""
        for batcher in self._releases.values():
            await batcher.close()
        for channel in self._channels.values():
            await channel.close(None)

    def _target_of(self, encoder: EncoderRef) -> str:
        if encoder.instance_id == self._instance or not encoder.grpc_target:
            return self._target
        return encoder.grpc_target

    def _stub(self, target: str) -> EncoderStub:
        if target not in self._stubs:
            self._stubs[target] = EncoderStub(self._channel(target))
        return self._stubs[target]

    def _channel(self, target: str) -> grpc.aio.Channel:
        if target not in self._channels:
            self._channels[target] = (
                grpc.aio.insecure_channel(target, options=_CHANNEL_OPTIONS)
                if self._credentials is None
                else grpc.aio.secure_channel(target, self._credentials, options=_CHANNEL_OPTIONS)
            )
        return self._channels[target]
