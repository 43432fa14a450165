"""A linear layer that multiplies or adds where the hardware can do both in one pass.

On an x86 CPU the weight is brought into the layout of oneDNN's kernels once, when it is loaded, and the step behind
the matrix product is done while its output is in cache. These operators are those that torch's own compiler emits; they
have no public name, and the pin of torch holds them still. Elsewhere the step is an operator of its own, in place.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn import functional


class Linear:
    """``x·Wᵀ + b``, for inference alone.

    Args:
        weight: shape (out, in), on the device that the layer runs on. A copy may be kept instead of it.
        bias: shape (out,).
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        self._packed = has_packed_kernels(weight.device, weight.dtype)
        weight = weight.detach().contiguous()
        self._weight: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight) if self._packed else weight
        self._bias = bias.detach().contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (n, in) → (n, out)."""
        if not self._packed:
            return functional.linear(x, self._weight, self._bias)
        # SiLU could follow in the same pass too, but takes longer there than by itself.
        rows: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, self._bias, "none", [], "")
        return rows

    def times(self, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        """The layer's output times ``factor``, element by element: shapes (n, in), (n, out) → (n, out)."""
        return self._combine(x, factor, "mul") if self._packed else self(x).mul_(factor)

    def plus(self, x: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
        """The layer's output plus ``term``: shapes (n, in), (n, out) → (n, out)."""
        return self._combine(x, term, "add") if self._packed else self(x).add_(term)

    def _combine(self, x: torch.Tensor, other: torch.Tensor, operation: str) -> torch.Tensor:
        rows: torch.Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, other, self._weight, self._bias, operation)
        return rows


def has_packed_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """There are kernels that take weights in a layout of their own, on this device and in this type."""
    return (
        device.type == "cpu"
        and torch.backends.mkldnn.is_available()
        and not torch.backends.mkldnn.is_acl_available()
        and _packed_kernels_work(dtype)
    )


@lru_cache
def _packed_kernels_work(dtype: torch.dtype) -> bool:
    # Tried and not looked up: which types oneDNN takes depends on the CPU, and no public name promises the operators.
    x, weight, bias = (torch.ones(shape, dtype=dtype) for shape in ((2, 8), (8, 8), (8,)))
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight)
        rows = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
        found = torch.ops.mkldnn._linear_pointwise.binary(x, rows, packed, bias, "mul")
    except (AttributeError, RuntimeError):
        return False
    return torch.equal(rows, torch.full_like(rows, 9)) and torch.equal(found, torch.full_like(rows, 81))
