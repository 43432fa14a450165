"""Chat requests, a fixed number of them at a time, and when their answers came."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from aiohttp import ClientError, ClientResponse, ClientSession

from encoder_client.errors import EncoderClientError

MODEL = "m"
"""As both engines are told to call it."""
QUESTION = "What is it?"
_EVENT = b"data: "
_TOLD = 500
"""Characters of an answer that is an error."""


@dataclass(frozen=True)
class Timing:
    """One answer, in seconds from sending the request."""

    first_token: float
    end: float


class Chats:
    """Requests that each hold images and ask for a fixed number of tokens.

    Args:
        files: gives the images of a request.
        tokens: of each answer.
    """

    def __init__(self, files: Callable[[], Sequence[bytes]], tokens: int) -> None:
        self._files = files
        self._tokens = tokens
        self._numbers = itertools.count()

    def next(self) -> dict[str, Any]:
        """The next request.

        Text with a number stands before the images, as the turns before them would in a conversation: without it an
        engine would find a repeated image's tokens in its prefix cache, and need neither tower nor encoder.
        """
        addresses = [f"data:image/jpeg;base64,{base64.b64encode(file).decode()}" for file in self._files()]
        return {
            "model": MODEL, "temperature": 0, "max_tokens": self._tokens, "ignore_eos": True,
            "stream": True, "stream_options": {"include_usage": True},
            "messages": [{"role": "user", "content": [
                {"type": "text", "text": f"Request {next(self._numbers)}."},
                *({"type": "image_url", "image_url": {"url": address}} for address in addresses),
                {"type": "text", "text": QUESTION},
            ]}],
        }  # fmt: skip

    @property
    def tokens(self) -> int:
        """Of each answer."""
        return self._tokens


async def run_load(
    session: ClientSession, url: str, chats: Chats, requests: int, concurrency: int, done: Callable[[], None]
) -> tuple[float, list[Timing]]:
    """Sends requests, the next one whenever one has been answered.

    Args:
        session: calls the server.
        url: of the server: ``http://HOST:PORT``.
        chats: what is sent.
        requests: how many.
        concurrency: how many at a time.
        done: called with each answer.

    Returns:
        Seconds of all together, and each answer's.

    Raises:
        EncoderClientError: a request failed, or its answer has another length.
    """
    bodies = [json.dumps(chats.next()).encode() for _ in range(requests)]  # not while it is measured
    left: Iterator[bytes] = iter(bodies)
    timings: list[Timing] = []

    async def caller() -> None:
        for body in left:
            timings.append(await _answered(session, url, body, chats.tokens))
            done()

    begun = perf_counter()
    try:
        async with asyncio.TaskGroup() as callers:
            for _ in range(concurrency):
                callers.create_task(caller())
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
    return perf_counter() - begun, timings


async def _answered(session: ClientSession, url: str, body: bytes, tokens: int) -> Timing:
    begun = perf_counter()
    first = 0.0
    usage: dict[str, Any] = {}
    try:
        async with session.post(
            f"{url}/v1/chat/completions", data=body, headers={"content-type": "application/json"}
        ) as answer:
            if not answer.ok:
                raise EncoderClientError(f"a request failed: HTTP {answer.status}: {(await answer.text())[:_TOLD]}")
            async for event in _events(answer):
                if event.get("choices"):
                    first = first or perf_counter() - begun
                usage = event.get("usage") or usage
    except (ClientError, TimeoutError) as error:
        raise EncoderClientError(f"a request failed: {str(error) or 'its time is over'}") from None
    if usage.get("completion_tokens") != tokens:
        raise EncoderClientError(f"an answer has {usage.get('completion_tokens')} tokens, and {tokens} were asked for")
    return Timing(first, perf_counter() - begun)


async def _events(answer: ClientResponse) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.content:
        if line.startswith(_EVENT) and not line.startswith(_EVENT + b"[DONE]"):
            yield json.loads(line.removeprefix(_EVENT))
