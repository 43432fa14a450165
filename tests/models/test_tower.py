"""Embeddings, against ``get_image_features`` of the whole model on the pixels of the torchvision-backed processor.

That the pixels used here are that processor's is shown, bit for bit, by test_preprocessing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from encoder_svc.models.adapter import Layout, TowerInput
from encoder_svc.models.packing import Grid, SegmentBounds, Segments, pack
from tests.models.encoding import embed, load, pixel_values, prepare, whole_model
from tests.models.pictures import Picture

PICTURES = (
    Picture(97, 131),
    Picture(1, 1),
    Picture(300, 220),
    Picture(20, 3000, max_pixels=100_000),
    Picture(97, 131, min_pixels=60_000),
    Picture(224, 224),
)
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def tower(tiny_checkpoint: Path) -> Any:
    return load(tiny_checkpoint)[1]


@pytest.fixture(scope="module")
def prepared(tiny_checkpoint: Path) -> list[tuple[Layout, TowerInput]]:
    adapter, _ = load(tiny_checkpoint)
    return [prepare(adapter, picture) for picture in PICTURES]


def reference_rows(model: Any, items: list[TowerInput]) -> list[torch.Tensor]:
    pixels = torch.cat([pixel_values(item.tensors[0]) for item in items])
    with torch.inference_mode():
        features = model.model.get_image_features(pixels, torch.tensor([item.grid for item in items]))
    return list(features.pooler_output)


def test_embeddings_are_those_of_the_whole_model(
    tiny_checkpoint: Path, tower: Any, prepared: list[tuple[Layout, TowerInput]]
) -> None:
    items = [item for _, item in prepared]
    expected = reference_rows(whole_model(tiny_checkpoint), items)
    given_rows = embed(tower, items)
    for (layout, _), rows, reference in zip(prepared, given_rows, expected, strict=True):
        assert list(rows.shape) == list(layout.chunk.tensors[0].shape)
        assert rows.dtype == torch.float32
        assert reference.std() > 0.5, "a reference of nothing would prove nothing"
        torch.testing.assert_close(rows, reference, atol=TOLERANCE, rtol=0)
    zeroed = [torch.zeros_like(reference) for reference in expected]
    assert all((rows - zero).abs().max() > 1000 * TOLERANCE for rows, zero in zip(given_rows, zeroed, strict=True))


def test_a_batch_of_mixed_sizes_gives_what_its_items_give_alone(
    tower: Any, prepared: list[tuple[Layout, TowerInput]]
) -> None:
    items = [item for _, item in prepared]
    together = embed(tower, items)
    backwards = embed(tower, items[::-1])[::-1]
    for item, rows, reordered in zip(items, together, backwards, strict=True):
        (alone,) = embed(tower, [item])
        torch.testing.assert_close(rows, alone, atol=TOLERANCE, rtol=0)
        torch.testing.assert_close(reordered, alone, atol=TOLERANCE, rtol=0)


def test_equal_items_of_a_batch_get_equal_rows(tower: Any, prepared: list[tuple[Layout, TowerInput]]) -> None:
    item = prepared[2][1]
    first, second = embed(tower, [item, item])
    torch.testing.assert_close(first, second, atol=TOLERANCE, rtol=0)


def test_an_item_of_a_batch_does_not_reach_its_neighbours(
    tower: Any, prepared: list[tuple[Layout, TowerInput]]
) -> None:
    kept, other = prepared[0][1], prepared[4][1]
    changed = TowerInput(other.modality, other.grid, (255 - other.tensors[0],))
    before, after = embed(tower, [kept, other])[0], embed(tower, [kept, changed])[0]
    torch.testing.assert_close(before, after, atol=TOLERANCE, rtol=0)


def test_the_warm_up_runs(tiny_checkpoint: Path, tower: Any) -> None:
    adapter, _ = load(tiny_checkpoint)
    (rows,) = embed(tower, [adapter.warm_up().item])
    assert rows.shape == (4, adapter.hidden_size)
    assert rows.isfinite().all()


def test_bfloat16_stays_as_near_as_transformers_own(
    tiny_checkpoint: Path, prepared: list[tuple[Layout, TowerInput]]
) -> None:
    items = [item for _, item in prepared]
    _, tower = load(tiny_checkpoint, "bfloat16")
    exact = torch.cat(reference_rows(whole_model(tiny_checkpoint), items))
    theirs = torch.cat(reference_rows(whole_model(tiny_checkpoint, torch.bfloat16), items)).float()
    ours = torch.cat(embed(tower, items))
    assert ours.dtype == torch.bfloat16
    cosine = torch.nn.functional.cosine_similarity(ours.float(), exact)
    assert cosine.min() > 0.99
    assert (ours.float() - exact).abs().mean() < 1.5 * (theirs - exact).abs().mean()


sides = st.integers(1, 14).map(lambda blocks: 2 * blocks)
grids = st.lists(st.tuples(st.integers(1, 3), sides, sides), min_size=1, max_size=5)


def stretches(segments: Segments, order: torch.Tensor) -> list[tuple[int, ...]]:
    """The segments by the places of their patches among all items' patches."""
    if isinstance(segments, SegmentBounds):
        assert segments.longest == segments.bounds.diff().max()
        return [tuple(part.tolist()) for part in torch.tensor_split(order, segments.bounds[1:-1].long())]
    found = []
    for group in segments:
        end = group.start + group.count * group.length
        places = torch.arange(group.start, end) if group.index is None else group.index
        found += [tuple(row) for row in order[places].view(group.count, group.length).tolist()]
    return found


