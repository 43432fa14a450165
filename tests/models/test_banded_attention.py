"""Attention in a band, against dense masks."""

from __future__ import annotations

import math

import pytest
import torch

from encoder_svc.models.banded_attention import BLOCK, Band, Sinks, attend_in_band, plan_band
from encoder_svc.models.mimo_v2_config import SinkForm

CPU = torch.device("cpu")
LENGTHS = (1, 7, BLOCK, 300, BLOCK + 24, 7, BLOCK + 25, 3 * BLOCK + 5, 300)


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, band: Band, sinks: Sinks | None) -> torch.Tensor:
    """One segment, head by head."""
    share, places = query.shape[1] // key.shape[1], torch.arange(len(query))
    distance = places - places[:, None]
    seen = torch.ones(len(query), len(query), dtype=torch.bool)
    if band.back is not None:
        seen &= distance >= -band.back
    if band.ahead is not None:
        seen &= distance <= band.ahead
    heads = []
    for head in range(query.shape[1]):
        scores = (query[:, head] @ key[:, head // share].T / math.sqrt(query.shape[2])).masked_fill(~seen, -math.inf)
        if sinks is not None and sinks.form is SinkForm.FIRST_KEY:
            scores[:, 0] += sinks.values[head]
        total = scores.exp().sum(dim=1, keepdim=True)
        if sinks is not None and sinks.form is SinkForm.SOFTMAX:
            total += sinks.values[head].exp()
        heads.append(scores.exp() / total @ value[:, head // share])
    return torch.cat(heads, dim=1)


@pytest.mark.parametrize("form", [None, *SinkForm])
@pytest.mark.parametrize("band", [Band(12, 12), Band(64, 64), Band(16, 0), Band(0, 5), Band(None, 0), Band(None, None)])
@pytest.mark.parametrize("key_heads", [1, 4])
def test_equals_dense_masks(band: Band, form: SinkForm | None, key_heads: int) -> None:
    generator = torch.Generator().manual_seed(len(LENGTHS))
    query, key, value = (
        torch.randn(sum(LENGTHS), heads, 16, generator=generator) for heads in (4, key_heads, key_heads)
    )
    sinks = None if form is None else Sinks(torch.tensor([-1.0, 0.0, 2.0, 4.0]), form)
    made = attend_in_band(query, key, value, plan_band(LENGTHS, band, CPU), sinks)
    parts = zip(query.split(LENGTHS), key.split(LENGTHS), value.split(LENGTHS), strict=True)
    expected = torch.cat([dense(q, k, v, band, sinks) for q, k, v in parts])
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=0)


def test_work_grows_with_the_length_and_calls_with_the_distinct_lengths() -> None:
    band = Band(64, 64)
    (one, *_), many = (plan_band([4096] * count, band, CPU) for count in (1, 8))
    assert one.width == BLOCK + 128
    assert len(plan_band([4096], band, CPU)) == len(many) <= 4
    assert sum(group.count * group.rows * group.width for group in many) == 8 * 4096 * (BLOCK + 128)


def test_an_item_of_a_batch_sees_nothing_of_the_others() -> None:
    query, key, value = torch.randn(3, 400, 2, 8).unbind(0)
    groups = plan_band([200, 200], Band(64, 64), CPU)
    before = attend_in_band(query, key, value, groups)[:200]
    key[200:] = 1e6
    value[200:] = math.nan
    assert torch.equal(attend_in_band(query, key, value, groups)[:200], before)
