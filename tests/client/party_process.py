"""A caller or a receiver as a process of its own, which says what happens to it. It is there to be killed.

::

    party_process.py call TARGET FILE RECEIVER...      encodes a file for receivers, says `accepted`, and stays
    party_process.py hold TARGET RECEIVER INCARNATION  subscribes, says each event, reads nothing, and stays
    party_process.py redeem RECEIVER                   reads serialised chunks in hexadecimal, a line each
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

from encoder_client import Accepted, ClientSettings, EncoderClient, Ready, image
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2 import CachePolicy


def say(*words: object) -> None:
    """Says something to whoever started this."""
    print(*words, flush=True)


async def call(target: str, file: str, *receivers: str) -> None:
    async with (
        EncoderClient(target, ClientSettings(transports=("inline",))) as client,
        client.encode(
            [image(Path(file))], prompt_id="killed", receivers=receivers, cache_policy=CachePolicy.CACHE_POLICY_BYPASS
        ) as call,
    ):
        async for event in call:
            if isinstance(event, Accepted):
                say("accepted")


async def hold(target: str, receiver: str, incarnation: str) -> None:
    async with (
        EncoderClient(target, ClientSettings(receiver=receiver, transports=("inline",))) as client,
        client.subscribe(incarnation=int(incarnation)) as subscription,
    ):
        async for event in subscription:
            chunk = event.chunk if isinstance(event, Ready) else None
            say(type(event).__name__, chunk.SerializeToString().hex() if chunk is not None else "")


async def redeem(receiver: str) -> None:
    loop = asyncio.get_running_loop()
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        chunk = EmbeddingChunk.FromString(bytes.fromhex(line))
        async with EncoderClient(
            chunk.encoder.grpc_target, ClientSettings(receiver=receiver, transports=("inline",))
        ) as client:
            embedding = await client.read(chunk)
            say(embedding.numpy().tobytes().hex())


PARTS: dict[str, Callable[..., Coroutine[None, None, None]]] = {"call": call, "hold": hold, "redeem": redeem}

if __name__ == "__main__":
    asyncio.run(PARTS[sys.argv[1]](*sys.argv[2:]))
