"""In half precision rows point where transformers' rows in float32 point."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from encoder_svc.checkpoints.writer import write_checkpoint
from encoder_svc.models.registry import open_adapter
from epd.encoder.v1.media_pb2 import Modality
from tests.models.cases import CASES
from tests.models.cases.audio import CASES as AUDIO_CASES
from tests.models.family_cases import FamilyCase, Medium, prepare

LEAST_COSINE, MEAN_COSINE = 0.998, 0.999
HALF = [
    *((case, "bfloat16") for case in CASES if case.family != "mimo_v2"),
    *((case, "float16") for case in AUDIO_CASES),
]


def one_of_each_kind(media: tuple[Medium, ...]) -> list[Medium]:
    """The first of each modality."""
    found: dict[Modality, Medium] = {}
    for medium in media:
        found.setdefault(medium.item.modality, medium)
    return list(found.values())


@pytest.mark.parametrize(("case", "dtype"), HALF, ids=lambda value: value if isinstance(value, str) else value.family)
def test_rows_point_where_the_references_do(case: FamilyCase, dtype: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / case.family
    write_checkpoint(case.family, checkpoint)
    model = case.load(checkpoint)
    adapter = open_adapter(checkpoint, dtype)
    tower = adapter.load_tower(torch.device("cpu"), lambda _step, _fraction: None)
    for medium in one_of_each_kind(case.media()):
        prepared = prepare(adapter, medium)
        with torch.inference_mode():
            expected = case.reference(model, checkpoint, medium, prepared)
            rows = tower.encode([prepared.input])[0][0]
        assert rows.dtype == getattr(torch, dtype)
        # Deepstack tensors stand beside each other in a row.
        levels = expected.shape[1] // adapter.hidden_size
        ours, theirs = (matrix.float().view(len(matrix), levels, -1) for matrix in (rows, expected))
        nearness = torch.nn.functional.cosine_similarity(ours, theirs, dim=-1)
        assert nearness.min() > LEAST_COSINE, medium.name
        assert nearness.mean() > MEAN_COSINE, medium.name
