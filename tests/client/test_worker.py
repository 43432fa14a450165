"""A language-only worker as a service, against a real encoder: whatever happens to its parts, the answer is right."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from encoder_client import (
    ClientSettings,
    Embedding,
    EmbeddingPool,
    EncoderClient,
    EncoderClientError,
    EncoderError,
    ReadError,
    image,
)
from encoder_client.language import LanguageOnlyModel
from encoder_client.pool.embedding_pool import Slot
from encoder_client.worker import WorkerServer, WorkerSettings
from encoder_client.worker.assembly import Assembly
from encoder_client.worker.inbox import Arrival, PromptParts
from encoder_client.worker.servicer import LanguageModel
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2 import CachePolicy
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from epd.language.v1 import language_service_pb2 as pb
from epd.language.v1.language_service_pb2_grpc import LanguageServiceStub
from tests.client import chunks
from tests.photograph import photo
from tests.rpc.calls import END_OF_STREAM
from tests.server_process import START_SECONDS, ServerProcess
from tests.waiting import eventually

PHOTOS = [photo(140, 112), photo(112, 140)]
QUESTION = "What is this?"
TOKENS = 8
SECONDS = START_SECONDS
"""Longer than anything here takes."""


@pytest.fixture
def server(mooncake_server: ServerProcess) -> ServerProcess:
    return mooncake_server


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A receiver of the test's own."""
    return str(request.node.name)


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Path) -> LanguageOnlyModel:
    return LanguageOnlyModel.load(tiny_checkpoint)


@asynccontextmanager
async def serving(
    server: ServerProcess, model: LanguageModel, name: str, **settings: Any
) -> AsyncIterator[tuple[WorkerServer, Any]]:
    """A worker, and a stub to call it by."""
    client = ClientSettings(receiver=name, transports=("inline",))
    settings = {"encoders": (server.target,), "client": client, "pool_bytes": 1 << 24, **settings}
    async with (
        WorkerServer(WorkerSettings(**settings), model) as worker,
        grpc.aio.insecure_channel(worker.target) as channel,
    ):
        yield worker, LanguageServiceStub(channel)
    await eventually(lambda: nothing_is_leased(server))


async def nothing_is_leased(server: ServerProcess) -> bool:
    """No lease lives."""
    return (await server.info()).load.leases == 0


def prompt(prompt_id: str, parts: int = 2) -> pb.GenerateRequest:
    """Some images and a question."""
    content = [pb.Content(media=Modality.MODALITY_IMAGE) for _ in range(parts)]
    message = pb.Message(role="user", content=[*content, pb.Content(text=QUESTION)])
    return pb.GenerateRequest(prompt_id=prompt_id, messages=[message], max_new_tokens=TOKENS)


def item(part: int, data: bytes | None = None) -> MediaItem:
    """A part of the prompt."""
    made = image(PHOTOS[part] if data is None else data)
    made.part_idx = part
    return made


async def encode(
    server: ServerProcess,
    prompt_id: str,
    receiver: str,
    *items: MediaItem,
    num_parts: int = 2,
    cache_policy: CachePolicy = CachePolicy.CACHE_POLICY_BYPASS,
) -> None:
    """What a router does for the media."""
    async with (
        EncoderClient(server.target, ClientSettings(transports=("inline",))) as client,
        client.encode(
            items, prompt_id=prompt_id, num_parts=num_parts, receivers=[receiver],
            cache_policy=cache_policy,
        ) as call,
    ):  # fmt: skip
        async for _ in call:
            pass


async def expected(server: ServerProcess, model: LanguageOnlyModel) -> tuple[list[int], str]:
    """What the model says when it is asked directly."""
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": QUESTION}]
    async with (
        EncoderClient(server.target, ClientSettings(transports=("inline",))) as client,
        client.encode([item(0), item(1)]) as call,
    ):
        embeddings = await call.embeddings()
        expanded = model.expand([{"role": "user", "content": content}], list(call.layouts.values()))
    answer = model.generate(expanded, embeddings, max_new_tokens=TOKENS)
    return answer.token_ids, answer.text


async def following(call: Any, kind: str) -> Any:
    """The next event, which must be of that kind."""
    async with asyncio.timeout(SECONDS):
        response = await call.read()
    assert response is not END_OF_STREAM
    assert response.WhichOneof("event") == kind
    return getattr(response, kind)