@settings(deadline=None, max_examples=100)
@given(batch=grids, any_lengths=st.booleans())
def test_windows_and_frames_are_those_of_transformers(batch: list[Grid], any_lengths: bool) -> None:
    thw = torch.tensor(batch)
    plan = pack(batch, merge_size=2, window_blocks=4, any_lengths=any_lengths)

    patches = int(thw.prod(dim=1).sum())
    assert torch.equal(plan.order.sort().values, torch.arange(patches))
    window_index, bounds = get_vision_window_index(thw, spatial_merge_size=2, window_size=112, patch_size=14)
    by_patch = (window_index[:, None] * 4 + torch.arange(4)).reshape(-1)
    expected = sorted(tuple(part.tolist()) for part in torch.tensor_split(by_patch, bounds[1:-1].long()))
    assert sorted(stretches(plan.windows, plan.order)) == expected

    lengths = torch.repeat_interleave(thw[:, 1] * thw[:, 2], thw[:, 0])
    frames = sorted(tuple(sorted(frame)) for frame in stretches(plan.frames, plan.order))
    assert frames == sorted(tuple(part.tolist()) for part in torch.arange(patches).split(lengths.tolist()))

    assert torch.equal(plan.positions, get_vision_position_ids(thw, 2)[plan.order])
    assert torch.equal(plan.order[::4][plan.block_order_inverse], torch.arange(0, patches, 4))


@pytest.mark.parametrize("batch", [[(1, 16, 16)], [(1, 8, 8), (1, 32, 16), (1, 8, 8), (2, 16, 16)], [(1, 6, 10)]])
def test_frames_whose_windows_are_whole_need_no_copy(batch: list[Grid]) -> None:
    frames = pack(batch, merge_size=2, window_blocks=4).frames
    assert not isinstance(frames, SegmentBounds)
    assert all(group.index is None for group in frames)


def test_a_plan_of_other_grids_is_not_taken(tower: Any, prepared: list[tuple[Layout, TowerInput]]) -> None:
    items = [item for _, item in prepared]
    expected = [embed(tower, [item])[0] for item in items]
    for _ in range(2):
        for item, rows in zip(items, expected, strict=True):
            torch.testing.assert_close(embed(tower, [item])[0], rows, atol=TOLERANCE, rtol=0)
