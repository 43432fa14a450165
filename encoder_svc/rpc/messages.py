"""From events and outcomes of the runtime to messages of the contract."""

from __future__ import annotations

from encoder_svc.rpc.errors import to_status
from encoder_svc.runtime.chunks import duration
from encoder_svc.runtime.events import Accepted, ChunkEvent, Completed, Event, PartCancelled, PartFailed
from epd.encoder.v1 import encoder_service_pb2 as pb


def to_event(event: Event) -> pb.Event:
    """The event as its caller is told."""
    match event:
        case ChunkEvent():
            return pb.Event(chunk=event.chunk)
        case Accepted():
            return pb.Event(
                accepted=pb.Accepted(
                    request_id=event.request_id,
                    prompt_id=event.prompt_id,
                    num_parts=event.num_parts,
                    encoder=event.encoder,
                )
            )
        case PartFailed():
            return pb.Event(
                part_failed=pb.PartFailed(
                    prompt_id=event.prompt_id,
                    request_id=event.request_id,
                    part_idx=event.part_idx,
                    status=to_status(event.error),
                )
            )
        case PartCancelled():
            return pb.Event(
                part_cancelled=pb.PartCancelled(
                    prompt_id=event.prompt_id,
                    request_id=event.request_id,
                    part_idx=event.part_idx,
                )
            )
        case Completed():
            return pb.Event(
                complete=pb.Complete(
                    ready=event.ready,
                    failed=event.failed,
                    cancelled=event.cancelled,
                    from_cache=event.from_cache,
                    total=duration(event.total_seconds),
                )
            )
