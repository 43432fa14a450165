"""Attention within the segments of a packed batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from encoder_svc.models.packing import SegmentGroup


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: Sequence[SegmentGroup]) -> torch.Tensor:
    """Softmax attention of every patch over its own segment.

    Args:
        query: shape (patches, heads, head size), in packed order.
        key: the same.
        value: the same.
        groups: that cover every patch once.

    Returns:
        Shape (patches, heads · head size).
    """
    patches, heads, size = query.shape
    out = query.new_empty(patches, heads * size)
    for group in groups:
        end = group.start + group.count * group.length
        q, k, v = (
            (tensor[group.start : end] if group.index is None else tensor[group.index])
            .view(group.count, group.length, heads, size)
            .transpose(1, 2)
            for tensor in (query, key, value)
        )
        rows = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(-1, heads * size)
        if group.index is None:
            out[group.start : end] = rows
        else:
            out[group.index] = rows
    return out
