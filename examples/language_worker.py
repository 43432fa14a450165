"""A language-only worker: a process with everything of a checkpoint but its towers.

It reads one JSON object a line and writes one JSON object a line. In either way of use::

    python examples/language_worker.py --model DIR --encode 127.0.0.1:50051 --text "What is this?" cat.jpg

sends the files to an encoder itself and answers. Without ``--encode`` others do that, and hand it the chunks::

    {"messages": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]}],
     "num_parts": 1, "max_new_tokens": 16}          begins a prompt
    {"chunk": "<base64 of an EmbeddingChunk>"}      LAYOUT, and later READY, of each part, in any order

It answers with the events ``loaded``, ``expanded`` (as soon as every LAYOUT is there, before any embedding is),
``read`` and ``generated``. It ends when its input does.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import logging
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch

from encoder_client import (
    ClientSettings,
    Embedding,
    EncoderClient,
    EncoderClientError,
    Layout,
    PartFailed,
    Ready,
    image,
)
from encoder_client.language import ExpandedPrompt, LanguageOnlyModel
from epd.encoder.v1.embedding_pb2 import ChunkState, EmbeddingChunk


def tell(event: str, **values: Any) -> None:
    """Writes one event."""
    print(json.dumps({"event": event, **values}), flush=True)


class PromptWork:
    """One prompt, from its first LAYOUT to its answer.

    Args:
        model: who answers.
        order: ``messages``, ``num_parts`` and ``max_new_tokens``.
    """

    def __init__(self, model: LanguageOnlyModel, order: dict[str, Any]) -> None:
        self._model = model
        self._order = order
        self._layouts: dict[int, EmbeddingChunk] = {}
        self._embeddings: list[Embedding] = []
        self._prompt: ExpandedPrompt | None = None

    async def take(self, chunk: EmbeddingChunk, client: EncoderClient) -> bool:
        """Takes a chunk, and answers when it was the last one needed. True: the prompt is answered."""
        self._layouts.setdefault(chunk.part_idx, chunk)
        if self._prompt is None and len(self._layouts) == self._order["num_parts"]:
            self._prompt = self._model.expand(self._order["messages"], list(self._layouts.values()))
            spans = [(span.start, span.length) for span in self._prompt.spans]
            tell("expanded", tokens=self._prompt.input_ids.shape[1], spans=spans)
        if chunk.state == ChunkState.CHUNK_STATE_READY:
            embedding = await client.read(chunk)
            tell(
                "read", part_idx=chunk.part_idx, transport=embedding.transport, nbytes=embedding.nbytes,
                seconds=embedding.read_seconds,
            )  # fmt: skip
            self._embeddings.append(embedding)
        if self._prompt is None or len(self._embeddings) < self._order["num_parts"]:
            return False
        begun = time.monotonic()
        answer = await asyncio.to_thread(
            self._model.generate, self._prompt, self._embeddings,
            max_new_tokens=self._order["max_new_tokens"], first_logits=True,
        )  # fmt: skip
        assert answer.first_logits is not None
        tell(
            "generated", token_ids=answer.token_ids, text=answer.text, first_logits=answer.first_logits.tolist(),
            seconds=time.monotonic() - begun,
        )  # fmt: skip
        return True


async def input_lines() -> AsyncIterator[dict[str, Any]]:
    """The objects that come by standard input."""
    reader = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while line := await reader.readline():
        yield json.loads(line)


async def serve(model: LanguageOnlyModel, receiver: str, transports: Sequence[str]) -> None:
    """Answers the prompts that come by standard input."""
    work: PromptWork | None = None
    clients: dict[str, EncoderClient] = {}
    try:
        async for line in input_lines():
            if "messages" in line:
                work = PromptWork(model, line)
            elif work is not None:
                chunk = EmbeddingChunk.FromString(base64.b64decode(line["chunk"]))
                target = chunk.encoder.grpc_target
                if target not in clients:
                    client = EncoderClient(target, ClientSettings(receiver=receiver, transports=transports))
                    clients[target] = await client.__aenter__()
                if await work.take(chunk, clients[target]):
                    work = None
    finally:
        for client in clients.values():
            await client.__aexit__(None, None, None)


async def encode(model: LanguageOnlyModel, arguments: argparse.Namespace) -> None:
    """Sends the files to an encoder, and answers."""
    files: list[Path] = arguments.files
    content = [*({"type": "image"} for _ in files), {"type": "text", "text": arguments.text}]
    work = PromptWork(model, {
        "messages": [{"role": "user", "content": content}], "num_parts": len(files),
        "max_new_tokens": arguments.max_new_tokens,
    })  # fmt: skip
    async with (
        EncoderClient(arguments.encode, ClientSettings(transports=arguments.transports)) as client,
        client.encode([image(file) for file in files]) as call,
    ):
        async for event in call:
            match event:
                case Layout(chunk) | Ready(chunk):
                    await work.take(chunk, client)
                case PartFailed():
                    raise event.error


def main() -> None:
    """Reads the command line, loads the model, and works."""
    parser = argparse.ArgumentParser(description="A language-only worker; the module's docstring has its protocol.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cpu", help="as torch names it")
    parser.add_argument("--receiver", default="", help="the name that leases are granted to")
    parser.add_argument("--transports", type=lambda text: text.split(","), default=["mooncake", "inline"])
    parser.add_argument("--encode", metavar="TARGET", help="send the files to this encoder instead of taking chunks")
    parser.add_argument("--text", default="What is this?", help="with --encode: what is asked about the files")
    parser.add_argument("--max-new-tokens", type=int, default=16, help="with --encode: tokens of the answer at most")
    parser.add_argument("files", type=Path, nargs="*", help="with --encode: image files")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    try:
        model = LanguageOnlyModel.load(arguments.model, dtype=getattr(torch, arguments.dtype), device=arguments.device)
        tell(
            "loaded", files=model.weights.files, tensors=len(model.weights.tensors), nbytes=model.weights.nbytes,
            left_out=len(model.weights.left_out), tower_parameters=model.tower_parameters,
        )  # fmt: skip
        if arguments.encode:
            asyncio.run(encode(model, arguments))
        else:
            asyncio.run(serve(model, arguments.receiver, arguments.transports))
    except EncoderClientError as error:
        sys.exit(f"language_worker: {error}")


if __name__ == "__main__":
    main()
