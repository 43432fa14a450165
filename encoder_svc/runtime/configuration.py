"""From the settings to what the scheduler and the children are told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from encoder_svc.runtime.rules import Rules
from encoder_svc.settings import Settings
from encoder_svc.shared_memory import SharedMemory
from epd.addresses import split_address
from epd.internal.v1.engine_pb2 import ConfigureEngine
from epd.internal.v1.media_worker_pb2 import ConfigureMedia, MediaLimits, Tower

# Of a GPU until its engine has measured its own: the tower that the engine warms up with.
_BATCH_PATCHES = {"cpu": 2048, "cuda": 16_384}
_BATCH_FRAMES = {"cpu": 6000, "cuda": 48_000}


@dataclass(frozen=True)
class Serving:
    """What is decided before the front starts, beside the settings."""

    grpc_target: str
    """Where clients reach this server."""
    model_name: str
    """The checkpoint's name, without its path."""
    devices: tuple[str, ...]
    """One for each engine, as torch names it."""
    dtype: str
    """`float32`, `bfloat16` or `float16`, resolved."""


def batch_budgets(settings: Settings, device: str) -> dict[Tower, int]:
    """What a batch may cost on a device, for each tower."""
    kind = device.partition(":")[0]
    return {
        Tower.TOWER_VISION: settings.batch_patches or _BATCH_PATCHES[kind],
        Tower.TOWER_AUDIO: settings.batch_frames or _BATCH_FRAMES[kind],
    }


def rules(settings: Settings) -> Rules:
    """What the scheduler decides by."""
    return Rules(
        prepare_seconds=settings.prepare_seconds,
        space_seconds=settings.space_seconds,
        forward_seconds=settings.forward_seconds,
        canary_seconds=settings.canary_seconds,
        lease_seconds=settings.lease_seconds,
        max_lease_seconds=settings.max_lease_seconds,
        prompt_bytes=int(settings.arena_bytes * settings.prompt_arena_share),
        max_queued_parts=settings.max_queued_parts,
        max_queued_bytes=settings.max_queued_bytes,
        max_queued_patches=settings.max_queued_patches,
        batches_ahead=settings.batches_ahead,
        input_bytes=settings.input_arena_bytes,
        max_known_receivers=settings.max_known_receivers,
        max_receiver_parts=settings.max_receiver_parts,
        max_upload_bytes=settings.max_upload_bytes,
        max_uploads_bytes=settings.max_uploads_bytes,
        upload_seconds=settings.upload_seconds,
    )


def configure_media(settings: Settings, serving: Serving, input_arena: SharedMemory) -> ConfigureMedia:
    """What a media worker is told."""
    return ConfigureMedia(
        model=str(settings.model),
        dtype=serving.dtype,
        input_arena_fd=input_arena.descriptor,
        input_arena_bytes=input_arena.size,
        threads=settings.media_threads,
        limits=MediaLimits(
            image_pixels=settings.max_image_pixels,
            video_pixels=settings.max_video_pixels,
            video_frames=settings.max_video_frames,
            video_seconds=settings.max_video_seconds,
            audio_seconds=settings.max_audio_seconds,
        ),
        memory_bytes=settings.media_memory_bytes,
        log_level=settings.log_level,
        model_options=settings.options,
    )


def configure_engine(
    settings: Settings, serving: Serving, index: int, input_arena: SharedMemory, arena: SharedMemory, socket: Path
) -> ConfigureEngine:
    """What an engine is told.

    Args:
        settings: everything that can be set.
        serving: what was decided from them.
        index: the engine's place among the engines.
        input_arena: where the model's inputs are.
        arena: the engine's own.
        socket: where it hands out its arena to processes of this host.
    """
    configuration = ConfigureEngine(
        model=str(settings.model),
        device=serving.devices[index],
        dtype=serving.dtype,
        threads=settings.engine_threads,
        input_arena_fd=input_arena.descriptor,
        input_arena_bytes=input_arena.size,
        arena_fd=arena.descriptor,
        arena_bytes=arena.size,
        log_level=settings.log_level,
        model_options=settings.options,
        measured_towers=[
            tower
            for tower, cost in (
                (Tower.TOWER_VISION, settings.batch_patches),
                (Tower.TOWER_AUDIO, settings.batch_frames),
            )
            if not cost
        ],
    )
    reached_at = split_address(serving.grpc_target)[0]
    if settings.shared_memory:
        configuration.shared_memory.socket_path = str(socket)
    if _is_on(settings.mooncake, settings):
        configuration.mooncake.host = settings.mooncake_host or reached_at
        configuration.mooncake.protocol = settings.mooncake_protocol
        configuration.mooncake.devices = settings.mooncake_devices
    if _is_on(settings.zeromq, settings):
        zeromq = configuration.zeromq
        zeromq.listen, port = split_address(settings.zeromq_listen or f"{settings.listening.host}:0")
        zeromq.port = port + index if port else 0
        zeromq.host = settings.zeromq_host or reached_at
        if settings.zeromq_curve_key is not None:
            zeromq.curve_key = str(settings.zeromq_curve_key)
    return configuration


def _is_on(setting: Literal["auto", "on", "off"], settings: Settings) -> bool:
    return setting == "on" or (setting == "auto" and settings.listening.is_loopback)
