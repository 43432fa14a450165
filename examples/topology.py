"""Router, encoders, language-only workers, each a process; two of them are killed. Run it by ``make demo-topology``.

Two encoder services and two language-only workers are started. A router sends prompts of two photographs: the text to a
worker, each photograph to an encoder, which hands the embedding to the worker. On the way one encoder and one worker
get ``kill -9`` while they are busy. The demo succeeds only if every prompt gets the tokens of the whole model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from PIL import Image
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from skimage import data as photographs

from encoder_client import Accepted, ClientSettings, EncoderClient, EncoderClientError, EncoderError, image
from epd.encoder.v1.encoder_service_pb2 import CachePolicy
from epd.encoder.v1.media_pb2 import Modality
from epd.language.v1 import language_service_pb2 as language
from epd.language.v1.language_service_pb2_grpc import LanguageServiceStub
from examples.demo import EXAMPLES, Child, DemoError, child, console, step, wait_for_target

QUESTION = "What is this?"
NEW_TOKENS = 12
SIDE = 252
"""Pixels: 9 merge blocks of 28, so that nothing is resized; see :mod:`examples.demo`."""
PHOTOGRAPHS = 4
AT_ONCE = 4
PROMPT_SECONDS = 120.0
GONE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL}
"""What a call to a process that dies ends with."""


@dataclass(eq=False)
class Party:
    """A process that the router calls."""

    name: str
    child: Child
    target: str
    client: Any
    """An :class:`EncoderClient`, or a stub of ``LanguageService``."""
    busy: int = 0
    served: int = 0
    doomed: bool = False
    """It is killed the next time that it is busy."""
    state: str = "up"

    def die(self) -> None:
        """Kills it, if it is its turn."""
        if self.doomed and self.state == "up":
            self.child.process.kill()
            self.state = "killed"


@dataclass(eq=False)
class Prompt:
    """Two photographs and a question."""

    number: int
    photographs: tuple[int, int]
    state: str = "·"
    tokens: list[int] = field(default_factory=list)
    detours: int = 0
    """How often something was sent again."""


class Router:
    """Sends prompts, and sends again what a dead process had."""

    def __init__(self, encoders: list[Party], workers: list[Party], jpegs: list[bytes]) -> None:
        self.encoders = encoders
        self.workers = workers
        self._jpegs = jpegs

    async def answer(self, prompt: Prompt) -> None:
        """Gets a prompt's tokens, from whichever worker lives."""
        async with asyncio.timeout(PROMPT_SECONDS):
            for attempt in count():
                worker = _least_busy(self.workers)
                try:
                    prompt.tokens = await self._ask(worker, prompt, f"prompt-{prompt.number}/{attempt}")
                except grpc.aio.AioRpcError as error:
                    if error.code() not in GONE:
                        raise DemoError(f"prompt {prompt.number}: {error.code().name}: {error.details()}") from None
                    worker.state = "gone"
                    prompt.detours += 1
                else:
                    return

    async def _ask(self, worker: Party, prompt: Prompt, prompt_id: str) -> list[int]:
        content = [*(language.Content(media=Modality.MODALITY_IMAGE) for _ in prompt.photographs)]
        message = language.Message(role="user", content=[*content, language.Content(text=QUESTION)])
        request = language.GenerateRequest(prompt_id=prompt_id, messages=[message], max_new_tokens=NEW_TOKENS)
        call = worker.client.Generate(request)
        sends: list[asyncio.Task[None]] = []
        tokens: list[int] = []
        receiver = ""
        worker.busy += 1
        try:
            async for response in call:
                receiver = response.accepted.receiver_id or receiver
                for part in _parts_to_send(response, prompt):
                    sends.append(asyncio.create_task(self._send(prompt, prompt_id, part, receiver)))  # noqa: PERF401
                if response.HasField("tokens"):
                    prompt.state = "▸"
                    tokens += response.tokens.token_ids
                    worker.die()
                if response.HasField("finished"):
                    worker.served += 1
                    return tokens
            raise DemoError(f"the worker ended prompt {prompt.number} without an answer")
        finally:
            worker.busy -= 1
            call.cancel()
            for send in sends:
                send.cancel()
            for result in await asyncio.gather(*sends, return_exceptions=True):
                if isinstance(result, DemoError):
                    raise result

    async def _send(self, prompt: Prompt, prompt_id: str, part: int, receiver: str) -> None:
        """Has one photograph encoded for a worker. What happens to the part itself, the worker says."""
        while True:
            encoder = _least_busy(self.encoders)
            item = image(self._jpegs[prompt.photographs[part]])
            item.part_idx = part
            encoder.busy += 1
            try:
                async with encoder.client.encode(
                    [item], prompt_id=prompt_id, num_parts=len(prompt.photographs), receivers=[receiver],
                    cache_policy=CachePolicy.CACHE_POLICY_BYPASS, timeout=60,
                ) as call:  # fmt: skip
                    async for event in call:
                        if isinstance(event, Accepted):
                            encoder.die()
                encoder.served += 1
            except EncoderError as error:
                if error.code not in GONE:
                    raise
                encoder.state = "gone"
                prompt.detours += 1
            else:
                return
            finally:
                encoder.busy -= 1


