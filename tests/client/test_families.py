"""For every family the language side says what the whole model says, given the rows that its tower makes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import GenerationMixin

from encoder_client.errors import EncoderClientError
from encoder_client.language import ExpandedPrompt, LanguageOnlyModel, family_of
from encoder_client.language.families import FAMILIES, WITHOUT_LANGUAGE
from encoder_svc.checkpoints import FAMILY_NAMES, write_checkpoint
from epd.encoder.v1.media_pb2 import Modality
from tests.client.language_cases import CASES, LanguageCase, Media

NEW_TOKENS = 6
BFLOAT16_TOLERANCE = 8e-2
KINDS = {Modality.MODALITY_IMAGE: "image", Modality.MODALITY_VIDEO: "video", Modality.MODALITY_AUDIO: "audio"}


@dataclass
class Compared:
    """Both sides of one case, in one dtype."""

    case: LanguageCase
    checkpoint: Path
    dtype: torch.dtype
    whole: Any
    language: LanguageOnlyModel
    media: Media
    prompt: ExpandedPrompt

    @classmethod
    def load(cls, case: LanguageCase, checkpoint: Path, dtype: torch.dtype) -> Compared:
        whole = case.load_whole(checkpoint, dtype)
        language = LanguageOnlyModel.load(checkpoint, dtype=dtype)
        with torch.inference_mode():
            media = case.media(whole)
        layouts = [part.layout(index, language.hidden_size) for index, part in enumerate(media.parts)]
        content = [{"type": KINDS[part.modality]} for part in media.parts]
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": "What do you make of it?"}]}]
        return cls(case, checkpoint, dtype, whole, language, media, language.expand(case.text or messages, layouts))

    @property
    def rows(self) -> list[torch.Tensor]:
        return [part.rows.to(self.dtype) for part in self.media.parts]

    def whole_answer(self) -> tuple[list[int], torch.Tensor]:
        """Its tokens, and the logits of each, shape (tokens, vocabulary)."""
        arguments: dict[str, Any] = {
            name: value.to(self.dtype) if value.is_floating_point() and "second" not in name else value
            for name, value in self.media.arguments.items()
        }
        if "input_features" in arguments and self.case.family == "whisper":
            arguments["decoder_input_ids"] = self.prompt.input_ids
        else:
            arguments["input_ids"] = self.prompt.input_ids
            arguments["attention_mask"] = torch.ones_like(self.prompt.input_ids)
        if self.case.type_ids is not None:
            arguments[self.case.type_ids] = self.prompt.mm_token_type_ids
        with torch.inference_mode():
            answer: Any = GenerationMixin.generate(
                self.whole, **arguments, do_sample=False, max_new_tokens=NEW_TOKENS,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        return answer.sequences[0, self.prompt.input_ids.shape[1] :].tolist(), torch.cat(answer.logits).float()

    def answer(self, rows: list[torch.Tensor]) -> tuple[list[int], torch.Tensor]:
        answer = self.language.generate(self.prompt, rows, max_new_tokens=NEW_TOKENS, first_logits=True)
        assert answer.first_logits is not None
        return answer.token_ids, answer.first_logits


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def checkpoint_of(family: str, checkpoints: Path) -> Path:
    folder = checkpoints / family
    if not folder.exists():
        write_checkpoint(family, folder)
    return folder


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.title)
def compared(request: pytest.FixtureRequest, checkpoints: Path) -> Compared:
    case: LanguageCase = request.param
    return Compared.load(case, checkpoint_of(case.family, checkpoints), torch.float32)


def test_tokens_and_logits_equal_the_whole_models(compared: Compared) -> None:
    tokens, logits = compared.whole_answer()
    mine, my_logits = compared.answer(compared.rows)
    torch.testing.assert_close(my_logits, logits[0], atol=1e-4, rtol=0)
    assert mine == tokens


def test_every_part_changes_the_logits(compared: Compared) -> None:
    _, logits = compared.answer(compared.rows)
    for index in range(len(compared.rows)):
        spoilt = [torch.zeros_like(rows) if index == part else rows for part, rows in enumerate(compared.rows)]
        _, without = compared.answer(spoilt)
        assert (logits - without).abs().max() > 1e-2, f"part {index} is not looked at"


def test_deepstack_levels_change_the_logits(compared: Compared) -> None:
    levels = compared.language.deepstack_levels
    _, logits = compared.answer(compared.rows)
    for level in range(1, levels + 1):
        width = compared.language.hidden_size
        spoilt = [rows.clone() for rows in compared.rows]
        for rows in spoilt:
            rows[:, level * width : (level + 1) * width] = 0
        _, without = compared.answer(spoilt)
        assert (logits - without).abs().max() > 1e-2


def test_f44_the_halves_are_disjoint_and_complete(compared: Compared) -> None:
    sizes: dict[str, int] = {}
    for file in compared.checkpoint.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            sizes |= {name: opened.get_tensor(name).nbytes for name in opened.keys()}  # noqa: SIM118 # it is no dictionary
    read = compared.language.weights
    assert set(read.tensors) | set(read.left_out) == set(sizes)
    assert set(read.left_out) == {name for name in sizes if family_of(compared.case.family).is_tower(name)}
    assert read.left_out
    assert compared.language.tower_parameters == 0
    buffers = sum(sizes[name] for name in read.tensors if name.endswith("e_score_correction_bias"))
    assert compared.language.parameters * 4 == read.nbytes - buffers


@pytest.mark.parametrize("case", [case for case in CASES if case.bfloat16], ids=lambda case: case.title)
def test_bfloat16_gives_the_whole_models_tokens(case: LanguageCase, checkpoints: Path) -> None:
    compared = Compared.load(case, checkpoint_of(case.family, checkpoints), torch.bfloat16)
    tokens, logits = compared.whole_answer()
    mine, my_logits = compared.answer(compared.rows)
    torch.testing.assert_close(my_logits, logits[0], atol=BFLOAT16_TOLERANCE, rtol=0)
    # Where the best two are nearer to each other than that, either may win, as this processor rounds.
    best, second = logits.topk(2).values.unbind(1)
    near = (best - second <= 2 * BFLOAT16_TOLERANCE).tolist()
    certain = near.index(True) if True in near else len(near)
    assert mine[:certain] == tokens[:certain]


def test_every_family_with_a_language_side_is_compared() -> None:
    compared_elsewhere = {"mimo_v2"}  # transformers has no whole model of it: test_mimo_language.py
    assert {case.family for case in CASES} == set(FAMILIES) - compared_elsewhere


def test_all_known_families_can_be_written() -> None:
    assert set(FAMILIES) | set(WITHOUT_LANGUAGE) <= set(FAMILY_NAMES)


@pytest.mark.parametrize("family", WITHOUT_LANGUAGE)
def test_families_without_a_language_side_say_so(family: str, checkpoints: Path) -> None:
    with pytest.raises(EncoderClientError, match=f"{family} has no language side"):
        LanguageOnlyModel.load(checkpoint_of(family, checkpoints))
