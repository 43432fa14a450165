"""A language-only vLLM and what serving brings: repeats, eviction, options, dead encoders, many at once, the proxy."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from encoder_client import item_content_key
from tests.photograph import photo
from tests.rpc.metrics_page import batches, metric
from tests.server_process import ServerProcess
from tests.vllm.cases import CASES, PHOTO
from tests.vllm.conftest import POOL_BYTES, Deployment
from tests.vllm.engine import RefusedError
from tests.vllm.prompts import Media, encoded, language_only, whole
from tests.vllm.proxy import proxy
from tests.vllm.test_tokens import logprobs
from tests.waiting import eventually

pytestmark = pytest.mark.parametrize("deployment", ["qwen2_5_vl"], indirect=True)

CONCURRENT = 32
WIDTH = 256
VLLM_CACHE_ROWS = 16384
"""vLLM logs it as its encoder cache's budget: the rows of the largest image that the checkpoint's processor allows."""


def encoded_items(server: ServerProcess) -> float:
    """How many items the encoder's towers have seen."""
    return asyncio.run(batches(server))[1]


def ready_parts(server: ServerProcess) -> float:
    """How many embeddings the encoder has handed out, from its cache or new."""
    return asyncio.run(metric(server, "parts_total", state="ready", reason=""))


def same(choice: dict[str, Any], expected: dict[str, Any]) -> None:
    assert choice["token_ids"] == expected["token_ids"]
    assert logprobs(choice) == pytest.approx(logprobs(expected), abs=1e-3)


def test_a_repeated_image_is_encoded_once(deployment: Deployment) -> None:
    media = [Media("image", photo(168, 140))]
    chunks = encoded(deployment.client, media)
    items = encoded_items(deployment.encoder)
    first = deployment.engine.chat(**language_only(media, chunks, with_media=True))
    parts = ready_parts(deployment.encoder)
    same(deployment.engine.chat(**language_only(media, chunks, with_media=True)), first)
    deployment.engine.chat(**language_only(media, chunks, "And this?", with_media=True))
    assert encoded_items(deployment.encoder) == items
    assert ready_parts(deployment.encoder) == parts, "what the connector has it does not ask for"


def test_an_embedding_that_was_lost_is_made_again_from_media(deployment: Deployment) -> None:
    lost, media = [Media("image", photo(196, 56))], [Media("image", photo(196, 84))]
    chunks = encoded(deployment.client, [*lost, *media])
    asyncio.run(_restart_engine(deployment.encoder))  # and with it its cache
    encoded(deployment.client, [PHOTO])  # it works again; the connector would wait for less long
    with pytest.raises(RefusedError):
        deployment.engine.chat(**language_only(lost, chunks[:1]))
    choice = deployment.engine.chat(**language_only(media, chunks[1:], with_media=True))
    same(deployment.engine.chat(**language_only(media, encoded(deployment.client, media))), choice)


async def _restart_engine(server: ServerProcess) -> None:
    async def restarted() -> bool:
        return all(engine.restarts > before for engine in (await server.info()).engines)

    before = max(engine.restarts for engine in (await server.info()).engines)
    server.engine().kill()
    await eventually(restarted, 60)


def test_an_evicted_image_is_asked_for_again(deployment: Deployment) -> None:
    """The connector's pool does not hold all these, and vLLM's cache neither."""
    case = CASES["one image"]
    first = deployment.engine.chat(**language_only(case, encoded(deployment.client, case)))
    many = [Media("image", photo(1008, 756, quality=40 + number)) for number in range(20)]
    rows = 0
    for media in many:
        [chunk] = encoded(deployment.client, [media])
        deployment.engine.chat(**language_only([media], [chunk]), max_tokens=1)
        rows += chunk.token_count
    assert rows * WIDTH * 4 > POOL_BYTES
    assert rows > VLLM_CACHE_ROWS
    parts = ready_parts(deployment.encoder)
    again = language_only(case, encoded(deployment.client, case))
    # Another salt keeps vLLM from finding the image's tokens in its prefix cache, where they need no embedding.
    same(deployment.engine.chat(**again, cache_salt="again"), first)
    assert ready_parts(deployment.encoder) == parts + 2, "the test's own and the connector's"


def test_one_image_with_two_options_is_two_images(deployment: Deployment) -> None:
    data = photo(336, 252)
    large, small = Media("image", data), Media("image", data, max_pixels=168 * 140)
    alone = {}
    for media in (large, small):
        alone[media] = deployment.engine.chat(**language_only([media], encoded(deployment.client, [media])))
    assert alone[large]["token_ids"] != alone[small]["token_ids"]
    for media in (small, large):
        same(deployment.engine.chat(**language_only([media], encoded(deployment.client, [media]))), alone[media])
    both = [large, small]
    turned = [small, large]
    answers = [
        deployment.engine.chat(**language_only(pair, encoded(deployment.client, pair))) for pair in (both, turned)
    ]
    assert logprobs(answers[0]) != pytest.approx(logprobs(answers[1]), abs=1e-3)


def test_many_at_once(deployment: Deployment) -> None:
    names = [name for _, name in zip(range(CONCURRENT), list(CASES) * CONCURRENT, strict=False)]
    prompts = [language_only(CASES[name], encoded(deployment.client, CASES[name])) for name in names]
    with ThreadPoolExecutor(CONCURRENT) as threads:
        choices = list(threads.map(lambda prompt: deployment.engine.chat(**prompt), prompts))
    for name, choice in zip(names, choices, strict=True):
        same(choice, deployment.whole[name])


def test_a_prompt_of_other_keys_than_its_parameters_fails(deployment: Deployment) -> None:
    prompt = language_only([PHOTO], encoded(deployment.client, [PHOTO]))
    prompt["content"][0]["uuid"] = "00" * 32
    with pytest.raises(RefusedError):
        deployment.engine.chat(**prompt)
    assert "as the item's uuid" in deployment.engine.log


@pytest.mark.parametrize("case", CASES)
def test_callers_of_the_proxy_notice_nothing(deployment: Deployment, case: str) -> None:
    """They send what the whole model takes, and are answered as it answers."""
    with proxy(deployment.engine, deployment.encoder.target) as port:
        same(deployment.engine.chat(**whole(CASES[case]), port=port), deployment.whole[case])


def test_an_encoder_that_dies_fails_its_request_and_not_the_engine(deployment: Deployment) -> None:
    encoder, media = deployment.encoder, [Media("image", photo(196, 140))]
    [chunk] = encoded(deployment.client, [Media("image", photo(196, 140, quality=50))])  # it has the same grid
    namespace = asyncio.run(encoder.info()).model.cache_namespace
    chunk.content_key = item_content_key(namespace, b"", media[0].item)
    other = language_only([PHOTO], encoded(deployment.client, [PHOTO]))
    before = deployment.engine.chat(**other)
    with ThreadPoolExecutor(1) as threads, encoder.held(encoder.engine()):
        lost = threads.submit(deployment.engine.chat, **language_only(media, [chunk], with_media=True))
        asyncio.run(eventually(lambda: _works(encoder)))
        encoder.process.kill()
        with pytest.raises(RefusedError):
            lost.result()
    same(deployment.engine.chat(**other), before)
    deployment.encoder = deployment.start(listen=encoder.target)
    same(deployment.engine.chat(**language_only(media, encoded(deployment.client, media)), cache_salt="a"),
         deployment.engine.chat(**language_only(media, [chunk]), cache_salt="b"))  # fmt: skip


async def _works(server: ServerProcess) -> bool:
    return any((await server.info()).load.parts.values())
