"""An engine with its own tower, and encoder, proxy and language-only engine, on the same cores, by turns."""

from __future__ import annotations

import itertools
import json
import os
import socket
import struct
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

from aiohttp import ClientSession, ClientTimeout, TCPConnector

from encoder_client.bench.chat_load import MODEL, Chats, Timing, run_load
from encoder_client.bench.display import Display
from encoder_client.bench.pictures import Pictures
from encoder_client.bench.processes import MemoryWatch, Server, started
from encoder_client.bench.result import (
    ENCODER,
    ENGINE,
    LANGUAGE_ONLY,
    PROXY,
    SPLIT,
    WHOLE,
    Percentiles,
    Result,
    Served,
    this_machine,
)
from encoder_client.integrations.vllm.plugin import WITHOUT_TOWER

REQUEST_SECONDS = 600.0
NEW, REPEATED = "new", "repeated"
"""Images that nobody has seen, and images that come round and round."""
_ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
_TOWER_NAMES = ("visual.", "vision_tower.", "vision_model.", "audio_tower.", "multi_modal_projector.")
_ENVIRONMENT = ("VLLM_", "OMP_")


@dataclass(frozen=True)
class Options:
    """What is measured, and how."""

    model: Path
    vllm: str
    """The command, in an environment that has the client too."""
    encoder: str
    """The command ``encoder-svc``."""
    dtype: str
    image_size: int
    """Pixels of a side."""
    images: int
    """Of a request."""
    pictures: int
    """That repeated images go round."""
    tokens: int
    """Of each answer."""
    concurrency: int
    requests: int
    """Of each way of serving and each workload, in a round."""
    rounds: int
    vllm_options: tuple[str, ...]
    """Of both engines."""
    encoder_options: tuple[str, ...]

    def parameters(self) -> dict[str, str | int]:
        """For the result."""
        plain: dict[str, str | int] = {
            name: value if isinstance(value, int) else " ".join(value) if isinstance(value, tuple) else str(value)
            for name, value in vars(self).items()
            if name not in ("model", "vllm", "encoder")
        }
        settings = {name: value for name, value in os.environ.items() if name.startswith(_ENVIRONMENT)}
        return {"model": self.model.name} | plain | settings


async def measure_vllm(options: Options, command_line: str, display: Display) -> Result:
    """Starts both, takes turns, and ends them.

    Raises:
        EncoderClientError: one of them does not serve, or a request failed.
    """
    machine, started_at, begun = this_machine(), datetime.now(UTC), monotonic()
    servers: dict[str, Server] = {}
    memory = MemoryWatch(servers)
    timeout = ClientTimeout(total=REQUEST_SECONDS)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(memory.watching())
        session = await stack.enter_async_context(ClientSession(timeout=timeout, connector=TCPConnector(limit=0)))
        deployment = _Deployment(options, session, servers, display, stack)
        urls = {WHOLE: await deployment.whole(), SPLIT: await deployment.split()}
        workloads = loads(options)
        for workload, chats in workloads.items():
            # The first requests of an engine are slow, and repeated images are to be in all caches.
            warm_up = options.pictures if workload == REPEATED else options.concurrency
            for side, url in urls.items():
                with display.stage(f"warming up: {workload} images, {side}", warm_up) as done:
                    await run_load(session, url, chats[side], warm_up, options.concurrency, done)
        with_start = dict(memory.peaks)
        memory.begin()
        rounds: dict[tuple[str, str], list[tuple[float, list[Timing]]]] = defaultdict(list)
        for number in range(options.rounds):
            for workload, chats in workloads.items():
                for side, url in urls.items() if number % 2 == 0 else reversed(urls.items()):
                    text = f"round {number + 1} of {options.rounds}: {workload} images, {side}"
                    with display.stage(text, options.requests) as done:
                        rounds[workload, side].append(
                            await run_load(session, url, chats[side], options.requests, options.concurrency, done)
                        )
        serving = dict(memory.peaks)
    return Result(
        command_line=command_line,
        started_at=started_at.isoformat(timespec="seconds"),
        seconds=round(monotonic() - begun, 1),
        machine=machine,
        parameters=options.parameters(),
        workloads={
            workload: {side: _served(rounds[workload, side]) for side in urls} for workload in workloads
        },
        peak_bytes={
            name: {"serving": serving[name], "with_start": max(serving[name], with_start[name])} for name in servers
        },
        tower_bytes=tower_bytes(options.model, _ITEMSIZE[options.dtype]),
    )  # fmt: skip


