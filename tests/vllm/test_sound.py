"""Sound for a language-only vLLM: Qwen2-Audio, by the connector alone and through the proxy."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from encoder_client import ClientSettings, SyncEncoderClient
from encoder_svc.checkpoints import write_checkpoint
from tests.conftest import servers
from tests.media.sounds import plain, tones
from tests.server_process import ServerProcess
from tests.vllm.conftest import engines
from tests.vllm.engine import Engine, RefusedError
from tests.vllm.prompts import Media, encoded, language_only, whole
from tests.vllm.proxy import proxy
from tests.vllm.test_serving import same
from tests.vllm.test_tokens import logprobs

RATE = 16_000
"""As the model takes it: vLLM and the encoder resample by different filters."""
SHORT, LONG = (Media("audio", plain(tones(seconds, RATE), RATE)) for seconds in (1.3, 4.0))
CASES = {"a sound": [SHORT], "two sounds": [LONG, SHORT], "a sound twice": [SHORT, SHORT]}


@dataclass
class Deployment:
    """Qwen2-Audio, served by parts, and what the whole model answers in the same vLLM."""

    encoder: ServerProcess
    engine: Engine
    client: SyncEncoderClient
    whole: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def heard(vllm: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    model = tmp_path_factory.mktemp("checkpoints") / "qwen2_audio"
    write_checkpoint("qwen2_audio", model, preset="tiny")
    engine = Engine(vllm, model)
    try:
        engine.wait_ready()
        answers = {name: engine.chat(**whole(media)) for name, media in CASES.items()}
    finally:
        engine.close()
    with servers(model) as start, engines(vllm, model) as start_engine:
        encoder = start()
        engine = start_engine(encoder, towers=["audio"])
        with SyncEncoderClient([encoder.target], ClientSettings(transports=("inline",))) as client:
            yield Deployment(encoder, engine, client, answers)


@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_those_of_the_whole_model(heard: Deployment, case: str) -> None:
    media = CASES[case]
    same(heard.engine.chat(**language_only(media, encoded(heard.client, media))), heard.whole[case])


def test_the_answer_depends_on_the_sound(heard: Deployment) -> None:
    one, another = (logprobs(heard.whole[case]) for case in ("a sound", "two sounds"))
    assert one != pytest.approx(another, abs=0.01)


@pytest.mark.parametrize("case", CASES)
def test_callers_of_the_proxy_notice_nothing(heard: Deployment, case: str) -> None:
    with proxy(heard.engine, heard.encoder.target) as port:
        same(heard.engine.chat(**whole(CASES[case]), port=port), heard.whole[case])


def test_the_form_of_openai(heard: Deployment) -> None:
    data = base64.b64encode(SHORT.data).decode()
    content = whole([SHORT])["content"]
    content[0] = {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}
    with proxy(heard.engine, heard.encoder.target) as port:
        same(heard.engine.chat(content, port=port), heard.whole["a sound"])
        content[0] = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        with pytest.raises(RefusedError, match="does not encode this modality"):
            heard.engine.chat(content, port=port)
