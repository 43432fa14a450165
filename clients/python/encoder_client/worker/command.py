"""``encoder-client worker``: a language-only worker as a process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from encoder_client.client_settings import ClientSettings
from encoder_client.credential_arguments import add_credential_arguments, credentials_of
from encoder_client.errors import EncoderClientError
from encoder_client.worker.server import WorkerServer, WorkerSettings
from epd.listening import Listening

if TYPE_CHECKING:
    from encoder_client.worker.servicer import LanguageModel

DRAIN_SECONDS = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command."""
    defaults = WorkerSettings(encoders=("",), client=ClientSettings(receiver="-"))
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--encoders", type=_names, required=True, help="gRPC targets, with commas between them")
    parser.add_argument("--receiver", required=True, help="the name that the encoders know this worker by")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--device", default="cpu", help="as torch names it")
    parser.add_argument("--transports", type=_names, default=defaults.client.transports, help="the preferred first")
    parser.add_argument("--pool-bytes", type=int, default=defaults.pool_bytes, help="memory that is read into")
    parser.add_argument("--max-prompts", type=int, default=defaults.max_prompts, help="prompts at once")
    parser.add_argument("--max-tokens", type=int, default=defaults.max_tokens, help="tokens of an answer at most")
    parser.add_argument(
        "--part-seconds",
        type=float,
        default=defaults.part_seconds,
        metavar="SECONDS",
        help="that a prompt waits for parts of which nothing new is told; then it fails (default: %(default)g)",
    )
    add_credential_arguments(parser.add_argument_group("calls to encoders"))
    serving = parser.add_argument_group("serving Generate")
    serving.add_argument(
        "--listen", default=defaults.listening.address, metavar="HOST:PORT", help="port 0 takes a free one"
    )
    serving.add_argument("--tls-certificate", type=Path, metavar="FILE", help="PEM of the worker's certificate chain")
    serving.add_argument("--tls-key", type=Path, metavar="FILE", help="PEM of its private key")
    serving.add_argument(
        "--tls-client-ca", type=Path, metavar="FILE", help="PEM of the authority that callers' certificates come from"
    )
    serving.add_argument(
        "--callers", type=Path, metavar="FILE", help="TOML of who may call; the permission is `generate`"
    )
    serving.add_argument(
        "--allow-insecure", action="store_true", help="serve other hosts, and send the token to them, in plain text"
    )
    serving.add_argument("--no-reflection", action="store_true", help="leave gRPC reflection out")


def run(arguments: argparse.Namespace) -> NoReturn:
    """Loads the model and serves until SIGTERM or SIGINT, then ends the process.

    Raises:
        EncoderClientError: it cannot serve as it is set up, or an encoder refuses it.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    settings = WorkerSettings(
        encoders=arguments.encoders,
        client=_client_settings(arguments),
        listening=_listening(arguments),
        callers=arguments.callers,
        reflection=not arguments.no_reflection,
        pool_bytes=arguments.pool_bytes,
        max_prompts=arguments.max_prompts,
        max_tokens=arguments.max_tokens,
        part_seconds=arguments.part_seconds,
    )
    model = _load(arguments.model, arguments.dtype, arguments.device)
    asyncio.run(_serve(settings, model))
    # Python would wait for the thread of the model, and a device that hangs holds it for ever.
    logging.shutdown()
    os._exit(0)


def _client_settings(arguments: argparse.Namespace) -> ClientSettings:
    credentials = credentials_of(arguments, token_in_plain_text=arguments.allow_insecure)
    try:
        return ClientSettings(credentials, receiver=arguments.receiver, transports=arguments.transports)
    except ValueError as error:
        raise EncoderClientError(str(error)) from None


def _listening(arguments: argparse.Namespace) -> Listening:
    try:
        return Listening(
            arguments.listen,
            arguments.tls_certificate,
            arguments.tls_key,
            arguments.tls_client_ca,
            allow_insecure=arguments.allow_insecure,
        )
    except ValueError as error:
        raise EncoderClientError(str(error)) from None


def _load(folder: Path, dtype: str, device: str) -> LanguageModel:
    try:
        import torch

        from encoder_client.language import LanguageOnlyModel
    except ImportError as error:
        message = f"a worker needs the extra: pip install 'encoder-client[language]' ({error})"
        raise EncoderClientError(message) from None
    return LanguageOnlyModel.load(folder, dtype=getattr(torch, dtype), device=device)


async def _serve(settings: WorkerSettings, model: LanguageModel) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with WorkerServer(settings, model) as worker:
        print(f"encoder-client worker ready target={worker.target} receiver={settings.client.receiver}", flush=True)
        waits = [asyncio.create_task(stop.wait()), asyncio.create_task(worker.lost())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if waits[1].done():
                await waits[1]
            await worker.drain(DRAIN_SECONDS)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())