class _Deployment:
    """Starts what is measured; it ends with the stack."""

    def __init__(
        self, options: Options, session: ClientSession, servers: dict[str, Server], display: Display,
        stack: AsyncExitStack,
    ) -> None:  # fmt: skip
        self._options = options
        self._session = session
        self._servers = servers
        self._display = display
        self._stack = stack

    async def whole(self) -> str:
        """Its address."""
        return await self._engine(ENGINE)

    async def split(self) -> str:
        """The proxy's address."""
        options = self._options
        encoder = await self._start(
            ENCODER, options.encoder, "serve", f"--model={options.model}", f"--dtype={options.dtype}",
            "--listen=127.0.0.1:0", "--mooncake=off", "--log-level=warning", *options.encoder_options,
        )  # fmt: skip
        with self._display.stage("starting the encoder"):
            target = await encoder.printed(r"^encoder-svc ready target=(\S+)")
        connector = {
            "ec_role": "ec_consumer",
            "ec_connector": "EncoderServiceConnector",
            "ec_connector_module_path": "encoder_client.integrations.vllm.connector",
            "ec_connector_extra_config": {"encoders": [target]},
        }
        without_tower = [
            '--limit-mm-per-prompt={"image": 0, "video": 0}',
            f"--ec-transfer-config={json.dumps(connector)}",
        ]
        config = json.loads((options.model / "config.json").read_text())
        if overrides := [WITHOUT_TOWER[name] for name in config.get("architectures", ()) if name in WITHOUT_TOWER]:
            without_tower.append(f"--hf-overrides={json.dumps({'architectures': overrides})}")
        engine = await self._engine(LANGUAGE_ONLY, *without_tower)
        proxy = await self._start(
            PROXY, sys.executable, "-m", "encoder_client", "proxy", f"--encoders={target}", f"--vllm={engine}",
            "--listen=127.0.0.1:0",
        )  # fmt: skip
        return "http://" + await proxy.printed(r"^encoder-client proxy ready address=(\S+)")

    async def _engine(self, name: str, *more: str) -> str:
        options, port = self._options, _free_port()
        url = f"http://127.0.0.1:{port}"
        server = await self._start(
            name, options.vllm, "serve", str(options.model), f"--served-model-name={MODEL}", f"--port={port}",
            "--host=127.0.0.1", f"--dtype={options.dtype}", *options.vllm_options, *more,
        )  # fmt: skip
        with self._display.stage(f"starting the {name}"):
            await server.answers(self._session, f"{url}/health")
        return url

    async def _start(self, name: str, *command: str) -> Server:
        server = self._servers[name] = await self._stack.enter_async_context(started(f"the {name}", command))
        return server


def loads(options: Options) -> dict[str, dict[str, Chats]]:
    """What is sent, by workload and side: the same to both."""
    fresh = {side: Pictures(options.image_size, seed=0) for side in (WHOLE, SPLIT)}
    drawn = Pictures(options.image_size, seed=1)
    known = [drawn.next() for _ in range(options.pictures)]

    def of(side: str) -> dict[str, Callable[[], Sequence[bytes]]]:
        around = itertools.cycle(known)
        return {
            NEW: lambda: [fresh[side].next() for _ in range(options.images)],
            REPEATED: lambda: [next(around) for _ in range(options.images)],
        }

    files = {side: of(side) for side in (WHOLE, SPLIT)}
    return {
        workload: {side: Chats(files[side][workload], options.tokens) for side in files} for workload in (NEW, REPEATED)
    }


def _served(rounds: Sequence[tuple[float, list[Timing]]]) -> Served:
    timings = [timing for _, of_round in rounds for timing in of_round]
    return Served(
        requests=len(timings),
        requests_per_second=len(timings) / sum(seconds for seconds, _ in rounds),
        first_token_ms=Percentiles.of([1e3 * timing.first_token for timing in timings]),
        answer_ms=Percentiles.of([1e3 * timing.end for timing in timings]),
        rounds=[len(of_round) / seconds for seconds, of_round in rounds],
    )


def tower_bytes(model: Path, itemsize: int) -> int:
    """What the towers' and projectors' weights take.

    Args:
        model: a folder with safetensors files, whose headers are read (a length of 8 bytes, then JSON).
        itemsize: bytes of an element, as the engine has them.
    """
    elements = 0
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as opened:
            header: dict[str, Any] = json.loads(opened.read(*struct.unpack("<Q", opened.read(8))))
        for name, tensor in header.items():
            if any(part in name for part in _TOWER_NAMES):
                count = 1
                for size in tensor["shape"]:
                    count *= size
                elements += count
    return elements * itemsize


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port
