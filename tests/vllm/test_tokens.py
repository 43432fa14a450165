"""The language-only engine says what the whole model says in the same vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from tests.vllm.cases import CASES
from tests.vllm.conftest import Deployment
from tests.vllm.prompts import encoded, language_only


def logprobs(choice: dict[str, Any]) -> list[float]:
    return [float(token["logprob"]) for token in choice["logprobs"]["content"]]


@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_those_of_the_whole_model(deployment: Deployment, case: str) -> None:
    media = CASES[case]
    choice = deployment.engine.chat(**language_only(media, encoded(deployment.client, media)))
    assert choice["token_ids"] == deployment.whole[case]["token_ids"]
    assert logprobs(choice) == pytest.approx(logprobs(deployment.whole[case]), abs=1e-3)


def test_the_answer_depends_on_the_image(deployment: Deployment) -> None:
    """So equal answers mean equal embeddings."""
    one, another = (deployment.whole[case] for case in ("one image", "another image of its size"))
    assert max(abs(a - b) for a, b in zip(logprobs(one), logprobs(another), strict=True)) > 0.01
