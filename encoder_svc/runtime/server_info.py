"""What a server tells of itself."""

from __future__ import annotations

from encoder_svc.runtime.chunks import duration
from encoder_svc.runtime.engine_table import Engine
from encoder_svc.runtime.scheduler import Scheduler
from encoder_svc.settings import Settings
from epd.encoder.v1.encoder_service_pb2 import (
    EngineInfo,
    GetServerInfoResponse,
    Limits,
    Load,
)


def describe(scheduler: Scheduler, settings: Settings, model_name: str) -> GetServerInfoResponse:
    """Everything of ``GetServerInfo`` that the scheduler and the settings know."""
    engines = scheduler.encoding.engines
    info = GetServerInfoResponse(
        limits=_limits(settings),
        engines=[_engine(engine) for engine in engines],
        load=_load(scheduler),
    )
    ready = next((engine.ready for engine in engines if engine.ready is not None), None)
    if ready is not None:
        info.model.CopyFrom(ready.model)
        info.transports.extend(ready.transports)
        info.versions.update(ready.versions)
    info.model.name = model_name
    return info


def _limits(settings: Settings) -> Limits:
    return Limits(
        max_inline_bytes=settings.max_inline_bytes,
        max_items=settings.max_items,
        max_parts=settings.max_parts,
        max_receivers=settings.max_receivers,
        max_image_pixels=settings.max_image_pixels,
        default_lease_ttl=duration(settings.lease_seconds),
        max_lease_ttl=duration(settings.max_lease_seconds),
        max_prompt_bytes=int(settings.arena_bytes * settings.prompt_arena_share),
        max_message_bytes=settings.max_message_bytes,
    )


def _engine(engine: Engine) -> EngineInfo:
    return EngineInfo(
        index=engine.index,
        boot_id=engine.ready.boot_id if engine.ready is not None else "",
        device=engine.device,
        state=engine.state,
        batches_in_flight=len(engine.batches),
        arena_bytes=engine.slots.size,
        reserved_bytes=engine.slots.reserved_bytes,
        leased_bytes=engine.slots.leased_bytes,
        cached_bytes=engine.slots.cached_bytes,
    )


def _load(scheduler: Scheduler) -> Load:
    return Load(
        requests=len(scheduler.requests),
        parts=scheduler.requests.live_parts(),
        leases=len(scheduler.leases),
        media_bytes=scheduler.admission.media_bytes,
        subscriptions=scheduler.subscriptions.connected,
        receiver_parts=scheduler.subscriptions.parcels,
    )