async def answer_of(call: Any) -> tuple[list[int], str]:
    """The answer, from ``expanded`` on."""
    assert (await following(call, "expanded")).prompt_tokens > 0
    tokens: list[int] = []
    while (response := await call.read()) is not END_OF_STREAM:
        if response.HasField("finished"):
            assert response.finished.generated_tokens == len(tokens)
            return tokens, response.finished.text
        tokens += response.tokens.token_ids
    raise AssertionError("no answer")


async def refusal(call: Any) -> grpc.aio.AioRpcError:
    """How a call is refused; nothing else was to be read of it."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    return refused.value


@pytest.mark.parametrize("media_first", [False, True])
async def test_an_answer_is_the_models_own_whichever_came_first(
    server: ServerProcess, model: LanguageOnlyModel, name: str, media_first: bool
) -> None:
    async with serving(server, model, name) as (_, stub):
        if media_first:
            await encode(server, "p", name, item(0), item(1))
        call = stub.Generate(prompt("p"))
        accepted = await following(call, "accepted")
        assert (accepted.receiver_id, accepted.num_parts) == (name, 2)
        if not media_first:
            await encode(server, "p", name, item(1))
            await encode(server, "p", name, item(0))
        assert await answer_of(call) == await expected(server, model)


async def test_a_part_that_failed_is_told_and_can_be_sent_again(
    server: ServerProcess, model: LanguageOnlyModel, name: str
) -> None:
    async with serving(server, model, name) as (_, stub):
        call = stub.Generate(prompt("p"))
        await following(call, "accepted")
        await encode(server, "p", name, item(0), item(1, b"not an image"))
        missing = await following(call, "part_missing")
        assert missing.part_idx == 1
        assert missing.status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
        await encode(server, "p", name, item(1))
        assert await answer_of(call) == await expected(server, model)


async def test_a_part_that_comes_twice_is_used_once(server: ServerProcess, model: LanguageOnlyModel, name: str) -> None:
    async with serving(server, model, name) as (_, stub):
        call = stub.Generate(prompt("p"))
        await following(call, "accepted")
        for _ in range(2):
            await encode(server, "p", name, item(0))
        await encode(server, "p", name, item(1))
        assert await answer_of(call) == await expected(server, model)


async def test_a_part_of_another_prompts_shape_is_not_used(
    server: ServerProcess, model: LanguageOnlyModel, name: str
) -> None:
    async with serving(server, model, name) as (_, stub):
        call = stub.Generate(prompt("p"))
        await following(call, "accepted")
        await encode(server, "p", name, item(0))
        await encode(server, "p", name, item(1), num_parts=3)
        assert (await following(call, "part_missing")).part_idx == 1
        await encode(server, "p", name, item(1))
        assert await answer_of(call) == await expected(server, model)


async def test_prompts_at_once_are_answered_each_with_its_own(
    server: ServerProcess, model: LanguageOnlyModel, name: str
) -> None:
    async def ask(stub: Any, number: int) -> tuple[list[int], str]:
        call = stub.Generate(prompt(f"p{number}"))
        await following(call, "accepted")
        await encode(server, f"p{number}", name, item(0), item(1))
        return await answer_of(call)

    async with serving(server, model, name) as (_, stub):
        answers = await asyncio.gather(*(ask(stub, number) for number in range(6)))
    assert answers == [await expected(server, model)] * 6


async def test_a_prompt_whose_encoder_is_gone_for_good_fails(
    server: ServerProcess, model: LanguageOnlyModel, name: str
) -> None:
    """What was READY there was never told, and nobody will tell. Without a deadline its caller would wait for ever."""
    with socket.create_server(("127.0.0.1", 0)) as other:  # it listens, and answers nothing
        encoders = (server.target, f"127.0.0.1:{other.getsockname()[1]}")
        async with serving(server, model, name, encoders=encoders, part_seconds=1.0) as (_, stub):
            call = stub.Generate(prompt("p"))
            await following(call, "accepted")
            await encode(server, "p", name, item(0))
            async with asyncio.timeout(SECONDS):
                refused = await refusal(call)
    assert refused.code() is grpc.StatusCode.UNAVAILABLE
    assert "part_seconds" in str(refused.details())


async def test_a_router_that_leaves_takes_its_prompt_along(
    server: ServerProcess, model: LanguageOnlyModel, name: str
) -> None:
    async with serving(server, model, name, max_prompts=1) as (_, stub):
        left = stub.Generate(prompt("left"))
        await following(left, "accepted")
        full = await refusal(stub.Generate(prompt("more")))
        assert full.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        left.cancel()
        # Its part comes too late, and is given back.
        await encode(server, "left", name, item(0))
        await eventually(lambda: nothing_is_leased(server))
        calls: list[Any] = []

        async def the_next_is_accepted() -> bool:
            calls.append(stub.Generate(prompt("next")))
            try:
                await following(calls[-1], "accepted")
            except grpc.aio.AioRpcError as error:
                return error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED
            return True

        await eventually(the_next_is_accepted)
        await encode(server, "next", name, item(0), item(1))
        assert await answer_of(calls[-1]) == await expected(server, model)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt_id": ""}, "prompt_id is required"),
        ({"messages": []}, "at least one"),
        ({"messages": [pb.Message(role="user", content=[pb.Content(text="hello")])]}, "without media"),
        ({"messages": [pb.Message(role="user", content=[pb.Content()])]}, "messages[0].content[0] is neither"),
    ],
    ids=["no id", "no messages", "no media", "no content"],
)
async def test_a_bad_prompt_is_refused(
    server: ServerProcess, model: LanguageOnlyModel, change: dict[str, Any], words: str
) -> None:
    request = {"prompt_id": "p", "messages": prompt("p").messages, **change}
    async with serving(server, model, "refuses") as (_, stub):
        refused = await refusal(stub.Generate(pb.GenerateRequest(**request)))
    assert refused.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in str(refused.details())


async def test_a_prompt_that_is_being_answered_is_not_begun_again(
    server: ServerProcess, model: LanguageOnlyModel, name: str
) -> None:
    async with serving(server, model, name) as (_, stub):
        first = stub.Generate(prompt("p"))
        await following(first, "accepted")
        assert (await refusal(stub.Generate(prompt("p")))).code() is grpc.StatusCode.ALREADY_EXISTS
        first.cancel()


async def test_embeddings_larger_than_the_pool_are_told(
    server: ServerProcess, model: LanguageOnlyModel, name: str
) -> None:
    async with serving(server, model, name, pool_bytes=1000) as (_, stub):
        call = stub.Generate(prompt("p"))
        await following(call, "accepted")
        await encode(server, "p", name, item(0), item(1))
        refused = await refusal(call)
        await eventually(lambda: nothing_is_leased(server))
    assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "pool" in str(refused.details())


class StuckModel:
    """Its device hangs behind the first token, until the test is over."""

    def __init__(self, model: LanguageOnlyModel) -> None:
        self.expand, self.decode = model.expand, model.decode
        self.goes_on = threading.Event()

    def stream(self, prompt: Any, embeddings: Sequence[Embedding], *, max_new_tokens: int) -> Iterator[int]:
        yield 1
        self.goes_on.wait()


async def test_a_worker_stops_also_while_its_model_hangs(
    server: ServerProcess, model: LanguageOnlyModel, name: str
) -> None:
    stuck = StuckModel(model)
    try:
        async with serving(server, stuck, name) as (_, stub):
            call = stub.Generate(prompt("p"))
            await following(call, "accepted")
            await encode(server, "p", name, item(0), item(1))
            await following(call, "expanded")
            await following(call, "tokens")
    finally:
        stuck.goes_on.set()


async def test_a_read_that_others_cancel_is_told_as_missing() -> None:
    """It is no cancel of the prompt, whose caller would wait for ever."""

    class Cancelled(EncoderClient):
        async def read_into(
            self, chunk: EmbeddingChunk, slot: Slot, *, transports: Sequence[str] = (), deadline: float | None = None
        ) -> Embedding:
            raise asyncio.CancelledError

    told: asyncio.Queue[EncoderClientError] = asyncio.Queue()

    async def missing(part_idx: int, error: EncoderClientError) -> None:
        told.put_nowait(error)

    parts = PromptParts("p")
    async with (
        Cancelled("127.0.0.1:1", ClientSettings(receiver="lm", transports=("inline",))) as client,
        Assembly(parts, 1, EmbeddingPool(1 << 16), SECONDS, SECONDS) as assembly,
    ):
        parts.layouts[0] = chunks.layout()
        parts.ready[0] = Arrival(client, chunks.ready(chunks.rows()))
        collecting = asyncio.create_task(assembly.collect(missing))
        error = await asyncio.wait_for(told.get(), SECONDS)
        assert isinstance(error, ReadError)
        assert not collecting.done()
        collecting.cancel()
        await asyncio.gather(collecting, return_exceptions=True)


@pytest.mark.parametrize("kept", [True, False])
async def test_f38_a_prompt_that_waits_for_a_full_pool_gives_its_leases_back_and_asks_again(
    server: ServerProcess, model: LanguageOnlyModel, name: str, kept: bool
) -> None:
    """The pool has room for one prompt, which waits for its other part; the next one's embeddings are READY."""
    policy = CachePolicy.CACHE_POLICY_USE if kept else CachePolicy.CACHE_POLICY_BYPASS
    async with (
        EncoderClient(server.target, ClientSettings(transports=("inline",))) as client,
        client.encode([item(0), item(1)]) as call,
    ):
        needed = sum(embedding.nbytes for embedding in await call.embeddings())
    async with serving(server, model, name, pool_bytes=needed + 4096) as (_, stub):
        first, second = stub.Generate(prompt("first")), stub.Generate(prompt("second"))
        for call in (first, second):
            await following(call, "accepted")
        await encode(server, "first", name, item(0))
        with server.held(server.engine()):
            router = asyncio.create_task(encode(server, "first", name, item(1)))
            # By the LAYOUT the prompt gets its space, and reads what it has.
            await eventually(lambda: nothing_is_leased(server))
            router.cancel()
            assert (await following(first, "part_missing")).part_idx == 1
        await encode(server, "second", name, item(0), item(1), cache_policy=policy)
        await eventually(lambda: nothing_is_leased(server))
        await encode(server, "first", name, item(1))
        assert await answer_of(first) == await expected(server, model)
        if not kept:
            gone = [(await following(second, "part_missing")).part_idx for _ in range(2)]
            await encode(server, "second", name, *map(item, gone))
        assert await answer_of(second) == await expected(server, model)


