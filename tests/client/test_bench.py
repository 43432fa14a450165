"""The parts of ``encoder-client bench`` that need no vLLM."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web

from encoder_client.bench import processes
from encoder_client.bench.chat_load import Chats, run_load
from encoder_client.bench.pictures import Pictures
from encoder_client.bench.processes import started
from encoder_client.bench.result import Percentiles
from encoder_client.bench.vllm import Options, loads, tower_bytes
from encoder_client.errors import EncoderClientError

TOKENS = 3


@asynccontextmanager
async def answering(tokens: int = TOKENS, status: int = 200) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """A server that streams answers as vLLM does; its address, and what it was sent."""
    bodies: list[dict[str, Any]] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        if status != 200:
            return web.Response(status=status, text="no room")
        stream = web.StreamResponse()
        await stream.prepare(request)
        events: list[dict[str, Any]] = [
            {"choices": [{"delta": {}}]},
            {"choices": [], "usage": {"completion_tokens": tokens}},
        ]
        for event in events:
            await stream.write(b"data: " + json.dumps(event).encode() + b"\n\n")
        await stream.write(b"data: [DONE]\n\n")
        return stream

    application = web.Application(client_max_size=1 << 22)
    application.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", bodies
    finally:
        await runner.cleanup()


async def test_a_load_is_counted() -> None:
    pictures = Pictures(64)
    steps: list[None] = []
    async with answering() as (url, bodies), ClientSession() as session:
        chats = Chats(lambda: [pictures.next(), pictures.next()], TOKENS)
        seconds, timings = await run_load(session, url, chats, 5, 2, lambda: steps.append(None))
    assert (len(timings), len(steps), len(bodies)) == (5, 5, 5)
    assert all(0 < timing.first_token <= timing.end <= seconds for timing in timings)
    assert len({body["messages"][0]["content"][0]["text"] for body in bodies}) == 5, "no two begin alike"
    assert len(set(_urls(bodies))) == 10


def test_new_images_are_new_and_both_sides_get_the_same() -> None:
    options = Options(
        model=Path(), vllm="", encoder="", dtype="float32", image_size=64, images=2, pictures=4, tokens=1,
        concurrency=1, requests=1, rounds=1, vllm_options=(), encoder_options=(),
    )  # fmt: skip
    sent = {
        workload: {side: [chats.next() for _ in range(8)] for side, chats in sides.items()}
        for workload, sides in loads(options).items()
    }
    urls = {workload: _urls(sides["whole"]) for workload, sides in sent.items()}
    assert all(sides["whole"] == sides["split"] for sides in sent.values())
    assert len(set(urls["new"])) == 16
    assert len(set(urls["repeated"])) == 4
    assert not set(urls["new"]) & set(urls["repeated"])


def _urls(bodies: list[dict[str, Any]]) -> list[str]:
    return [part["image_url"]["url"] for body in bodies for part in body["messages"][0]["content"][1:3]]


@pytest.mark.parametrize(("tokens", "status", "message"), [(1, 200, "has 1 tokens"), (TOKENS, 503, "503: no room")])
async def test_an_answer_that_is_none_ends_the_run(tokens: int, status: int, message: str) -> None:
    async with answering(tokens, status) as (url, _), ClientSession() as session:
        with pytest.raises(EncoderClientError, match=message):
            await run_load(session, url, Chats(list, TOKENS), 2, 2, lambda: None)


async def test_a_server_that_ends_is_told_with_what_it_said() -> None:
    async with started("the server", [sys.executable, "-c", "print('no such model')"]) as server:
        with pytest.raises(EncoderClientError, match="the server does not serve; it said:\nno such model"):
            await server.printed("ready (.*)")
    with pytest.raises(EncoderClientError, match="cannot start /nowhere"):
        async with started("the server", ["/nowhere"]):
            pass


async def test_a_server_that_takes_questions_and_answers_none_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    program = (
        "import socket\n"
        "listening = socket.create_server(('127.0.0.1', 0))\n"
        "print('port', listening.getsockname()[1], flush=True)\n"
        "taken = []\n"
        "while True: taken.append(listening.accept())"
    )
    async with started("the server", [sys.executable, "-c", program]) as server, ClientSession() as session:
        port = await server.printed(r"port (\d+)")
        monkeypatch.setattr(processes, "START_SECONDS", 0.2)
        monkeypatch.setattr(processes, "ANSWER_SECONDS", 0.1)
        with pytest.raises(EncoderClientError, match="the server does not serve"):
            await server.answers(session, f"http://127.0.0.1:{port}/health")


async def test_a_server_is_gone_with_its_children_when_its_block_ends() -> None:
    program = (
        "import subprocess, sys; subprocess.Popen(['sleep', '1000']); print('ready', flush=True); sys.stdin.read()"
    )
    loop = "import time\nwhile True: time.sleep(1)"
    async with started("the server", [sys.executable, "-c", f"{program}\n{loop}"]) as server:
        await server.printed("(ready)")
        assert server.memory() > 1 << 20
    assert server.memory() == 0


def test_percentiles_are_values_that_were_measured() -> None:
    assert Percentiles.of([float(value) for value in range(1, 101)]) == Percentiles(50.0, 99.0)
    assert Percentiles.of([2.0]) == Percentiles(2.0, 2.0)


def test_the_bytes_of_a_tower(tiny_checkpoint: Path) -> None:
    from safetensors import safe_open

    elements = 0
    for file in tiny_checkpoint.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            elements += sum(opened.get_tensor(name).numel() for name in opened.keys() if "visual." in name)  # noqa: SIM118
    assert tower_bytes(tiny_checkpoint, 2) == 2 * elements > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model=/nowhere"], "is no checkpoint"),
        (["--model=.", "--json=/nowhere/file.json"], "there is no folder /nowhere"),
    ],
)
async def test_what_cannot_be_measured_is_told_at_once(arguments: list[str], message: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "encoder_client", "bench", "vllm", *arguments, stderr=asyncio.subprocess.PIPE
    )
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert message in errors.decode()
