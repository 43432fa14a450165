"""Proves that an engine that has not encoded anything for a while still can, through the normal path.

A busy engine is never suspected: its canary waits in the queue like any other item, and says nothing while it waits,
nor if it has waited too long for space or a process. Only a canary that was tried and *failed* makes an engine failing,
until something is encoded well again.
"""

from __future__ import annotations

import io
import struct
import wave
import zlib
from collections.abc import Callable
from itertools import count

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.commands import EncodeCommand, ItemCommand
from encoder_svc.runtime.engine_table import Engine
from encoder_svc.runtime.events import ChunkEvent, Event, PartFailed
from encoder_svc.runtime.requests import Sink
from encoder_svc.runtime.timers import Timers
from epd.encoder.v1.embedding_pb2 import ChunkState
from epd.encoder.v1.encoder_service_pb2 import CachePolicy, Delivery
from epd.encoder.v1.media_pb2 import MediaItem, Modality

_IDENTITY = "encoder-svc canary"
"""No caller has it: an authenticated one has no blank in its name."""

_NOT_TRIED = {Reason.SPACE_TIMEOUT, Reason.NOT_READY, Reason.SHUTTING_DOWN}
"""Ends of a canary that say nothing of its engine."""

_SIDE = 56
_SAMPLING_RATE = 16_000


class Canary:
    """Watches the engines.

    Args:
        engines: their tables.
        submit: admits a request, as :meth:`Scheduler.submit` does.
        seconds: an engine that has not encoded anything well for so long is tried.
        timers: where the next look is set.
    """

    def __init__(
        self,
        engines: list[Engine],
        submit: Callable[[EncodeCommand, Sink, float], object],
        seconds: float,
        timers: Timers,
    ) -> None:
        self._engines = engines
        self._submit = submit
        self._seconds = seconds
        self._timers = timers
        self._under_way: set[int] = set()
        self._numbers = count()

    def start(self, now: float) -> None:
        """Looks now, and again and again."""
        for engine in self._engines:
            overdue = now - engine.last_good >= self._seconds
            if engine.ready is not None and overdue and engine.index not in self._under_way:
                self._try(engine, engine.ready.model.modalities[0], now)
        self._timers.at(now + self._seconds / 4, self.start)

    def _try(self, engine: Engine, modality: Modality, now: float) -> None:
        name = f"canary-{engine.index}-{next(self._numbers)}"
        command = EncodeCommand(
            identity=_IDENTITY,
            request_id=name,
            prompt_id=name,
            num_parts=1,
            items=(ItemCommand(MediaItem(modality=modality), (_file(modality),)),),
            delivery=Delivery.DELIVERY_CACHE_ONLY,
            receivers=(),
            priority=0,
            cache_policy=CachePolicy.CACHE_POLICY_BYPASS,
            cache_salt=b"",
            expected_fingerprint=b"",
            lease_ttl=None,
            deadline=None,
            skip_layout=True,
            engine=engine.index,
        )

        def told(event: Event) -> None:
            match event:
                case PartFailed():
                    engine.failing = engine.failing or event.error.reason not in _NOT_TRIED
                case ChunkEvent() if event.chunk.state == ChunkState.CHUNK_STATE_READY:
                    engine.failing = False
                case _:
                    return
            self._under_way.discard(engine.index)

        self._under_way.add(engine.index)
        try:
            self._submit(command, told, now)
        except ServiceError:
            # The server is full or stopping: that is no fault of the engine.
            self._under_way.discard(engine.index)


def _file(modality: Modality) -> bytes:
    return _wav() if modality == Modality.MODALITY_AUDIO else _png()


def _png() -> bytes:
    """A grey square."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", _SIDE, _SIDE, 8, 0, 0, 0, 0)
    rows = zlib.compress((b"\x00" + b"\x80" * _SIDE) * _SIDE)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def _wav() -> bytes:
    """A second of silence."""
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(_SAMPLING_RATE)
        sound.writeframes(bytes(2 * _SAMPLING_RATE))
    return file.getvalue()
