"""The loop of a media worker.

For each ``Prepare``, in the order in which they come::

    header ──► Measured ──► decode, preprocess ──► wait for InputGrant ──► copy into the input arena ──► Prepared

and exactly one answer: ``Prepared``, or ``PrepareFailed`` for a bad item (with the reason of the error table) and for
one that the front dropped. Nothing that a codec or an adapter raises ends the process.
"""

from __future__ import annotations

import logging
import resource
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import torch

from encoder_svc.child import FrontLink
from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.item import open_media
from encoder_svc.media.limits import MediaLimits
from encoder_svc.models.registry import open_adapter
from encoder_svc.shared_memory import SharedMemory
from encoder_svc.tensors import tensor_view
from epd.encoder.v1.media_pb2 import MediaItem
from epd.internal.v1.media_worker_pb2 import (
    ConfigureMedia,
    Measured,
    MediaCommand,
    MediaReport,
    Prepared,
    PrepareFailed,
)

DROPPED = "DROPPED"
"""The reason that answers ``DropItem``."""

log = logging.getLogger(__name__)


class _DroppedError(Exception):
    """The front does not want the item any more."""


@dataclass
class _Task:
    """One ``Prepare`` that is not answered."""

    part: int
    item: MediaItem
    files: list[bytes]
    measure_only: bool = False
    """The front has no space for it now."""
    offset: int | None = None
    """Where its input goes in the input arena. None: not granted."""
    dropped: bool = False


class Preparer:
    """Prepares one item after another.

    Args:
        link: the link to the front.
        configuration: the model and the limits.

    Raises:
        SetupError: the checkpoint cannot be served.
    """

    def __init__(self, link: FrontLink, configuration: ConfigureMedia) -> None:
        torch.set_num_threads(max(1, configuration.threads))
        if configuration.memory_bytes:
            # What the process may allocate, without the files and arenas that it maps. What goes beyond it fails with
            # MemoryError, and with it only the item.
            resource.setrlimit(resource.RLIMIT_DATA, (configuration.memory_bytes, configuration.memory_bytes))
        self._link = link
        limits = configuration.limits
        self._limits = MediaLimits(
            image_pixels=limits.image_pixels,
            video_pixels=limits.video_pixels,
            video_frames=limits.video_frames,
            video_seconds=limits.video_seconds,
            audio_seconds=limits.audio_seconds,
        )
        self._adapter = open_adapter(Path(configuration.model), configuration.dtype, configuration.model_options)
        self._arena = SharedMemory(configuration.input_arena_fd, configuration.input_arena_bytes)
        self._tasks: deque[_Task] = deque()

    def run(self) -> None:
        """Answers one item after another, for the life of the process."""
        while True:
            self._take_commands(wait=not self._tasks)
            if self._tasks:
                task = self._tasks[0]
                report = self._answer(task)
                self._tasks.popleft()
                self._link.send(report)

    def _answer(self, task: _Task) -> MediaReport:
        try:
            nanoseconds = self._prepare(task)
        except _DroppedError:
            return _failure(task, DROPPED, "")
        except ServiceError as error:
            log.debug("part %d: %s: %s", task.part, error.reason, error.message, exc_info=True)
            return _failure(task, error.reason, error.message)
        except Exception as error:
            if _is_out_of_memory(error):
                log.warning("part %d: out of memory", task.part)
                return _failure(
                    task,
                    Reason.MEDIA_TOO_LARGE,
                    "decoding this item takes more memory than a media worker may have; send it with fewer pixels",
                )
            log.exception("part %d: preparing failed", task.part)
            return _failure(
                task, Reason.INTERNAL, "the server failed to prepare the item; its log says why; try another file"
            )
        return MediaReport(prepared=Prepared(part=task.part, prepare_nanoseconds=nanoseconds))

    def _prepare(self, task: _Task) -> int:
        self._check_wanted(task)
        started = time.monotonic_ns()
        if task.item.modality not in self._adapter.modalities:
            raise ServiceError(Reason.MODALITY_UNSUPPORTED, "this model does not encode items of this modality")
        probe = open_media(task.item, task.files, self._limits)
        layout = self._adapter.measure(task.item, probe)
        measured = Measured(part=task.part, layout=layout.chunk, inputs=layout.inputs)
        self._link.send(MediaReport(measured=measured))
        if task.measure_only:
            raise _DroppedError
        tensors = self._adapter.prepare(task.item, probe, layout)
        nanoseconds = time.monotonic_ns() - started

        self._check_wanted(task)
        while task.offset is None:
            self._take_commands(wait=True)
            self._check_wanted(task)

        started = time.monotonic_ns()
        if task.offset + layout.inputs[-1].nbytes > self._arena.size:
            raise ValueError(f"the grant at {task.offset} ends outside the input arena of {self._arena.size} bytes")
        promised = (spec for taken in layout.inputs for spec in taken.tensors)
        for spec, tensor in zip(promised, tensors, strict=True):
            place = tensor_view(self._arena, task.offset, spec)
            if place.shape != tensor.shape or place.dtype != tensor.dtype:
                raise ValueError(f"{spec.name} was prepared as {tensor.dtype} {tuple(tensor.shape)}, not as measured")
            place.copy_(tensor)
        return nanoseconds + time.monotonic_ns() - started

    def _check_wanted(self, task: _Task) -> None:
        self._take_commands(wait=False)
        if task.dropped:
            raise _DroppedError

    def _take_commands(self, *, wait: bool) -> None:
        """Takes all commands that are there; with ``wait``, at least one."""
        while wait or self._link.pending():
            wait = False
            command, files = self._link.receive(MediaCommand)
            match command.WhichOneof("command"):
                case "prepare":
                    prepare = command.prepare
                    self._tasks.append(_Task(prepare.part, prepare.item, files, prepare.measure_only))
                case "grant":
                    for task in self._find(command.grant.part):
                        task.offset = command.grant.offset
                case "drop":
                    for task in self._find(command.drop.part):
                        task.dropped = True
                        task.files.clear()
                case other:
                    raise ValueError(f"unexpected command {other}")

    def _find(self, part: int) -> list[_Task]:
        # None is found if the command crossed with the item's answer: then there is nothing to do.
        return [task for task in self._tasks if task.part == part]


def _is_out_of_memory(error: Exception) -> bool:
    # torch's allocator raises a bare RuntimeError; its name in the text is all that there is to know it by.
    return isinstance(error, MemoryError) or "DefaultCPUAllocator" in str(error)


def _failure(task: _Task, reason: str, message: str) -> MediaReport:
    return MediaReport(failed=PrepareFailed(part=task.part, reason=reason, message=message))
