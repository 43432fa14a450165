"""From events and outcomes of the runtime to messages of the contract."""

from __future__ import annotations

from collections.abc import Sequence

from encoder_svc.rpc.errors import to_status
from encoder_svc.runtime.chunks import write_duration
from encoder_svc.runtime.events import (
    Accepted,
    ChunkEvent,
    Completed,
    Event,
    LeaseRevoked,
    PartCancelled,
    PartFailed,
    SubscriptionEvent,
    Synced,
)
from epd.encoder.v1 import encoder_service_pb2 as pb


def encode_response(events: Sequence[Event]) -> pb.EncodeResponse:
    """One message with events as their caller is told them, in their order."""
    response = pb.EncodeResponse()
    for event in events:
        _write(event, response.events.add())
    return response


def subscribe_response(event: SubscriptionEvent) -> pb.SubscribeResponse:
    """An event as a receiver is told it."""
    response = pb.SubscribeResponse()
    match event:
        case LeaseRevoked():
            revoked = response.lease_revoked
            revoked.lease_id = event.lease_id
            revoked.prompt_id = event.prompt_id
            revoked.request_id = event.request_id
            revoked.part_idx = event.part_idx
            revoked.status.CopyFrom(to_status(event.error))
        case Synced():
            response.synced.events = event.events
        case _:
            _write_part(event, response)
    return response


def _write(event: Event, told: pb.Event) -> None:
    # In place: a message that is given to the constructor of another one is copied.
    match event:
        case Accepted():
            accepted = told.accepted
            accepted.request_id = event.request_id
            accepted.prompt_id = event.prompt_id
            accepted.num_parts = event.num_parts
            accepted.encoder.CopyFrom(event.encoder)
        case Completed():
            complete = told.complete
            complete.ready = event.ready
            complete.failed = event.failed
            complete.cancelled = event.cancelled
            complete.from_cache = event.from_cache
            write_duration(complete.total, event.total_seconds)
        case _:
            _write_part(event, told)


def _write_part(event: ChunkEvent | PartFailed | PartCancelled, told: pb.Event | pb.SubscribeResponse) -> None:
    """What callers and receivers are told alike."""
    match event:
        case ChunkEvent():
            told.chunk.CopyFrom(event.chunk)
        case PartFailed():
            failed = told.part_failed
            failed.prompt_id = event.prompt_id
            failed.request_id = event.request_id
            failed.part_idx = event.part_idx
            failed.status.CopyFrom(to_status(event.error))
        case PartCancelled():
            cancelled = told.part_cancelled
            cancelled.prompt_id = event.prompt_id
            cancelled.request_id = event.request_id
            cancelled.part_idx = event.part_idx