async def test_two_workers_of_one_name_are_noticed(server: ServerProcess, model: LanguageOnlyModel, name: str) -> None:
    async with serving(server, model, name) as (first, _), serving(server, model, name):
        with pytest.raises(EncoderError) as lost:
            await asyncio.wait_for(first.lost(), SECONDS)
    assert (lost.value.code, lost.value.reason) == (grpc.StatusCode.ABORTED, "SUBSCRIPTION_SUPERSEDED")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"encoders": ()}, "targets of its encoders"),
        ({"client": ClientSettings()}, "receiver's name"),
        ({"part_seconds": 0.0}, "part_seconds"),
    ],
    ids=["no encoders", "no name", "no time"],
)
def test_a_bad_setup_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(EncoderClientError, match=words):
        WorkerSettings(**{"encoders": ("127.0.0.1:1",), "client": ClientSettings(receiver="lm"), **settings})


async def test_the_command_serves_answers_what_it_has_and_stops(
    server: ServerProcess, model: LanguageOnlyModel, tiny_checkpoint: Path, name: str
) -> None:
    command = [
        sys.executable, "-m", "encoder_client", "worker", "--model", str(tiny_checkpoint), "--encoders", server.target,
        "--receiver", name, "--transports", "inline",
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert line.startswith("encoder-client worker ready target=")
        target = line.split("target=")[1].split()[0]
        async with grpc.aio.insecure_channel(target) as channel:
            health = HealthStub(channel)
            assert (await health.Check(HealthCheckRequest())).status == HealthCheckResponse.SERVING
            call = LanguageServiceStub(channel).Generate(prompt("p"))
            await following(call, "accepted")
            process.send_signal(signal.SIGTERM)
            await encode(server, "p", name, item(0), item(1))
            assert await answer_of(call) == await expected(server, model)
        assert await asyncio.wait_for(process.wait(), SECONDS) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
