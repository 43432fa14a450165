"""A model that is spread over several workers: each has the embeddings."""

from __future__ import annotations

import pytest

from tests.vllm.cases import CASES
from tests.vllm.conftest import Deployment
from tests.vllm.prompts import encoded, language_only
from tests.vllm.test_tokens import logprobs


@pytest.mark.parametrize("deployment", ["qwen2_5_vl"], indirect=True)
def test_every_tensor_parallel_rank_is_served(deployment: Deployment) -> None:
    # The ranks wait for each other by spinning, so on two cores everything else is slow.
    engine = deployment.start_engine(deployment.encoder, options=["--tensor-parallel-size=2"], timeout_seconds=60.0)
    try:
        for case, media in CASES.items():
            choice = engine.chat(**language_only(media, encoded(deployment.client, media)))
            assert choice["token_ids"] == deployment.whole[case]["token_ids"], case
            assert logprobs(choice) == pytest.approx(logprobs(deployment.whole[case]), abs=1e-3)
    finally:
        engine.close()
