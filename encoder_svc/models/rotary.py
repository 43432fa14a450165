"""Rotary positions in two dimensions, applied to queries and keys in place.

A rotation of the pair (a, b) by an angle is the product of a + ib with a complex number of size one. Checkpoints keep
the two halves of a pair half a head apart. The rows of the query's and the key's weights are put beside each other when
they are loaded, so that one product in place, over memory that is read once, rotates all. Attention sees only products
of queries with keys, which do not change when the elements of both are ordered anew.
"""

from __future__ import annotations

import torch

THETA = 10_000.0
"""The base of the frequencies: all towers of this kind have it, and no config names another."""


def pair_halves(heads: int, head_size: int) -> torch.Tensor:
    """The order of a head's elements in which those that rotate together are neighbours.

    Returns:
        For each row of a fused layer of queries, keys and values, the checkpoint's row that comes there; int64,
        shape (3 · heads · head size,). Rows of values stay.
    """
    rows = torch.arange(3 * heads * head_size)
    rotated = 2 * heads * head_size
    paired = rows[:rotated].view(2 * heads, 2, head_size // 2).transpose(1, 2).reshape(-1)
    return torch.cat([paired, rows[rotated:]])


def rotations(positions: torch.Tensor, head_size: int) -> torch.Tensor:
    """The complex numbers that queries and keys are multiplied with.

    Half of a head's pairs turn with the row and half with the column: the angle of pair i is
    ``position · THETA^(−4i / head size)`` (Su et al., RoFormer, arXiv 2104.09864, eq. 15, for each axis).

    Args:
        positions: row and column of each patch, shape (patches, 2).
        head_size: a multiple of four.

    Returns:
        complex64, shape (patches, 1, head size / 2), on the device of ``positions``.
    """
    steps = torch.arange(0, head_size // 2, 2, dtype=torch.float32, device=positions.device) / (head_size // 2)
    angles = (positions[..., None].float() * (1.0 / THETA**steps)).flatten(1)
    return torch.polar(torch.ones_like(angles), angles)[:, None]


def rotate(fused: torch.Tensor, by: torch.Tensor) -> None:
    """Rotates queries and keys in place, in float32 whatever their type.

    Args:
        fused: shape (patches, 3, heads, head size), heads as :func:`pair_halves` orders them.
        by: what :func:`rotations` gave.
    """
    patches, _, heads, size = fused.shape
    turned = fused[:, :2].view(patches, 2 * heads, size // 2, 2)
    if fused.dtype == torch.float32:
        torch.view_as_complex(turned).mul_(by)
    else:
        turned.copy_(torch.view_as_real(torch.view_as_complex(turned.float()).mul_(by)))