def _parts_to_send(response: language.GenerateResponse, prompt: Prompt) -> list[int]:
    """All of a prompt that a worker has taken; one that it misses."""
    match response.WhichOneof("event"):
        case "accepted":
            prompt.state = "→"
            return list(range(response.accepted.num_parts))
        case "part_missing":
            prompt.detours += 1
            return [response.part_missing.part_idx]
        case _:
            return []


def _least_busy(parties: list[Party]) -> Party:
    alive = [party for party in parties if party.state == "up"]
    if not alive:
        raise DemoError(f"nobody is left of {', '.join(party.name for party in parties)}")
    return min(alive, key=lambda party: (party.busy, party.served))


def display(router: Router, prompts: list[Prompt], expected: dict[tuple[int, int], list[int]]) -> Table:
    """The processes, and how far each prompt is."""
    table = Table(show_header=True, title_justify="left", box=None)
    for column in ("process", "state", "busy with", "served"):
        table.add_column(column, justify="left" if column in {"process", "state"} else "right")
    for party in (*router.encoders, *router.workers):
        state = f"[green]{party.state}[/]" if party.state == "up" else "[bold red]killed[/]"
        table.add_row(party.name, state, str(party.busy), str(party.served))
    marks = []
    for prompt in prompts:
        if not prompt.tokens:
            marks.append(f"[dim]{prompt.state}[/]")
        elif prompt.tokens == expected[prompt.photographs]:
            marks.append("[yellow]✓[/]" if prompt.detours else "[green]✓[/]")
        else:
            marks.append("[bold red]✗[/]")
    table.add_section()
    table.add_row("prompts", " ".join(marks))
    return table


def take_photographs(folder: Path) -> list[Path]:
    """Writes JPEGs of corners of a real photograph (NASA's Eileen Collins, from scikit-image)."""
    whole = Image.fromarray(photographs.astronaut())
    files = []
    for index in range(PHOTOGRAPHS):
        left, top = index % 2 * SIDE, index // 2 * SIDE
        files.append(folder / f"photograph-{index}.jpg")
        whole.crop((left, top, left + SIDE, top + SIDE)).save(files[-1], "JPEG", quality=90)
    return files


async def start(stack: AsyncExitStack, folder: Path, checkpoint: Path) -> tuple[list[Party], list[Party]]:
    """Starts two encoders and two workers, each worker a receiver of both encoders."""
    program = Path(sys.executable).with_name("encoder-svc")
    servers = [
        await stack.enter_async_context(
            child(
                f"encoder {name}", folder, program, "serve", "--model", checkpoint, "--listen", "127.0.0.1:0",
                "--engine-threads", "1",
            )
        )
        for name in "AB"
    ]  # fmt: skip
    targets = await asyncio.gather(*map(wait_for_target, servers))
    encoders = []
    for server, target in zip(servers, targets, strict=True):
        client = await stack.enter_async_context(EncoderClient(target, ClientSettings(transports=("inline",))))
        encoders.append(Party(server.name, server, target, client))
    children = [
        await stack.enter_async_context(
            child(
                f"worker {name}", folder, sys.executable, "-m", "encoder_client", "worker", "--model", checkpoint,
                "--encoders", ",".join(targets), "--receiver", f"worker-{name}",
            )
        )
        for name in "12"
    ]  # fmt: skip
    workers = []
    for worker in children:
        while "ready target=" not in (line := await worker.line()):
            pass
        target = line.split("target=")[1].split()[0]
        channel = await stack.enter_async_context(grpc.aio.insecure_channel(target))
        workers.append(Party(worker.name, worker, target, LanguageServiceStub(channel)))
    return encoders, workers


