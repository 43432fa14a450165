"""The main job, from a photograph to tokens, with every process real. Run it by ``make demo``.

A tiny random checkpoint is built, an encoder service and a language-only worker are started on it, a photograph is
sent, the worker reads the embedding and answers; then transformers alone runs the whole model on the same photograph.
The demo succeeds only if both say the same tokens.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from google.protobuf.duration_pb2 import Duration
from PIL import Image
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from skimage import data as photographs

from encoder_client import (
    Accepted,
    ClientSettings,
    Complete,
    EncoderClient,
    EncoderClientError,
    Event,
    Layout,
    PartCancelled,
    PartFailed,
    Ready,
    image,
)
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, Transport
from epd.encoder.v1.encoder_service_pb2 import GetServerInfoResponse

EXAMPLES = Path(__file__).parent
RECEIVER = "language-worker"
QUESTION = "What is this?"
NEW_TOKENS = 16
SIDE = 504
"""Pixels: 18 merge blocks of 28. At such a size nothing is resized, so the service and transformers' PIL processor,
which resize differently, see the same pixels."""
START_SECONDS = 300.0
STOP_SECONDS = 15.0

console = Console()


class DemoError(Exception):
    """The demo cannot go on; the message says why."""


@dataclass
class Child:
    """A process that the demo started, with its log."""

    name: str
    process: asyncio.subprocess.Process
    log: IO[bytes]
    seen: list[dict[str, Any]] = field(default_factory=list)

    async def line(self) -> str:
        """The next line of its output."""
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                line = await self.process.stdout.readline()
        except TimeoutError:
            raise DemoError(f"the {self.name} said nothing for {START_SECONDS:g} s") from None
        if not line:
            self.log.seek(0)
            raise DemoError(f"the {self.name} ended; the end of its log:\n{self.log.read().decode()[-2000:]}")
        return line.decode()

    async def event(self, kind: str) -> dict[str, Any]:
        """The next event of this kind, from a process that writes JSON lines."""
        while True:
            event: dict[str, Any] = json.loads(await self.line())
            self.seen.append(event)
            if event["event"] == kind:
                return event

    async def say(self, **message: Any) -> None:
        """Writes a JSON line to it."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message).encode() + b"\n")
        await self.process.stdin.drain()

    async def ended(self) -> None:
        """Waits until it has ended by itself."""
        try:
            async with asyncio.timeout(START_SECONDS):
                await self.process.communicate()
        except TimeoutError:
            raise DemoError(f"the {self.name} did not end in {START_SECONDS:g} s") from None

    async def stop(self) -> None:
        """Ends it and waits until it is gone."""
        if self.process.returncode is None:
            self.process.terminate()
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self.process.wait()
            except TimeoutError:
                self.process.kill()
                await self.process.wait()


