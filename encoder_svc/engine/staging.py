"""From the device into the arena.

The arena is memory of the host, on every device. A copy is complete, bytes in place and visible to readers, when
:meth:`Staging.copy` returns: nothing is reported before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from encoder_svc.errors import SetupError
from encoder_svc.shared_memory import SharedMemory


class Staging(Protocol):
    """Copies rows into the arena."""

    def copy(self, rows: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]) -> None:
        """Copies and waits until the bytes are there.

        Args:
            rows: on the device, in the order in which the current stream computes them.
            slots: views of the arena, of the same shapes and dtypes.
        """
        ...


class HostStaging:
    """For a tower on the CPU: plain copies."""

    def copy(self, rows: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]) -> None:
        """Copies; the bytes are there when it returns."""
        for source, slot in zip(rows, slots, strict=True):
            slot.copy_(source)


class CudaStaging:
    """For a tower on a CUDA device: the arena is pinned once, and copies run on a stream of their own.

    Args:
        device: the device of the tower.
        arena: pinned for the life of the process.

    Raises:
        SetupError: the arena cannot be pinned.
    """

    def __init__(self, device: torch.device, arena: SharedMemory) -> None:
        cudart = torch.cuda.cudart()
        with torch.cuda.device(device):
            code = int(cudart.cudaHostRegister(arena.address, arena.size, 0))
        if code != 0:
            raise SetupError(
                f"CUDA cannot pin the arena of {arena.size} bytes (error {code}); lower --arena-bytes, or raise the "
                "limit of locked memory (ulimit -l)"
            )
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def copy(self, rows: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]) -> None:
        """Copies behind the forward, and waits for an event behind the copies."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for source, slot in zip(rows, slots, strict=True):
                # The allocator must not hand the memory of `source` out again before this stream has read it.
                source.record_stream(self._stream)
                slot.copy_(source, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._stream)
        done.synchronize()


def make_staging(device: torch.device, arena: SharedMemory) -> Staging:
    """The staging for a device."""
    return CudaStaging(device, arena) if device.type == "cuda" else HostStaging()
