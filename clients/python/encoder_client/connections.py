"""Channels to the encoders whose embeddings a client reads."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import cycle

import grpc
from grpc_health.v1.health_pb2_grpc import HealthStub

from encoder_client.client_settings import ClientSettings
from encoder_client.releases import Releases
from encoder_client.stub import EncoderStub, Metadata
from epd.encoder.v1.embedding_pb2 import EncoderRef

RELEASE_SECONDS = 5.0
"""That the answer to the release of what was read may take, at most."""

_CHANNEL_OPTIONS: tuple[tuple[str, int | str], ...] = (
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


class _Encoder:
    """What is open to one encoder.

    Args:
        channels: at least one. Calls take turns on them.
        metadata: goes with each call.
        release_timeout: seconds that the release of what was read may take.
    """

    def __init__(self, channels: Sequence[grpc.aio.Channel], metadata: Metadata, release_timeout: float) -> None:
        self.channels = channels
        self.health = HealthStub(channels[0])
        self.instance_id = ""
        self._stubs = [EncoderStub(channel, metadata) for channel in channels]
        self._turns = cycle(self._stubs)
        self.releases = Releases(self._stubs[0], channels[0], release_timeout)

    @property
    def stub(self) -> EncoderStub:
        return next(self._turns)

    async def close(self, grace: float | None) -> None:
        await self.releases.close()
        for channel in self.channels:
            await channel.close(grace)


class Connections:
    """The channels to each encoder, made when they are first needed.

    Args:
        target: the encoder of chunks that name none.
        settings: how they are reached.

    Raises:
        EncoderClientError: the token may not go to ``target``.
    """

    def __init__(self, target: str, settings: ClientSettings) -> None:
        settings.credentials.metadata_for(target)
        self._target = target
        self._settings = settings
        self._names: dict[str, str] = {}
        self._encoders: dict[str, _Encoder] = {}
        self._targets: dict[str, str] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def stub(self, target: str) -> EncoderStub:
        """The calls of the encoder at a target."""
        return self._encoder(target).stub

    def health(self, target: str) -> HealthStub:
        """The health service of the encoder at a target."""
        return self._encoder(target).health

    def name(self, target: str, host: str) -> None:
        """Has the certificate of the encoder at a target checked against a host name, and not against the address."""
        self._names[target] = host

    def note_encoder(self, encoder: EncoderRef, target: str) -> None:
        """Learns which server answers at a target.

        Its chunks are read on the same channels, whatever address it tells others.
        """
        if not encoder.instance_id:
            return
        known = self._encoder(target)
        if known.instance_id != encoder.instance_id:
            self._unlearn(known.instance_id, target)
            known.instance_id = encoder.instance_id
        self._targets.setdefault(encoder.instance_id, target)

    def forget(self, target: str, grace: float) -> None:
        """Closes what is open to a target, behind the calls that are under way.

        Args:
            target: the encoder.
            grace: seconds that these may take.
        """
        self._names.pop(target, None)
        if (encoder := self._encoders.pop(target, None)) is not None:
            self._unlearn(encoder.instance_id, target)
            task = asyncio.get_running_loop().create_task(encoder.close(grace))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def stub_of(self, encoder: EncoderRef) -> EncoderStub:
        """The calls of the encoder that holds an embedding."""
        return self.stub(self._target_of(encoder))

    def releases_of(self, encoder: EncoderRef) -> Releases:
        """Where leases of that encoder are given back."""
        return self._encoder(self._target_of(encoder)).releases

    def give_up(self, target: str) -> None:
        """It is known that nobody answers at a target: nobody waits for confirmations from there any more."""
        if (encoder := self._encoders.get(target)) is not None:
            encoder.releases.give_up()

    async def close(self) -> None:
        """Sends the releases that are pending, then ends all channels."""
        await asyncio.gather(*(encoder.close(None) for encoder in self._encoders.values()), *self._closing)

    def _target_of(self, encoder: EncoderRef) -> str:
        return self._targets.get(encoder.instance_id) or encoder.grpc_target or self._target

    def _unlearn(self, instance_id: str, target: str) -> None:
        if self._targets.get(instance_id) == target:  # one server may be reached by two
            del self._targets[instance_id]

    def _encoder(self, target: str) -> _Encoder:
        if target not in self._encoders:
            metadata = self._settings.credentials.metadata_for(target)
            channels = [self._channel(target) for _ in range(self._settings.channels)]
            self._encoders[target] = _Encoder(channels, metadata, min(RELEASE_SECONDS, self._settings.read_timeout))
        return self._encoders[target]

    def _channel(self, target: str) -> grpc.aio.Channel:
        options = _CHANNEL_OPTIONS
        if self._settings.channels > 1:
            # Channels of equal options would share one connection.
            options = (*options, ("grpc.use_local_subchannel_pool", 1))
        credentials = self._settings.credentials.channel
        if credentials is None:
            return grpc.aio.insecure_channel(target, options=options)
        if target in self._names:
            options = (*options, ("grpc.ssl_target_name_override", self._names[target]))
        return grpc.aio.secure_channel(target, credentials, options=options)
