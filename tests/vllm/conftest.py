"""An encoder, a language-only vLLM beside it, and what the whole model answers in the same vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from encoder_client import SyncEncoderClient
from encoder_svc.checkpoints import write_checkpoint
from tests.conftest import StartServer, servers
from tests.server_process import ServerProcess
from tests.vllm.cases import CASES
from tests.vllm.engine import ROOT, Engine
from tests.vllm.prompts import whole

TOWERS = {"qwen2_5_vl": False, "qwen3_vl": True}
"""Whether the language-only engine must load them: vLLM 0.32 needs them for deepstack."""
POOL_BYTES = 8 << 20
TIMEOUT_SECONDS = 10.0
"""That the connector waits for an encoder."""


@pytest.fixture(scope="session")
def vllm() -> Path:
    """The command, in the environment that ``make test-vllm`` makes."""
    command = Path(os.environ.get("VLLM_VENV", ROOT / ".venv-vllm")) / "bin" / "vllm"
    assert command.exists(), f"there is no {command}; run: make test-vllm"
    return command


@dataclass
class Deployment:
    """One family, served twice: by parts and whole."""

    encoder: ServerProcess
    engine: Engine
    client: SyncEncoderClient
    """Of the test: it has media encoded, as a router does."""
    whole: dict[str, dict[str, Any]]
    """What the whole model answers, by case."""
    start: StartServer
    """Starts another encoder."""


@pytest.fixture(scope="session", params=list(TOWERS))
def deployment(
    request: pytest.FixtureRequest, vllm: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Starts it all. The whole model has ended when the language-only one starts."""
    model = tmp_path_factory.mktemp("checkpoints") / request.param
    write_checkpoint(request.param, model, preset="tiny")
    engine = Engine(vllm, model)
    try:
        engine.wait_ready()
        answers = {name: engine.chat(**whole(media)) for name, media in CASES.items()}
    finally:
        engine.close()
    with servers(model) as start:
        encoder = start()
        engine = Engine(
            vllm,
            model,
            {
                "encoders": [encoder.target],
                "transports": ["inline"],
                "pool_bytes": POOL_BYTES,
                "timeout_seconds": TIMEOUT_SECONDS,
            },
            towers=TOWERS[request.param],
        )
        try:
            engine.wait_ready()
            with SyncEncoderClient([encoder.target], transports=("inline",)) as client:
                yield Deployment(encoder, engine, client, answers, start)
        finally:
            engine.close()
