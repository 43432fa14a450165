"""The proxy before a language-only vLLM, as a process, with a real encoder.

Here vLLM is a server that writes down what it is sent; tests/vllm has a real one.
"""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import ClientSession, web

from encoder_client import EncoderClient, audio, image, item_content_key
from encoder_client.proxy.chat_media import rewrite, take
from epd.encoder.v1.embedding_pb2 import AudioMetadata, EmbeddingChunk
from tests.photograph import photo
from tests.server_process import START_SECONDS, ServerProcess
from tests.waiting import eventually

# One loop for all, and with it one proxy.
pytestmark = pytest.mark.asyncio(loop_scope="module")

PHOTO = photo(140, 112)
TIMEOUT = START_SECONDS
Reply = Callable[[web.Request], Any]


def address(data: bytes) -> str:
    return f"data:image/jpeg;base64,{base64.b64encode(data).decode()}"


def chat(*urls: str, **more: Any) -> dict[str, Any]:
    """A chat request with images before its text."""
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content.append({"type": "text", "text": "What is it?"})
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": content}]
    return {"model": "m", "messages": messages, **more}


def holding(part: dict[str, Any]) -> dict[str, Any]:
    """A chat request with one part."""
    return {"messages": [{"role": "user", "content": [part]}]}


@dataclass
class Upstream:
    """What vLLM was sent."""

    url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    """The second piece of a stream comes after it."""
    left: asyncio.Event = field(default_factory=asyncio.Event)
    """The caller of a stream has left."""

    def forget(self) -> None:
        """What was sent until now."""
        self.bodies.clear()
        self.paths.clear()
        self.go_on.clear()
        self.left.clear()


@asynccontextmanager
async def upstream() -> AsyncIterator[Upstream]:
    async def answer(request: web.Request) -> web.StreamResponse:
        seen.paths.append(f"{request.method} {request.path_qs}")
        if request.method == "GET":
            return web.json_response({"data": ["m"]}, headers={"x-engine": "vllm"})
        body = await request.json()
        seen.bodies.append(body)
        if not body.get("stream"):
            return web.json_response({"choices": []}, status=int(body.get("user", 200)))
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        try:
            await stream.write(b"data: one\n\n")
            while body.get("endless"):
                await stream.write(bytes(1 << 16))
            await seen.go_on.wait()
            await stream.write(b"data: [DONE]\n\n")
        except (asyncio.CancelledError, ConnectionError):
            seen.left.set()
            raise
        return stream

    application = web.Application(client_max_size=1 << 20)
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application, handler_cancellation=True)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        seen = Upstream(f"http://127.0.0.1:{runner.addresses[0][1]}")
        yield seen
    finally:
        await runner.cleanup()


@asynccontextmanager
async def proxy(encoder: str, vllm: str, *options: str) -> AsyncIterator[str]:
    """The proxy's process; its address."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "encoder_client", "proxy", "--encoders", encoder, "--vllm", vllm,
        "--listen", "127.0.0.1:0", *options, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        async with asyncio.timeout(TIMEOUT):
            line = (await process.stdout.readline()).decode()
        assert line.startswith("encoder-client proxy ready address="), line
        yield f"http://{line.strip().partition('address=')[2]}"
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(TIMEOUT):
            assert await process.wait() == 0
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@dataclass
class Line:
    """Caller, proxy, vLLM."""

    session: ClientSession
    address: str
    vllm: Upstream

    async def chat(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Status and body of an answer."""
        async with self.session.post(f"{self.address}/v1/chat/completions", json=body) as answer:
            return answer.status, await answer.json()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_line(server: ServerProcess) -> AsyncIterator[Line]:
    async with upstream() as vllm, proxy(server.target, vllm.url) as address, ClientSession() as session:
        yield Line(session, address, vllm)


@pytest.fixture
def line(shared_line: Line) -> Line:
    """As if nobody had sent anything."""
    shared_line.vllm.forget()
    return shared_line


