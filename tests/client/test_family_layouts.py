"""What adapters tell and make is what the language side needs: from media files come the whole model's tokens.

The adapter prepares and encodes a file; the whole model gets the same input from transformers' processors, as the
family's reference in ``tests/models/cases`` makes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationMixin

from encoder_client.language import ExpandedPrompt, LanguageOnlyModel
from encoder_client.language.families import FAMILIES
from encoder_client.language.family import Entrance
from encoder_svc.checkpoints import write_checkpoint
from encoder_svc.models.registry import open_adapter
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.media_pb2 import Modality
from tests.models.cases import CASES
from tests.models.family_cases import FamilyCase, Medium, prepare

NEW_TOKENS = 6
KINDS = {Modality.MODALITY_IMAGE: "image", Modality.MODALITY_VIDEO: "video", Modality.MODALITY_AUDIO: "audio"}
DECODER_START = "<|startoftranscript|><|en|><|transcribe|><|notimestamps|>"


@dataclass
class Recorded:
    """What a reference hands to the whole model's ``get_…_features``."""

    arguments: dict[str, Any] = field(default_factory=dict)

    def wrap(self, features: Callable[..., Any], signed: Callable[..., Any]) -> Callable[..., Any]:
        """The same function; ``signed`` has the names of its arguments."""

        def call(*arguments: Any, **named: Any) -> Any:
            bound = inspect.signature(signed).bind(*arguments, **named).arguments
            self.arguments = {**bound, **bound.get("kwargs", {})}
            self.arguments.pop("kwargs", None)
            self.arguments.pop("return_dict", None)
            return features(*arguments, **named)

        return call


def one_of_each_kind(media: tuple[Medium, ...]) -> list[Medium]:
    """The second of each modality, where there is one: the first is often the plainest."""
    found: dict[int, list[Medium]] = {}
    for medium in media:
        found.setdefault(medium.item.modality, []).append(medium)
    return [same[min(1, len(same) - 1)] for same in found.values()]


def whole_answer(model: Any, prompt: ExpandedPrompt, type_ids: str | None, arguments: dict[str, Any]) -> Any:
    marks = {type_ids: prompt.mm_token_type_ids} if type_ids is not None else {}
    seconds = {name: value for name, value in prompt.values.items() if "second" in name}
    return GenerationMixin.generate(
        model, input_ids=prompt.input_ids, attention_mask=torch.ones_like(prompt.input_ids), **marks, **seconds,
        **arguments, do_sample=False, max_new_tokens=NEW_TOKENS, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip


@pytest.mark.parametrize("case", [case for case in CASES if case.family in FAMILIES], ids=lambda case: case.family)
def test_files_give_the_whole_models_tokens(case: FamilyCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tmp_path / case.family
    write_checkpoint(case.family, checkpoint)
    adapter = open_adapter(checkpoint, "float32")
    tower = adapter.load_tower(torch.device("cpu"), lambda _step, _fraction: None)
    model: Any = case.load(checkpoint)
    language = LanguageOnlyModel.load(checkpoint)
    family = FAMILIES[case.family]
    generates = isinstance(model, GenerationMixin)
    attended = family.entrance is Entrance.CROSS_ATTENTION
    for medium in one_of_each_kind(case.media()):
        prepared = prepare(adapter, medium)
        recorded = Recorded()
        with torch.inference_mode(), monkeypatch.context() as patched:
            for kind in KINDS.values():
                name = f"get_{kind}_features"
                if generates and (features := getattr(model, name, None)) is not None:
                    patched.setattr(model, name, recorded.wrap(features, getattr(model.base_model, name)))
            reference = case.reference(model, checkpoint, medium, prepared)
            rows = tower.encode([prepared.input])[0][0].clone()
        layout = EmbeddingChunk()
        layout.CopyFrom(prepared.layout.chunk)
        layout.modality = medium.item.modality  # the front adds it
        content = [{"type": KINDS[medium.item.modality]}, {"type": "text", "text": "what?"}]
        prompt = language.expand(DECODER_START if attended else [{"role": "user", "content": content}], [layout])
        answer = language.generate(prompt, [rows], max_new_tokens=NEW_TOKENS, first_logits=True)
        assert answer.first_logits is not None
        if recorded.arguments and not attended:
            with torch.inference_mode():
                whole = whole_answer(model, prompt, family.type_ids_argument, recorded.arguments)
            tokens, logits = whole.sequences[0, prompt.input_ids.shape[1] :].tolist(), whole.logits[0][0]
        else:
            # Its reference calls the tower's modules one by one; that rows enter rightly, test_families.py shows.
            said = language.generate(prompt, [reference], max_new_tokens=NEW_TOKENS, first_logits=True)
            assert said.first_logits is not None
            tokens, logits = said.token_ids, said.first_logits
        torch.testing.assert_close(answer.first_logits, logits, atol=2e-3, rtol=0)
        assert answer.token_ids == tokens, medium.name
