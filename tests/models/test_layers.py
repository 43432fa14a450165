"""The pieces of a tower's forward, each against the plain formula or transformers' own."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import apply_rotary_pos_emb_vision

from encoder_svc.models import linear, qwen_vision_tower
from encoder_svc.models.adapter import TowerInput
from encoder_svc.models.linear import Linear
from encoder_svc.models.rotary import pair_halves, rotate, rotations
from epd.encoder.v1.media_pb2 import Modality
from tests.models.encoding import embed, load

HEADS, SIZE = 3, 20
CPU = torch.device("cpu")


@pytest.fixture(params=["packed", "plain"])
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Linear]:
    """Makes layers with kernels for packed weights, where there are some, and without."""
    if request.param == "plain":
        monkeypatch.setattr(linear, "has_packed_kernels", lambda _device, _dtype: False)
    elif not linear.has_packed_kernels(CPU, torch.float32):
        pytest.skip("no kernels for packed weights")
    return Linear


@pytest.mark.parametrize("rows", [1, 3, 64, 130])
def test_a_layer_adds_and_multiplies_as_the_plain_formula(layer: Callable[..., Linear], rows: int) -> None:
    random = torch.Generator().manual_seed(rows)
    weight, bias, x, other = (
        torch.randn(shape, generator=random) for shape in ((24, 40), (24,), (rows, 40), (rows, 24))
    )
    made, before = layer(weight, bias), other.clone()
    expected = functional.linear(x, weight, bias)
    torch.testing.assert_close(made(x), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(made.plus(x, other), expected + other, atol=1e-4, rtol=0)
    torch.testing.assert_close(made.times(x, other), expected * other, atol=1e-4, rtol=0)
    assert torch.equal(other, before)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.0)])
def test_rotation_gives_the_scores_of_transformers(dtype: torch.dtype, tolerance: float) -> None:
    positions = torch.tensor(list(itertools.product(range(5), range(7))))
    random = torch.Generator().manual_seed(0)
    fused = torch.randn(len(positions), 3, HEADS, SIZE, generator=random).to(dtype)
    frequencies = 1.0 / 10_000 ** (torch.arange(0, SIZE // 2, 2).float() / (SIZE // 2))
    angles = (positions[..., None].float() * frequencies).flatten(1).repeat(1, 2)
    query, key, value = fused.unbind(1)
    query, key = apply_rotary_pos_emb_vision(query, key, angles.cos(), angles.sin())

    order = pair_halves(HEADS, SIZE)
    paired = fused.flatten(1)[:, order].view_as(fused)
    rotate(paired, rotations(positions, SIZE))
    # In the order of the checkpoint again, so that every element is compared and not the scores alone.
    restored = paired.flatten(1)[:, order.argsort()].view_as(fused)
    for ours, theirs in zip(restored.unbind(1), (query, key, value), strict=True):
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0 if dtype == torch.float32 else 1e-2)


def attend_by_bounds(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    _bounds: torch.Tensor,
    longest: int,
    _longest: int,
) -> torch.Tensor:
    """What the kernel for any lengths is documented to compute; torch has it for CUDA alone."""
    assert bounds.dtype == torch.int32
    assert longest == bounds.diff().max()
    parts = []
    for start, end in itertools.pairwise(bounds.tolist()):
        q, k, v = (tensor[start:end].transpose(0, 1)[None] for tensor in (query, key, value))
        parts.append(functional.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))
    return torch.cat(parts)


def test_the_order_for_segments_of_any_lengths_gives_the_same_rows(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = torch.Generator().manual_seed(0)
    items = [
        TowerInput(
            Modality.MODALITY_IMAGE,
            (1, rows, columns),
            (torch.randint(0, 256, (rows * columns, 588), dtype=torch.uint8, generator=random),),
        )
        for rows, columns in ((10, 6), (16, 16), (4, 4), (8, 24), (16, 16))
    ]
    expected = embed(load(tiny_checkpoint)[1], items)
    monkeypatch.setattr(qwen_vision_tower, "takes_any_lengths", lambda *_: True)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", attend_by_bounds)
    for rows, same in zip(embed(load(tiny_checkpoint)[1], items), expected, strict=True):
        torch.testing.assert_close(rows, same, atol=1e-4, rtol=0)
