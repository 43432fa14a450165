"""Attention within the segments of a packed batch."""

from __future__ import annotations

import torch
from torch.nn import functional

from encoder_svc.models.packing import SegmentBounds, Segments

_FLASH_CAPABILITY = (8, 0)
_FLASH_HEAD_SIZES = range(8, 257, 8)
"""What torch's FlashAttention kernel for segments of any length takes."""


def takes_any_lengths(device: torch.device, dtype: torch.dtype, head_size: int) -> bool:
    """One kernel attends within segments of any lengths that stand one after another.

    Args:
        device: of the tower.
        dtype: of the tower.
        head_size: of a query.
    """
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and dtype in (torch.bfloat16, torch.float16)
        and head_size in _FLASH_HEAD_SIZES
        and torch.cuda.get_device_capability(device) >= _FLASH_CAPABILITY
    )


def attend(fused: torch.Tensor, segments: Segments) -> torch.Tensor:
    """Softmax attention of every patch over its own segment.

    Args:
        fused: query, key and value of each patch; shape (patches, 3, heads, head size), in packed order.
        segments: that cover every patch once.

    Returns:
        Shape (patches, heads · head size).
    """
    patches, _, heads, size = fused.shape
    if isinstance(segments, SegmentBounds):
        # Not at the top: it takes seconds, with torch's compiler, and only CUDA comes here.
        from torch.nn.attention.varlen import varlen_attn

        query, key, value = fused.unbind(1)
        bounds, longest = segments.bounds, segments.longest
        rows: torch.Tensor = varlen_attn(query, key, value, bounds, bounds, longest, longest)  # type: ignore[assignment]
        return rows.reshape(patches, heads * size)
    mixed = []
    for group in segments:
        end = group.start + group.count * group.length
        chosen = fused[group.start : end] if group.index is None else fused.index_select(0, group.index)
        query, key, value = chosen.view(group.count, group.length, 3, heads, size).permute(2, 0, 3, 1, 4).unbind(0)
        attended = functional.scaled_dot_product_attention(query, key, value)
        mixed.append((group, attended.transpose(1, 2).reshape(-1, heads * size)))
    if len(mixed) == 1 and mixed[0][0].index is None:
        return mixed[0][1]
    out = fused.new_empty(patches, heads * size)
    for group, rows in mixed:
        if group.index is None:
            out[group.start : group.start + len(rows)] = rows
        else:
            out[group.index] = rows
    return out
