"""From the device into the arena, and the order of what runs on the device.

The arena is memory of the host, on every device. A copy is complete, bytes in place and visible to readers, when
:meth:`Staging.copy` returns: nothing is reported before.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol, Self

import torch

from encoder_svc.errors import SetupError
from encoder_svc.shared_memory import SharedMemory


class Fence(Protocol):
    """A place in what the device has been given to do."""

    def wait(self) -> None:
        """Waits until the device has come here."""
        ...

    def nanoseconds_since(self, earlier: Self) -> int:
        """From when the device came to ``earlier`` to when it came here; both are behind it."""
        ...


class Staging(Protocol):
    """One device's way into the arena."""

    ahead: int
    """Batches that are given to the device before the first of them is staged: the device works on one while the host
    waits for, copies and sums the one before. 0 where the host is the device."""

    def fence(self) -> Fence:
        """A fence behind all that the forward's stream has been given."""
        ...

    def copy(self, rows: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]) -> None:
        """Copies and waits until the bytes are there.

        Args:
            rows: on the device, behind a fence that was waited for.
            slots: views of the arena, of the same shapes and dtypes.
        """
        ...


class HostFence:
    """For a tower on the CPU: it is there as soon as it is made."""

    def __init__(self) -> None:
        self._made = time.monotonic_ns()

    def wait(self) -> None:
        """Returns."""

    def nanoseconds_since(self, earlier: Self) -> int:
        """See :meth:`Fence.nanoseconds_since`."""
        return self._made - earlier._made


class HostStaging:
    """For a tower on the CPU: plain copies."""

    ahead = 0

    def fence(self) -> HostFence:
        """See :meth:`Staging.fence`."""
        return HostFence()

    def copy(self, rows: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]) -> None:
        """Copies; the bytes are there when it returns."""
        for source, slot in zip(rows, slots, strict=True):
            slot.copy_(source)


class CudaFence:
    """An event on the stream that is current when it is made."""

    def __init__(self) -> None:
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record()

    def wait(self) -> None:
        """Waits without holding the GIL."""
        self._event.synchronize()

    def nanoseconds_since(self, earlier: Self) -> int:
        """See :meth:`Fence.nanoseconds_since`."""
        return int(earlier._event.elapsed_time(self._event) * 1e6)


class CudaStaging:
    """For a tower on a CUDA device: both arenas are pinned once, and copies run on a stream of their own.

    Pinned, the memory of an arena is taken from the system at once and not when it is first written.

    Args:
        device: the device of the tower.
        input_arena: pinned for the life of the process, so that inputs are copied while the device computes.
        arena: pinned for the life of the process.

    Raises:
        SetupError: an arena cannot be pinned.
    """

    ahead = 1

    def __init__(self, device: torch.device, input_arena: SharedMemory, arena: SharedMemory) -> None:
        _pin(device, arena, "arena", "--arena-bytes")
        _pin(device, input_arena, "input arena", "--input-arena-bytes")
        self._stream = torch.cuda.Stream(device)

    def fence(self) -> CudaFence:
        """See :meth:`Staging.fence`."""
        return CudaFence()

    def copy(self, rows: Sequence[torch.Tensor], slots: Sequence[torch.Tensor]) -> None:
        """Copies beside the forward of the next batch, and waits for the copies alone."""
        # The caller holds `rows` until this returns, so the allocator cannot hand their memory out before it is read.
        with torch.cuda.stream(self._stream):
            for source, slot in zip(rows, slots, strict=True):
                slot.copy_(source, non_blocking=True)
            CudaFence().wait()


def _pin(device: torch.device, memory: SharedMemory, name: str, option: str) -> None:
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostRegister(memory.address, memory.size, 0))
    if code != 0:
        raise SetupError(
            f"CUDA cannot pin the {name} of {memory.size} bytes (error {code}); lower {option}, or raise the limit of "
            "locked memory (ulimit -l)"
        )


def make_staging(device: torch.device, input_arena: SharedMemory, arena: SharedMemory) -> Staging:
    """The staging for a device.

    Raises:
        SetupError: CUDA cannot pin an arena.
    """
    return CudaStaging(device, input_arena, arena) if device.type == "cuda" else HostStaging()