async def test_media_become_keys_and_grids(server: ServerProcess, line: Line) -> None:
    another = photo(252, 196)
    body = chat(address(PHOTO), address(another), max_tokens=3, ec_transfer_params={"parts": []})
    assert await line.chat(body) == (200, {"choices": []})
    [sent] = line.vllm.bodies
    async with EncoderClient(server.target) as client:
        info = await client.server_info()
        namespace = info.model.cache_namespace
    keys = [item_content_key(namespace, b"", image(data)).hex() for data in (PHOTO, another)]
    assert sent["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [
            {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 8, 10]}, "uuid": keys[0]},
            {"type": "image_embeds", "image_embeds": {"image_grid_thw": [1, 14, 18]}, "uuid": keys[1]},
            {"type": "text", "text": "What is it?"},
        ]},
    ]  # fmt: skip
    encoder = info.encoder.instance_id
    assert sent["ec_transfer_params"] == {"parts": [{"content_key": key, "encoder": encoder} for key in keys]}
    assert sent["max_tokens"] == 3
    assert base64.b64encode(PHOTO).decode() not in json.dumps(sent)


async def test_options_and_salts_make_other_keys(line: Line) -> None:
    url = address(photo(252, 196))
    for more in ({}, {"mm_processor_kwargs": {"max_pixels": 12544}}, {"cache_salt": "a"}, {"cache_salt": "b" * 100}):
        assert (await line.chat(chat(url, **more)))[0] == 200
    keys = {body["ec_transfer_params"]["parts"][0]["content_key"] for body in line.vllm.bodies}
    assert len(keys) == 4
    assert all("mm_processor_kwargs" not in body for body in line.vllm.bodies)


async def test_text_and_other_paths_go_through(line: Line) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello."}]}
    assert await line.chat(body) == (200, {"choices": []})
    assert line.vllm.bodies == [body]
    async with line.session.get(f"{line.address}/v1/models?x=1") as answer:
        assert (await answer.json(), answer.headers["x-engine"]) == ({"data": ["m"]}, "vllm")
    assert line.vllm.paths[-1] == "GET /v1/models?x=1"
    async with line.session.post(f"{line.address}/v1/responses", json={}) as answer:
        assert answer.status in {404, 405}, "what could hold media is not passed"


async def test_an_answer_streams_through_and_leases_go_with_its_first_piece(server: ServerProcess, line: Line) -> None:
    async with line.session.post(
        f"{line.address}/v1/chat/completions", json=chat(address(PHOTO), stream=True)
    ) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        assert await answer.content.readany() == b"data: one\n\n"
        await eventually(lambda: _leases(server))
        line.vllm.go_on.set()
        assert await answer.content.read() == b"data: [DONE]\n\n"


async def _leases(server: ServerProcess) -> bool:
    return (await server.info()).load.leases == 0


async def test_a_caller_who_leaves_takes_the_call_to_vllm_along(line: Line) -> None:
    async with line.session.post(
        f"{line.address}/v1/chat/completions", json=chat(address(PHOTO), stream=True)
    ) as answer:
        await answer.content.readany()
        answer.close()
    async with asyncio.timeout(TIMEOUT):
        await line.vllm.left.wait()


