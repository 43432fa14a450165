"""An encoder, a language-only vLLM beside it, and what the whole model answers in the same vLLM."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from encoder_client import ClientSettings, SyncEncoderClient
from encoder_svc.checkpoints import write_checkpoint
from tests.conftest import StartServer, servers
from tests.server_process import ServerProcess
from tests.vllm.cases import CASES
from tests.vllm.engine import ROOT, Engine
from tests.vllm.prompts import whole

ARCHITECTURES = {"qwen2_5_vl": "", "qwen3_vl": "Qwen3VLWithoutTower"}
"""What the language-only engine is told to run, where it is not what the checkpoint names."""
POOL_BYTES = 8 << 20
TIMEOUT_SECONDS = 10.0
"""That the connector waits for an encoder."""


StartEngine = Callable[..., Engine]


@pytest.fixture(scope="session")
def vllm() -> Path:
    """The command, in the environment that ``make test-vllm`` makes."""
    command = Path(os.environ.get("VLLM_VENV", ROOT / ".venv-vllm")).absolute() / "bin" / "vllm"
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
    start_engine: StartEngine
    """Starts another language-only engine: ``start_engine(*encoders, options=(), **settings_of_the_connector)``."""


@pytest.fixture(scope="session", params=list(ARCHITECTURES))
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
    with servers(model) as start, engines(vllm, model) as start_engine:
        encoder = start()
        engine = start_engine(encoder, architecture=ARCHITECTURES[request.param])
        with SyncEncoderClient([encoder.target], ClientSettings(transports=("inline",))) as client:
            yield Deployment(encoder, engine, client, answers, start, start_engine)


@contextmanager
def engines(vllm: Path, model: Path) -> Iterator[StartEngine]:
    """Starts language-only engines, and ends them."""
    started: list[Engine] = []

    def start(
        *encoders: ServerProcess, options: Sequence[str] = (), architecture: str = "",
        towers: Sequence[str] = ("image", "video"), **more: Any,
    ) -> Engine:  # fmt: skip
        connector = {
            "encoders": [encoder.target for encoder in encoders],
            "pool_bytes": POOL_BYTES,
            "timeout_seconds": TIMEOUT_SECONDS,
            **more,
        }
        started.append(Engine(vllm, model, connector, *options, architecture=architecture, towers=towers))
        return started[-1].wait_ready()

    try:
        yield start
    finally:
        for engine in started:
            engine.close()
