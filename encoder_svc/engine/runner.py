"""Runs batches: inputs from the input arena, through the tower, into slots of the arena.

An item fills its slot, or one of two its own matrices of it; the one that completes the slot sums it up.

A batch never fails as a whole. One that raises is halved until the items that cause it fail alone; an item whose rows
are not finite fails alone. A device that answers nothing any more ends the engine: the front starts another.

A batch is run in two halves, so that a device can work on one batch while the host finishes the one before::

    launch: input arena ─► device, forward, bounds of the rows ─► host │ fence │ finish: rows ─► arena, checksums

On the CPU the first half is the whole work.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch

from encoder_svc.engine.checksum import slot_checksum
from encoder_svc.engine.staging import Fence, Staging
from encoder_svc.errors import Reason, ServiceError
from encoder_svc.models.adapter import MATRIX_ALIGNMENT, Tower, TowerInput
from encoder_svc.shared_memory import SharedMemory
from encoder_svc.tensors import TORCH_DTYPES, tensor_view
from epd.encoder.v1.embedding_pb2 import TensorSpec
from epd.internal.v1.engine_pb2 import BatchItem, ItemResult

log = logging.getLogger(__name__)

_OUT_OF_MEMORY = (
    "DefaultCPUAllocator",
    "not enough memory",
    "out of memory",
    "bad_alloc",
    "could not create a memory object",
    "ALLOC_FAILED",
)


Matrices = tuple[torch.Tensor, ...]
"""What the tower made of one item, in the order of its slot."""


class DeviceLostError(Exception):
    """The device answers nothing any more, as after an illegal access on CUDA. Only a new process can use it."""


@dataclass(frozen=True)
class LaunchedBatch:
    """A batch that the device has been given."""

    items: Sequence[BatchItem]
    encoded: list[Matrices | ServiceError]
    """The matrices of each item, on the device and perhaps not computed yet, or why there will be none."""
    finite: torch.Tensor | None
    """For each of those matrices, if all of it is finite; bool, on the host, known behind ``ended``."""
    began: Fence
    ended: Fence


@dataclass(frozen=True)
class BatchOutcome:
    """What became of a batch."""

    results: list[ItemResult]
    """One for each item, in their order."""
    forward_nanoseconds: int
    stage_nanoseconds: int
    """Copies and checksums."""


class Runner:
    """Runs the batches of one device.

    Args:
        tower: the loaded towers.
        device: their device.
        input_arena: where the model's inputs are.
        arena: where the slots are.
        staging: copies from the device into the arena.
    """

    def __init__(
        self, tower: Tower, device: torch.device, input_arena: SharedMemory, arena: SharedMemory, staging: Staging
    ) -> None:
        self._tower = tower
        self._device = device
        self._input_arena = input_arena
        self._arena = arena
        self._staging = staging

    @property
    def ahead(self) -> int:
        """Batches to launch before the first of them is finished, if there are that many."""
        return self._staging.ahead

    def run(self, items: Sequence[BatchItem]) -> BatchOutcome:
        """Encodes a batch and writes the slots of those items that succeed.

        Raises:
            DeviceLostError: the device is lost; nothing of the batch was told.
        """
        return self.finish(self.launch(items))

    @torch.inference_mode()
    def launch(self, items: Sequence[BatchItem]) -> LaunchedBatch:
        """Gives a batch to the device. Batches must be finished in the order in which they were launched.

        Raises:
            DeviceLostError: the device is lost.
        """
        began = self._staging.fence()
        encoded = self._encode(items)
        finite = _are_finite([matrix for found in encoded if isinstance(found, tuple) for matrix in found])
        return LaunchedBatch(items, encoded, finite, began, self._staging.fence())

    @torch.inference_mode()
    def finish(self, batch: LaunchedBatch) -> BatchOutcome:
        """Waits for a batch and writes the slots of those items that succeed.

        Raises:
            DeviceLostError: the device is lost; nothing of the batch was told.
        """
        try:
            batch.ended.wait()
            waited = time.monotonic_ns()
            results = self._stage(batch.items, _without_infinite(batch.encoded, batch.finite))
            forward = batch.ended.nanoseconds_since(batch.began)
        except RuntimeError as error:
            if self._device.type != "cuda":
                raise
            raise DeviceLostError(f"{self._device} is lost") from error
        return BatchOutcome(results, forward, time.monotonic_ns() - waited)

    def _encode(self, items: Sequence[BatchItem]) -> list[Matrices | ServiceError]:
        """The matrices of each item, or why there are none."""
        try:
            encoded = self._tower.encode([self._input(item) for item in items])
            for item, found in zip(items, encoded, strict=True):
                _check_matrices(item, found)
            return list(encoded)
        except Exception as error:
            failure = self._explain(error, len(items))
        # Out of the except block: it kept the frames of the failed forward alive, and with them its memory.
        if failure.reason is Reason.OUT_OF_MEMORY and self._device.type == "cuda":
            torch.cuda.empty_cache()
        if len(items) == 1:
            return [failure]
        half = len(items) // 2
        return self._encode(items[:half]) + self._encode(items[half:])

    def _input(self, item: BatchItem) -> TowerInput:
        return TowerInput(
            modality=item.modality,
            grid=tuple(item.grid_dim),
            tensors=tuple(tensor_view(self._input_arena, item.input_offset, spec) for spec in item.input.tensors),
        )

    def _explain(self, error: Exception, items: int) -> ServiceError:
        if isinstance(error, ServiceError):
            return error
        if is_out_of_memory(error):
            log.warning("out of memory in a forward of %d items", items)
            return ServiceError(
                Reason.OUT_OF_MEMORY,
                "the device has too little memory for this item; ask for fewer pixels (max_pixels)",
            )
        log.error("a forward of %d items failed", items, exc_info=error)
        self._check_device()
        return ServiceError(
            Reason.FORWARD_FAILED, "the model failed on this item; the server's log says why; try another file"
        )

    def _check_device(self) -> None:
        if self._device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self._device)
        except RuntimeError as error:
            raise DeviceLostError(f"{self._device} is lost") from error

    def _stage(self, items: Sequence[BatchItem], encoded: Sequence[Matrices | ServiceError]) -> list[ItemResult]:
        written = [(item, found) for item, found in zip(items, encoded, strict=True) if isinstance(found, tuple)]
        self._staging.copy(
            [matrix for _, found in written for matrix in found],
            [tensor_view(self._arena, item.payload_offset, spec) for item, _ in written for spec in own_matrices(item)],
        )
        return [self._result(item, found) for item, found in zip(items, encoded, strict=True)]

    def _result(self, item: BatchItem, found: Matrices | ServiceError) -> ItemResult:
        if isinstance(found, ServiceError):
            return ItemResult(part=item.part, reason=found.reason, message=found.message)
        if item.partial:
            return ItemResult(part=item.part)
        return ItemResult(part=item.part, checksum=slot_checksum(self._arena, item.payload_offset, item.nbytes))


def _are_finite(matrices: Sequence[torch.Tensor]) -> torch.Tensor | None:
    if not matrices:
        return None
    # aminmax carries NaN on and reads each row once; all answers come from the device together, without a wait.
    bounds = torch.stack([torch.stack(torch.aminmax(found)) for found in matrices])
    return torch.isfinite(bounds).all(dim=1).to("cpu", non_blocking=True)


def _without_infinite(
    encoded: Sequence[Matrices | ServiceError], finite: torch.Tensor | None
) -> list[Matrices | ServiceError]:
    if finite is None:
        return list(encoded)
    answers = iter(finite.tolist())
    return [
        found
        if isinstance(found, ServiceError) or all(list(islice(answers, len(found))))
        else ServiceError(
            Reason.OUTPUT_NOT_FINITE,
            "the model's output for this item holds NaN or infinity; serve the model in bfloat16 or float32",
        )
        for found in encoded
    ]


def slot_matrices(item: BatchItem) -> list[TensorSpec]:
    """The row-major matrices that a slot holds one after another, and whose column views the item's tensors are.

    A view belongs to the matrix before it if it begins where that one's columns so far end; else it begins a matrix,
    behind all bytes of the one before, at the next multiple of :data:`MATRIX_ALIGNMENT`.

    Raises:
        ValueError: the tensors are no such views, or leave columns or bytes of the payload unfilled.
    """
    matrices: list[TensorSpec] = []
    for spec in item.tensors:
        if len(spec.shape) != 2 or len(spec.strides) != 2:
            raise ValueError(f"tensor {spec.name} is no matrix")
        itemsize = TORCH_DTYPES[spec.dtype].itemsize
        last = matrices[-1] if matrices else None
        if last and spec.strides == last.strides and spec.byte_offset == last.byte_offset + _row_bytes(last):
            if spec.shape[0] != last.shape[0] or spec.dtype != last.dtype:
                raise ValueError(f"tensor {spec.name} is no column view of the matrix before it")
            last.shape[1] += spec.shape[1]
            continue
        if spec.byte_offset != (_aligned(_end(last)) if last else 0) or spec.strides[1] != itemsize:
            raise ValueError(f"tensor {spec.name} does not begin a matrix behind the one before it")
        matrices.append(
            TensorSpec(dtype=spec.dtype, shape=spec.shape, strides=spec.strides, byte_offset=spec.byte_offset)
        )
    if any(matrix.strides[0] != _row_bytes(matrix) for matrix in matrices) or _end(matrices[-1]) != item.nbytes:
        raise ValueError(f"the tensors do not fill a payload of {item.nbytes} bytes")
    return matrices


def own_matrices(item: BatchItem) -> list[TensorSpec]:
    """Those of its slot's matrices that an item makes."""
    end = item.first_matrix + item.input.matrices if item.input.matrices else None
    return slot_matrices(item)[item.first_matrix : end]


def _row_bytes(matrix: TensorSpec) -> int:
    return matrix.shape[1] * TORCH_DTYPES[matrix.dtype].itemsize


def _end(matrix: TensorSpec) -> int:
    return matrix.byte_offset + matrix.shape[0] * matrix.strides[0]


def _aligned(offset: int) -> int:
    return -(-offset // MATRIX_ALIGNMENT) * MATRIX_ALIGNMENT


def is_out_of_memory(error: Exception) -> bool:
    """The device, or the host for a tower on the CPU, has too little memory."""
    # The CPU's allocator, oneDNN and CUDA's libraries raise bare RuntimeErrors: only their texts tell them apart.
    text = str(error)
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(sign in text for sign in _OUT_OF_MEMORY)


def _check_matrices(item: BatchItem, found: Matrices) -> None:
    told = [(tuple(spec.shape), TORCH_DTYPES[spec.dtype]) for spec in own_matrices(item)]
    made = [(tuple(matrix.shape), matrix.dtype) for matrix in found]
    if told != made:
        raise ValueError(f"part {item.part}: the tower gave {made}, its layout says {told}")