async def ask_whole_model(stack: AsyncExitStack, folder: Path, checkpoint: Path, files: list[Path]) -> list[list[int]]:
    """What transformers alone says about each pair of neighbours."""
    pairs = [file for index, first in enumerate(files) for file in (first, files[(index + 1) % len(files)])]
    reference = await stack.enter_async_context(
        child(
            "whole model", folder, sys.executable, EXAMPLES / "whole_model.py", "--model", checkpoint,
            "--text", QUESTION, "--max-new-tokens", str(NEW_TOKENS), "--images", "2", *pairs,
        )
    )  # fmt: skip
    return [json.loads(await reference.line())["token_ids"] for _ in files]


async def run(folder: Path, number: int) -> bool:
    """The demo, in a folder that is removed afterwards. True: all is as it must be."""
    checkpoint = folder / "checkpoint"
    program = Path(sys.executable).with_name("encoder-svc")
    async with AsyncExitStack() as stack:
        with step("building a tiny random Qwen2.5-VL checkpoint") as done:
            builder = await stack.enter_async_context(
                child("checkpoint builder", folder, program, "tiny-checkpoint", "qwen2_5_vl", checkpoint)
            )
            await builder.ended()
            files = take_photographs(folder)
            done("a tiny random Qwen2.5-VL checkpoint, four photographs")
        with step("asking the whole model, as the reference") as done:
            answers = await ask_whole_model(stack, folder, checkpoint, files)
            done("what the whole model says, by transformers alone")
        with step("starting two encoder services and two language-only workers") as done:
            encoders, workers = await start(stack, folder, checkpoint)
            done("encoder A, encoder B, worker 1, worker 2")
        expected = {(index, (index + 1) % PHOTOGRAPHS): tokens for index, tokens in enumerate(answers)}
        prompts = [Prompt(index, list(expected)[index % PHOTOGRAPHS]) for index in range(number)]
        router = Router(encoders, workers, [file.read_bytes() for file in files])
        begun = time.monotonic()
        with Live(get_renderable=lambda: display(router, prompts, expected), console=console, refresh_per_second=8):
            await answer_all(router, prompts)
        console.print(f"{number} prompts in {time.monotonic() - begun:.1f} s", highlight=False)
        return verdict(router, prompts, expected)


async def answer_all(router: Router, prompts: list[Prompt]) -> None:
    """Answers the prompts, some at once. A third of the way an encoder dies, two thirds of the way a worker."""
    waiting = iter(prompts)
    answered = 0

    async def work() -> None:
        nonlocal answered
        for prompt in waiting:
            await router.answer(prompt)
            answered += 1
            router.encoders[0].doomed = answered >= len(prompts) // 3
            router.workers[0].doomed = answered >= 2 * len(prompts) // 3

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(work())
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


def verdict(router: Router, prompts: list[Prompt], expected: dict[tuple[int, int], list[int]]) -> bool:
    """Prints whether all is as it must be."""
    right = sum(prompt.tokens == expected[prompt.photographs] for prompt in prompts)
    detours = sum(prompt.detours > 0 for prompt in prompts)
    killed = [party.name for party in (*router.encoders, *router.workers) if party.child.process.returncode]
    checks = (
        (f"{right} of {len(prompts)} prompts were answered with the whole model's tokens", right == len(prompts)),
        (f"killed on the way: {' and '.join(killed)}", len(killed) == 2),
        (f"{detours} prompts were sent another way", detours > 0),
        ("the photographs' answers differ", len({tuple(tokens) for tokens in expected.values()}) > 1),
    )
    for text, good in checks:
        console.print(f"  {'[green]✓[/]' if good else '[bold red]✗[/]'} {text}", highlight=False)
    return all(good for _, good in checks)


async def main() -> int:
    """Runs the demo and cleans up, also when it is interrupted. Returns the exit code."""
    parser = argparse.ArgumentParser(description="Two encoders, two workers, one of each killed on the way.")
    parser.add_argument("--prompts", type=int, default=24)
    arguments = parser.parse_args()
    console.print(
        Panel(
            "Text goes to a worker, photographs to encoders, embeddings from these to the worker.\n"
            "One encoder and one worker are killed on the way; every answer must be right.",
            title="encoder-svc: the whole topology",
            expand=False,
        )
    )
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with tempfile.TemporaryDirectory(prefix="encoder-svc-topology-") as folder:
        try:
            good = await run(Path(folder), arguments.prompts)
        except asyncio.CancelledError:
            console.print("[yellow]interrupted; everything is stopped and removed[/]")
            return 130
        except (DemoError, EncoderClientError, TimeoutError) as error:
            console.print(f"[bold red]{type(error).__name__}: {error}[/]", highlight=False)
            good = False
    console.print("[bold green]Every prompt was answered right.[/]" if good else "[bold red]Not as it must be.[/]")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
