"""Several encoders behind one engine, which ask for TLS and a token."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.photograph import photo
from tests.rpc.certificates import make_authority, make_certificate
from tests.rpc.metrics_page import metric
from tests.server_process import ServerProcess
from tests.vllm.cases import CASES
from tests.vllm.conftest import Deployment
from tests.vllm.engine import Engine, RefusedError
from tests.vllm.prompts import Media, encoded, language_only, whole
from tests.vllm.proxy import proxy
from tests.vllm.test_serving import same
from tests.waiting import eventually

pytestmark = pytest.mark.parametrize("deployment", ["qwen2_5_vl"], indirect=True)

TOKEN = "a token of no worth"
CALLERS = f"""
[[credential]]
identity = "language side"
permissions = ["encode", "read", "info"]
token_sha256 = "{hashlib.sha256(TOKEN.encode()).hexdigest()}"
"""


@dataclass
class Secured:
    """Two encoders, and what is needed to call them."""

    encoders: list[ServerProcess]
    engine: Engine
    authority: Path
    token: Path

    def proxy_options(self) -> list[str]:
        return [f"--tls-ca={self.authority}", f"--token-file={self.token}"]

    @property
    def targets(self) -> str:
        return ",".join(encoder.target for encoder in self.encoders)


@pytest.fixture
def secured(deployment: Deployment, tmp_path: Path) -> Iterator[Secured]:
    authority = make_authority(tmp_path)
    own = make_certificate(tmp_path, authority, "encoder")
    callers, token = tmp_path / "callers.toml", tmp_path / "token"
    callers.write_text(CALLERS)
    token.write_text(TOKEN)
    encoders = [deployment.start(tls_certificate=own.certificate, tls_key=own.key, callers=callers) for _ in range(2)]
    engine = deployment.start_engine(*encoders, tls_ca=str(authority.certificate), token_file=str(token))
    try:
        yield Secured(encoders, engine, authority.certificate, token)
    finally:
        engine.close()


def test_a_fleet_by_tls(deployment: Deployment, secured: Secured) -> None:
    with proxy(secured.engine, secured.targets, *secured.proxy_options()) as port:
        for case in CASES:
            same(secured.engine.chat(**whole(CASES[case]), port=port), deployment.whole[case])
    assert TOKEN not in secured.engine.log
    for refused in ([], secured.proxy_options()[:1]):
        with (
            proxy(secured.engine, secured.targets, "--encode-seconds=2", *refused) as port,
            pytest.raises(RefusedError),
        ):
            secured.engine.chat(**whole([Media("image", photo(168, 112))]), port=port)
    _one_dies(deployment, secured)


def _one_dies(deployment: Deployment, secured: Secured) -> None:
    """The request goes to the other encoder, and is answered as ever."""
    media = [Media("image", photo(196, 140, quality=30))]
    chunks = encoded(deployment.client, media)  # by another encoder of the same model, so it has the same key
    expected = deployment.engine.chat(**language_only(media, chunks))
    with ExitStack() as held, ThreadPoolExecutor(1) as threads:
        for encoder in secured.encoders:
            held.enter_context(encoder.held(encoder.engine()))
        answer = threads.submit(secured.engine.chat, **language_only(media, chunks, with_media=True))
        victim = asyncio.run(_worker(secured.encoders))
        victim.process.kill()
        held.close()
        same(answer.result(), expected)


async def _worker(encoders: list[ServerProcess]) -> ServerProcess:
    """The encoder that works on something."""
    found: list[ServerProcess] = []

    async def works() -> bool:
        found.extend([encoder for encoder in encoders if await metric(encoder, "live_requests")])
        return bool(found)

    await eventually(works)
    return found[0]