async def test_a_caller_that_stalls_is_left(server: ServerProcess) -> None:
    """It gives nothing of its request, or takes nothing of its answer, and holds the connection for ever."""
    body = json.dumps(chat(stream=True, endless=True)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    async with upstream() as vllm, proxy(server.target, vllm.url, "--stall-seconds", "0.5") as address:
        host, port = address.removeprefix("http://").split(":")
        for sent, status in ((head + body[:-1], b"408"), (head + body, b"200")):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            async with asyncio.timeout(TIMEOUT):
                assert (await reader.readline()).split()[1] == status
                if status == b"200":
                    await vllm.left.wait()
            writer.transport.abort()


async def is_watched(column: int, port: str) -> bool:
    """A connection has the kernel's timer of silence, set to half a minute or less, in hundredths of a second."""
    table = await asyncio.to_thread(Path("/proc/net/tcp").read_text)
    rows = [row.split() for row in table.splitlines()[1:]]
    timers = [row[5].split(":") for row in rows if row[column].endswith(port) and row[3] == "01"]
    return any(kind == "02" and int(when, 16) <= 3000 for kind, when in timers)


async def test_a_caller_or_a_vllm_that_is_gone_without_a_word_is_noticed(line: Line) -> None:
    """By the kernel, which asks its machine: that is a timer of the connection that waits."""
    async with line.session.post(f"{line.address}/v1/chat/completions", json=chat(stream=True)) as answer:
        assert await answer.content.readany() == b"data: one\n\n"
        for url, column in ((line.vllm.url, 2), (line.address, 1)):  # remote from the proxy, and local
            await eventually(partial(is_watched, column, f":{int(url.rpartition(':')[2]):04X}"))
        line.vllm.go_on.set()
        await answer.read()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (chat(address(b"not an image")), "part 0"),
        (chat("data:image/png;base64,%%%"), "damaged"),
        (chat("file:///etc/passwd"), "URI_FORBIDDEN"),
        (chat(""), "needs a url"),
        ({"messages": "x"}, "must be a list"),
        (chat(mm_processor_kwargs={"fps": 1}), "min_pixels and max_pixels"),
        (holding({"type": "input_audio", "input_audio": {}}), "input_audio needs data"),
        (holding({"type": "input_audio", "input_audio": {"data": "%%%", "format": "wav"}}), "damaged"),
        (
            holding({"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64,UklGRg=="}}),
            "does not encode this modality",
        ),
        (holding({"type": "file", "file": {"file_data": "x"}}), "send one of image_url"),
        (holding({"image_url": {"url": "x"}}), "None"),
    ],
)
async def test_what_cannot_be_encoded_is_told_and_not_passed_on(line: Line, body: dict[str, Any], message: str) -> None:
    status, answer = await line.chat(body)
    assert status == 400
    assert message in answer["error"]["message"]
    assert line.vllm.bodies == []


async def test_errors_of_vllm_are_its_own(line: Line) -> None:
    assert await line.chat(chat(address(PHOTO), user="422")) == (422, {"choices": []})


async def status_of(encoder: str, vllm: str, *options: str) -> int:
    async with proxy(encoder, vllm, *options) as address_of, ClientSession() as session:
        body = chat(address(PHOTO))
        async with session.post(f"{address_of}/v1/chat/completions", json=body) as answer:
            assert "error" in await answer.json()
            return answer.status


async def test_without_an_encoder() -> None:
    assert await status_of("127.0.0.1:1", "http://127.0.0.1:1", "--encode-seconds", "1") in {503, 504}


async def test_without_vllm(server: ServerProcess) -> None:
    assert await status_of(server.target, "http://127.0.0.1:1") == 502


async def test_the_caller_s_request_stays_as_it_was() -> None:
    body = chat(address(PHOTO))
    before = json.loads(json.dumps(body))
    chunk = EmbeddingChunk(content_key=bytes(32), grid_dim=[1, 8, 10])
    assert len(take(body).items) == 1
    assert rewrite(body, [chunk], "qwen2_5_vl") != before
    assert body == before


@pytest.mark.parametrize(
    ("model_type", "size"),
    [("qwen2_audio", {"audio_num_tokens": [25]}), ("qwen2_5_omni", {"audio_feature_lengths": [100]})],
)
async def test_sound_becomes_a_length(model_type: str, size: dict[str, Any]) -> None:
    """As long as vLLM's placeholders are to be, in the family's own measure."""
    data = base64.b64encode(b"RIFF").decode()
    parts = [
        {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{data}"}},
    ]
    body = {"messages": [{"role": "user", "content": parts}]}
    assert take(body).items == [audio(b"RIFF"), audio(b"RIFF")]
    chunk = EmbeddingChunk(content_key=bytes(32), token_count=25, audio=AudioMetadata(mel_frames=100))
    expected = {"type": "audio_embeds", "audio_embeds": size, "uuid": "00" * 32}
    assert rewrite(body, [chunk, chunk], model_type)["messages"][0]["content"] == [expected, expected]
