"""By ZeroMQ, over TCP: a slot's pieces are asked for with its key, and encrypted if the encoder has a key pair."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import suppress
from urllib.parse import urlsplit

import zmq

from encoder_client.checksums import RunningChecksum
from encoder_client.pool.embedding_pool import Slot
from encoder_client.transports import TransportError
from encoder_client.transports.curve_socket import CurveSocket
from encoder_client.transports.zeromq_link import Answers, ZeroMqLink
from encoder_client.transports.zeromq_peer import ZeroMqPeer
from encoder_client.transports.zmtp_connection import ZmtpConnection
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, LeaseGrant, Locator, ZeroMqLocator

MOST_PEERS = 64
"""Connections that are kept; of more, those are closed that were used least recently and are idle."""


class ZeroMqReader:
    """Reads by ZeroMQ, with one connection to each engine."""

    name = "zeromq"
    needs_checksum = True

    def __init__(self) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._peers: OrderedDict[tuple[str, bytes], ZeroMqPeer] = OrderedDict()

    def reaches(self, locator: Locator) -> bool:
        """See :class:`~encoder_client.transports.Reader`."""
        return not locator.zeromq.curve_public_key or zmq.has("curve")

    async def read(
        self,
        chunk: EmbeddingChunk,
        locator: Locator,
        lease: LeaseGrant,
        slot: Slot,
        checksum: RunningChecksum,
        timeout: float,
    ) -> None:
        """See :class:`~encoder_client.transports.Reader`."""
        place = locator.zeromq
        await self._peer(place).read(chunk, place.slot_offset, slot, checksum, timeout)

    def _peer(self, place: ZeroMqLocator) -> ZeroMqPeer:
        key = (place.endpoint, place.curve_public_key)
        peer = self._peers.pop(key, None)
        if peer is None or peer.failed:
            peer = ZeroMqPeer(lambda answers: self._connect(place, answers))
        self._peers[key] = peer
        if len(self._peers) > MOST_PEERS:
            idle = next((name for name, other in self._peers.items() if other.is_idle and other is not peer), None)
            if idle is not None:
                self._peers.pop(idle).close()
        return peer

    def _connect(self, place: ZeroMqLocator, answers: Answers) -> ZeroMqLink:
        host, port = _address(place.endpoint)
        if not place.curve_public_key:
            return ZmtpConnection(host, port, answers)
        if self._context is None:
            self._context = zmq.Context()
        try:
            return CurveSocket(self._context, place.endpoint, place.curve_public_key, answers)
        except zmq.ZMQError as error:
            raise TransportError(f"the encoder's ZeroMQ socket cannot be used: {error.strerror}") from None

    def close(self) -> None:
        """See :class:`~encoder_client.transports.Reader`."""
        for peer in self._peers.values():
            peer.close()
        self._peers.clear()
        if self._context is not None:
            self._context.term()
            self._context = None


def _address(endpoint: str) -> tuple[str, int]:
    """Host and port of ``tcp://HOST:PORT``."""
    with suppress(ValueError):
        url = urlsplit(endpoint)
        if url.scheme == "tcp" and url.hostname and url.port:
            return url.hostname, url.port
    raise TransportError("the encoder's ZeroMQ endpoint is no TCP address")
