"""What must hold for every family: the right tensors are read, rows equal the reference's, alone and in any batch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch

from encoder_svc.checkpoints.writer import write_checkpoint
from encoder_svc.engine.runner import slot_matrices
from encoder_svc.models.adapter import Adapter, Tower
from encoder_svc.models.checkpoint import open_checkpoint
from encoder_svc.models.registry import FAMILIES, find_family, open_adapter
from encoder_svc.tensors import TORCH_DTYPES
from epd.internal.v1.engine_pb2 import BatchItem
from tests.models.cases import CASES
from tests.models.family_cases import FamilyCase, Medium, Prepared, prepare


@dataclass
class Loaded:
    """A family's checkpoint, loaded once for all tests of this file."""

    case: FamilyCase
    checkpoint: Path

    @cached_property
    def adapter(self) -> Adapter:
        return open_adapter(self.checkpoint, "float32")

    @cached_property
    def tower(self) -> Tower:
        return self.adapter.load_tower(torch.device("cpu"), lambda _step, _fraction: None)

    @cached_property
    def model(self) -> Any:
        return self.case.load(self.checkpoint)

    @cached_property
    def prepared(self) -> list[tuple[Medium, Prepared]]:
        return [(medium, prepare(self.adapter, medium)) for medium in self.case.media()]

    def encode(self, batch: list[Prepared]) -> list[tuple[torch.Tensor, ...]]:
        with torch.inference_mode():
            return self.tower.encode([one.input for one in batch])


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.family)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    case: FamilyCase = request.param
    directory = tmp_path_factory.mktemp(case.family) / case.family
    write_checkpoint(case.family, directory)
    return Loaded(case, directory)


def test_f44_exactly_the_towers_are_read(loaded: Loaded) -> None:
    checkpoint = open_checkpoint(loaded.checkpoint)
    family = find_family(checkpoint)
    ours = set(checkpoint.names(family.prefixes))
    apart = [name for folder, prefixes in family.folders.items() for name in checkpoint.folder(folder).names(prefixes)]
    weights = loaded.tower.weights
    assert weights.tensors == len(ours) + len(apart)
    if loaded.case.language:
        from encoder_client.language.families import family_of

        language = {name for name in checkpoint.files if not family_of(checkpoint.model_type).is_tower(name)}
        assert not ours & language
        assert ours | language == set(checkpoint.files)
        assert language


def test_rows_equal_the_references(loaded: Loaded) -> None:
    for medium, prepared in loaded.prepared:
        with torch.inference_mode():
            expected = loaded.case.reference(loaded.model, loaded.checkpoint, medium, prepared)
        rows = loaded.encode([prepared])[0][0]
        assert rows.shape == expected.shape, medium.name
        assert rows.std() > 1e-3, "the rows are all alike: nothing would be shown"
        distance = (rows - expected).abs().max().item()
        assert distance <= loaded.case.tolerance, f"{medium.name}: rows differ by {distance}"


def test_a_mixed_batch_equals_one_at_a_time(loaded: Loaded) -> None:
    towers: dict[int, list[Prepared]] = defaultdict(list)
    for _, prepared in loaded.prepared:
        towers[prepared.layout.input.tower].append(prepared)
    for batch in towers.values():
        together = loaded.encode([*batch, *batch[::-1]])
        for one, rows in zip([*batch, *batch[::-1]], together, strict=True):
            for alone, batched in zip(loaded.encode([one])[0], rows, strict=True):
                torch.testing.assert_close(batched, alone, atol=loaded.case.tolerance, rtol=0)


def test_rows_are_those_that_layout_promised(loaded: Loaded) -> None:
    for medium, prepared in loaded.prepared:
        chunk = prepared.layout.chunk
        item = BatchItem(tensors=chunk.tensors, nbytes=chunk.nbytes)
        promised = [(tuple(spec.shape), TORCH_DTYPES[spec.dtype]) for spec in slot_matrices(item)]
        delivered = [(tuple(matrix.shape), matrix.dtype) for matrix in loaded.encode([prepared])[0]]
        assert delivered == promised, medium.name
        assert chunk.tensors[0].name == "embedding"
        assert chunk.token_count == chunk.tensors[0].shape[0]
        assert prepared.layout.input.patches > 0
        assert [tensor.name for tensor in chunk.tensors] == [
            name for name in loaded.adapter.tensors if name in {tensor.name for tensor in chunk.tensors}
        ]


def test_every_family_has_a_case() -> None:
    assert {case.family for case in CASES} == set(FAMILIES)
