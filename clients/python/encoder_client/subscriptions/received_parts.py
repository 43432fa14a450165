"""What a named receiver knows of its parts: over lost connections nothing is missed, and nothing is seen twice.

An encoder tells each state once on a connection, and everything again that was not released on the next one, up to
``Synced``. So only what comes before ``Synced`` can be known already.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import grpc

from encoder_client import chunk_checks
from encoder_client.errors import ChunkError, EncoderError, from_status
from encoder_client.events import (
    Layout,
    LeaseRevoked,
    PartCancelled,
    PartFailed,
    Ready,
    SubscriptionEvent,
    Synced,
    layout_of,
)
from epd.encoder.v1 import encoder_service_pb2 as service
from epd.encoder.v1.embedding_pb2 import CHUNK_STATE_LAYOUT, CHUNK_STATE_READY, EmbeddingChunk

MEMORY = 65_536
"""Ends of parts that are remembered."""


class _Place(NamedTuple):
    """A part, as an encoder names it."""

    prompt_id: str
    request_id: str
    part_idx: int


class ReceivedParts:
    """Turns what an encoder tells into what is new, checked. No I/O.

    Args:
        receiver: whose leases are used.
        expected_fingerprint: 32 bytes, or empty for any.
    """

    def __init__(self, receiver: str, expected_fingerprint: bytes) -> None:
        self._receiver = receiver
        self._expected_fingerprint = expected_fingerprint
        self._open: dict[_Place, EmbeddingChunk] = {}
        """The LAYOUT of parts that have not ended."""
        self._ended: OrderedDict[tuple[str, _Place, bytes], None] = OrderedDict()
        self._missing: set[_Place] | None = set()
        """While a connection catches up: the open parts that it has not named yet. None: it has caught up."""
        self.refused: list[EmbeddingChunk] = []
        """READY chunks that must not be used: their leases are to be given back."""

    def connected(self) -> None:
        """A new connection begins."""
        self._missing = set(self._open)

    def take(self, response: service.SubscribeResponse) -> Iterator[SubscriptionEvent]:
        """What is new in a message. Kinds of events that this library does not know are left out."""
        match response.WhichOneof("event"):
            case "chunk":
                place = _place_of(response.chunk)
                try:
                    yield from self._take_chunk(response.chunk, place)
                except ChunkError as error:
                    yield from self._refuse(response.chunk, place, error)
            case "part_failed":
                failed = response.part_failed
                place = _place_of(failed)
                yield from self._end("failed", place, PartFailed(*_names(place), from_status(failed.status)))
            case "part_cancelled":
                place = _place_of(response.part_cancelled)
                yield from self._end("cancelled", place, PartCancelled(*_names(place)))
            case "lease_revoked":
                revoked = response.lease_revoked
                place = _place_of(revoked)
                event = LeaseRevoked(*_names(place), from_status(revoked.status))
                yield from self._end("revoked", place, event, revoked.lease_id)
            case "synced":
                yield from self._caught_up(response.synced.events)

    def _take_chunk(self, chunk: EmbeddingChunk, place: _Place) -> Iterator[SubscriptionEvent]:
        layout = self._open.get(place)
        if chunk.state == CHUNK_STATE_LAYOUT:
            if self._missing is not None and layout is not None:
                self._missing.discard(place)
                return
            chunk_checks.check_shape(chunk)
            chunk_checks.check_fingerprint(chunk, self._expected_fingerprint)
            self._open[place] = chunk
            yield Layout(chunk)
        elif chunk.state == CHUNK_STATE_READY:
            chunk_checks.check_ready(chunk)
            chunk_checks.check_fingerprint(chunk, self._expected_fingerprint)
            lease = chunk_checks.lease_of(chunk, self._receiver)
            if layout is not None:
                chunk_checks.check_follows(chunk, layout)
            elif self._is_new("ready", place, lease.lease_id):
                # It was READY before this receiver came: what expands placeholders must not need to know that.
                yield Layout(layout_of(chunk))
            yield from self._end("ready", place, Ready(chunk), lease.lease_id)
        else:
            raise ChunkError("state", f"{chunk.state} is neither LAYOUT nor READY")

    def _refuse(self, chunk: EmbeddingChunk, place: _Place, error: ChunkError) -> Iterator[SubscriptionEvent]:
        if not any(("ready", place, lease.lease_id) in self._ended for lease in chunk.leases):
            self.refused.append(chunk)  # else somebody may be reading by that lease
        fault = EncoderError(grpc.StatusCode.DATA_LOSS, f"the encoder's chunk must not be used: {error}")
        leases = b"".join(lease.lease_id for lease in chunk.leases)
        yield from self._end("refused", place, PartFailed(*_names(place), fault), leases)

    def _is_new(self, kind: str, place: _Place, lease: bytes) -> bool:
        return self._missing is None or (kind, place, lease) not in self._ended

    def _end(
        self, kind: str, place: _Place, event: SubscriptionEvent, lease: bytes = b""
    ) -> Iterator[SubscriptionEvent]:
        """A part's last word, or the end of its lease."""
        new = self._is_new(kind, place, lease)
        self._open.pop(place, None)
        if self._missing is not None:
            self._missing.discard(place)
        self._ended[kind, place, lease] = None
        self._ended.move_to_end((kind, place, lease))
        if len(self._ended) > MEMORY:
            self._ended.popitem(last=False)
        if new:
            yield event

    def _caught_up(self, events: int) -> Iterator[SubscriptionEvent]:
        missing, self._missing = self._missing or set(), None
        for place in sorted(missing):
            # It ended while nobody listened, and that has been forgotten too; or the encoder was started again.
            del self._open[place]
            yield PartFailed(*_names(place), EncoderError(grpc.StatusCode.UNAVAILABLE, _FORGOTTEN))
        yield Synced(events)


def _place_of(told: EmbeddingChunk | service.PartFailed | service.PartCancelled | service.LeaseRevoked) -> _Place:
    return _Place(told.prompt_id, told.request_id, told.part_idx)


def _names(place: _Place) -> tuple[str, str, int]:
    return place.prompt_id, place.request_id, place.part_idx


_FORGOTTEN = "the encoder does not know the part any more; send it again"
