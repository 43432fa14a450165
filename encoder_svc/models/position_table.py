"""Learned positions on a square grid, interpolated to the grid of each item."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from encoder_svc.models.packing import Grid


@dataclass(frozen=True)
class Taps:
    """Between which four entries of the table each patch lies, in packed order."""

    indices: torch.Tensor
    """int64, shape (patches, 4)."""
    weights: torch.Tensor
    """float32, shape (patches, 4), each row of sum 1."""


class PositionTable:
    """Bilinear interpolation, corners on corners: ``get_vision_interpolation_indices_and_weights`` of transformers.

    Args:
        weight: shape (side², width).
        device: where it is used.
    """

    def __init__(self, weight: torch.Tensor, device: torch.device) -> None:
        # In float32 whatever the tower's type, since the reference weights and sums in float32.
        self._weight = weight.float().to(device)
        self._side = int(len(weight) ** 0.5)

    def taps(self, grids: Sequence[Grid], positions: torch.Tensor, order: torch.Tensor) -> Taps:
        """Where patches lie.

        Args:
            grids: of the items.
            positions: row and column of each patch in packed order, shape (patches, 2).
            order: the place among all items' patches of each patch of the packed order.
        """
        sizes = torch.tensor([grid[1:] for grid in grids])
        counts = torch.tensor([t * h * w for t, h, w in grids])
        lengths = sizes.repeat_interleave(counts, dim=0).to(order.device)[order]
        places = positions.float() * (self._side - 1) / (lengths - 1).clamp(min=1)
        first = places.floor()
        second_weight = places - first
        low = first.long().clamp(0, self._side - 1)
        high = (low + 1).clamp(max=self._side - 1)
        rows, columns = torch.stack([low, high]).unbind(2)
        row_weights, column_weights = torch.stack([1 - second_weight, second_weight]).unbind(2)
        corners = [(0, 0), (0, 1), (1, 0), (1, 1)]
        return Taps(
            torch.stack([rows[up] * self._side + columns[left] for up, left in corners], dim=1),
            torch.stack([row_weights[up] * column_weights[left] for up, left in corners], dim=1),
        )

    def __call__(self, taps: Taps) -> torch.Tensor:
        """float32, shape (patches, width)."""
        return functional.embedding_bag(taps.indices, self._weight, per_sample_weights=taps.weights, mode="sum")