@asynccontextmanager
async def child(name: str, folder: Path, *command: str | Path) -> AsyncIterator[Child]:
    """Starts a process; it is gone when the context is left, however that happens."""
    with (folder / f"{name.replace(' ', '-')}.log").open("w+b") as log:
        process = await asyncio.create_subprocess_exec(
            *map(str, command), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
            limit=1 << 24, env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        started = Child(name, process, log)
        try:
            yield started
        finally:
            await started.stop()


@contextmanager
def step(text: str) -> Iterator[Callable[[str], None]]:
    """Shows that something long is done, and in the end what came of it and how long it took."""
    begun = time.monotonic()

    def done(result: str) -> None:
        console.print(f"[green]✓[/] {result} [dim]({time.monotonic() - begun:.1f} s)[/]", highlight=False)

    with console.status(text):
        yield done


def take_photograph(path: Path) -> bytes:
    """Writes a JPEG of a real photograph (NASA's Eileen Collins, from scikit-image)."""
    whole = Image.fromarray(photographs.astronaut())
    jpeg = io.BytesIO()
    whole.crop((0, 0, SIDE, SIDE)).save(jpeg, "JPEG", quality=90)
    path.write_bytes(jpeg.getvalue())
    return jpeg.getvalue()


async def wait_for_target(server: Child) -> str:
    """Waits until the encoder service takes requests. Returns its target."""
    while not (line := await server.line()).startswith("encoder-svc ready target="):
        pass
    return line.split("target=")[1].split()[0]


async def send(target: str, worker: Child, jpeg: bytes) -> tuple[EmbeddingChunk, GetServerInfoResponse]:
    """Sends the photograph, shows the events, and hands the chunks to the worker: metadata, no tensor."""
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    await worker.say(messages=messages, num_parts=1, max_new_tokens=NEW_TOKENS)
    ready: EmbeddingChunk | None = None
    async with EncoderClient(target, ClientSettings(transports=("inline",))) as client:
        async with client.encode([image(jpeg)], prompt_id="demo", receivers=[RECEIVER], timeout=120) as call:
            async for event in call:
                show(event)
                match event:
                    case Layout(chunk) | Ready(chunk):
                        ready = chunk
                        await worker.say(chunk=base64.b64encode(chunk.SerializeToString()).decode())
                    case PartFailed():
                        raise event.error
        assert ready is not None
        return ready, await client.server_info()


def show(event: Event) -> None:
    """Prints one event of the call."""
    match event:
        case Layout(chunk):
            detail = f"grid {tuple(chunk.grid_dim)} → {chunk.token_count} rows, {chunk.nbytes:,} bytes announced"
        case Ready(chunk):
            ways = [str(locator.WhichOneof("location")) for locator in chunk.locators]
            detail = f"generation {chunk.generation}, to be read by {' or '.join(ways)}"
        case PartFailed():
            detail = str(event.error)
        case PartCancelled():
            detail = f"part {event.part_idx}"
        case Accepted():
            detail = f"request {event.request_id}"
        case Complete():
            detail = f"{event.ready} ready, {event.failed} failed, {event.cancelled} cancelled"
    console.print(f"  [cyan]{type(event).__name__:9}[/] {detail}", highlight=False)


def milliseconds(duration: Duration) -> str:
    """A duration as text."""
    return f"{duration.ToNanoseconds() / 1e6:,.3f} ms"


def transfer_table(chunk: EmbeddingChunk, jpeg: bytes, read: dict[str, Any], info: GetServerInfoResponse) -> Table:
    """What moved, how, and where the time went."""
    table = Table(title="One photograph", title_justify="left", show_header=False)
    table.add_column(style="cyan")
    table.add_column(justify="right")
    tensor, times = chunk.tensors[0], chunk.timings
    for name, value in (
        ("photograph", f"JPEG {chunk.image.width}×{chunk.image.height}, {len(jpeg):,} bytes"),
        ("embedding", f"{tensor.shape[0]} rows × {tensor.shape[1]}, {chunk.nbytes:,} bytes"),
        ("transport", f"[bold green]{read['transport']}[/]"),
        *(("", f"the service has no {name}: {why}") for name, why in unavailable(info)),
        ("queue", milliseconds(times.queued)),
        ("prepare (decode, resize, patches)", milliseconds(times.prepare)),
        ("wait for the batch", milliseconds(times.batch_wait)),
        ("forward", milliseconds(times.forward)),
        ("copy and checksum", milliseconds(times.stage)),
        ("accepted → READY", milliseconds(times.total)),
        ("read by the worker", f"{read['seconds'] * 1e3:,.3f} ms"),
    ):
        table.add_row(name, value)
    return table


def unavailable(info: GetServerInfoResponse) -> list[tuple[str, str]]:
    """The transports that the service cannot offer here, and why."""
    return [
        (Transport.Name(told.transport).removeprefix("TRANSPORT_").lower(), told.reason)
        for told in info.transports
        if not told.available
    ]


def weights_table(info: GetServerInfoResponse, loaded: dict[str, Any], whole: dict[str, Any]) -> Table:
    """Who read which part of the checkpoint."""
    table = Table(title="Who holds what", title_justify="left")
    for column in ("process", "tensors read", "bytes read"):
        table.add_column(column, justify="left" if column == "process" else "right")
    weights = info.model.weights
    table.add_row("encoder service: the tower", str(weights.tensors), f"{weights.bytes:,}")
    table.add_row("language-only worker: the rest", str(loaded["tensors"]), f"{loaded['nbytes']:,}")
    table.add_row("both", str(weights.tensors + loaded["tensors"]), f"{weights.bytes + loaded['nbytes']:,}")
    table.add_row("whole model", "", f"{whole['parameters'] * 4:,}", style="dim")
    return table


def tokens_table(answer: dict[str, Any], whole: dict[str, Any]) -> Table:
    """The answers beside each other."""
    table = Table(title="Generated token ids", title_justify="left")
    for column in ("", "service + language-only worker", "whole model (transformers)", ""):
        table.add_column(column, justify="right")
    for index, (mine, theirs) in enumerate(zip(answer["token_ids"], whole["token_ids"], strict=False)):
        mark = "[green]=[/]" if mine == theirs else "[bold red]≠[/]"
        table.add_row(str(index), str(mine), str(theirs), mark)
    return table


def verdict(info: GetServerInfoResponse, loaded: dict[str, Any], answer: dict[str, Any], whole: dict[str, Any]) -> bool:
    """Prints whether all is as it must be."""
    pairs = zip(answer["first_logits"], whole["first_logits"], strict=True)
    difference = max((abs(mine - theirs) for mine, theirs in pairs), default=math.inf)
    weights = info.model.weights
    checks = (
        ("the tokens are the whole model's", answer["token_ids"] == whole["token_ids"]),
        (f"the first step's logits are within 1e-4 of the whole model's ({difference:.1e})", difference < 1e-4),
        ("the worker read no tensor of the tower and holds no parameter of it",
         loaded["tensors"] > 0 and loaded["left_out"] == weights.tensors and loaded["tower_parameters"] == 0),
        ("the service read the tower alone: both together are the whole model",
         weights.bytes + loaded["nbytes"] == whole["parameters"] * 4),
    )  # fmt: skip
    for text, good in checks:
        console.print(f"  {'[green]✓[/]' if good else '[bold red]✗[/]'} {text}", highlight=False)
    return all(good for _, good in checks)


async def run(folder: Path) -> bool:
    """The demo, in a folder that is removed afterwards. True: all is as it must be."""
    program, checkpoint = Path(sys.executable).with_name("encoder-svc"), folder / "checkpoint"
    photograph = folder / "photograph.jpg"
    async with AsyncExitStack() as stack:
        with step("building a tiny random Qwen2.5-VL checkpoint") as done:
            builder = await stack.enter_async_context(
                child("checkpoint builder", folder, program, "tiny-checkpoint", "qwen2_5_vl", checkpoint)
            )
            await builder.ended()
            if builder.process.returncode:
                await builder.line()  # there is none: it tells the log
            jpeg = take_photograph(photograph)
            size = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
            done(f"a tiny random Qwen2.5-VL checkpoint: {size:,} bytes of weights")

        with step("starting the encoder service and the language-only worker") as done:
            server = await stack.enter_async_context(
                child("encoder service", folder, program, "serve", "--model", checkpoint, "--listen", "127.0.0.1:0")
            )
            worker = await stack.enter_async_context(
                child(
                    "language-only worker",
                    folder,
                    sys.executable,
                    EXAMPLES / "language_worker.py",
                    "--model",
                    checkpoint,
                    "--receiver",
                    RECEIVER,
                )
            )
            target, loaded = await asyncio.gather(wait_for_target(server), worker.event("loaded"))
            done(f"an encoder service at {target} and a language-only worker")

        console.print(f"[green]→[/] a photograph of {SIDE}×{SIDE} pixels; the encoder's events:", highlight=False)
        chunk, info = await send(target, worker, jpeg)
        with step("the worker reads the embedding and generates") as done:
            read = await worker.event("read")
            answer = await worker.event("generated")
            done(f"the worker: {' → '.join(event['event'] for event in worker.seen)}")

        with step("transformers runs the whole model on the same photograph") as done:
            reference = await stack.enter_async_context(
                child(
                    "whole model",
                    folder,
                    sys.executable,
                    EXAMPLES / "whole_model.py",
                    "--model",
                    checkpoint,
                    "--text",
                    QUESTION,
                    "--max-new-tokens",
                    str(NEW_TOKENS),
                    photograph,
                )
            )
            whole = json.loads(await reference.line())
            done("transformers alone, with the whole model, on the same photograph")
        console.print("", transfer_table(chunk, jpeg, read, info), "")
        console.print(tokens_table(answer, whole), "")
        console.print(weights_table(info, loaded, whole), "")
        return verdict(info, loaded, answer, whole)


async def main() -> int:
    """Runs the demo and cleans up, also when it is interrupted. Returns the exit code."""
    console.print(
        Panel(
            "A photograph goes in over gRPC, its embedding comes out over Mooncake,\n"
            "and a language model that never loaded the tower answers as the whole one.",
            title="encoder-svc",
            expand=False,
        )
    )
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    with tempfile.TemporaryDirectory(prefix="encoder-svc-demo-") as folder:
        try:
            good = await run(Path(folder))
        except asyncio.CancelledError:
            console.print("[yellow]interrupted; everything is stopped and removed[/]")
            return 130
        except (DemoError, EncoderClientError) as error:
            console.print(f"[bold red]{error}[/]", highlight=False)
            return 1
    console.print("[bold green]The answers are equal.[/]" if good else "[bold red]The answers differ.[/]")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
