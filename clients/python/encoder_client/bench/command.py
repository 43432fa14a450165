"""``encoder-client bench``: what vLLM gains and loses by taking its embeddings from encoders."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import shlex
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from encoder_client.errors import EncoderClientError

if TYPE_CHECKING:
    from encoder_client.bench.display import Display
    from encoder_client.bench.result import Result
    from encoder_client.bench.vllm import Options

_DTYPES = ("bfloat16", "float16", "float32")
_DESCRIPTION = """\
Starts two deployments of one checkpoint on the cores of this machine, and sends both the same chat requests by turns:

  own tower                  vLLM, as it is
  by encoder                 encoder-svc, the proxy, and a vLLM that has loaded no tower

under two workloads: new images, which must be encoded, and repeated ones, which go round a set of pictures. It tells
requests per second, the time to the first token, and the memory of each server. All wait idle in memory while others
are measured, so on a GPU give each engine its part (--vllm-option=--gpu-memory-utilization=0.4).
"""
_EPILOG = """\
example:
  encoder-svc tiny-checkpoint qwen2_5_vl --preset small model
  encoder-client bench vllm --model model --vllm .venv-vllm/bin/vllm --json vllm.json --plot vllm.png

vLLM and encoder-svc need not share an environment; the one of vLLM needs encoder-client. Both inherit this process's
environment: VLLM_CPU_KVCACHE_SPACE, OMP_NUM_THREADS and others reach them. Measure on a machine that does nothing else.
docs/vllm.md says what the figures mean.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the sub-commands and their options."""
    benches = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    bench = benches.add_parser(
        "vllm",
        help="vLLM with its own tower, and with encoders in its place, on the same cores",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    subject = bench.add_argument_group("what is measured")
    subject.add_argument("--model", type=Path, required=True, metavar="PATH", help="folder of the checkpoint")
    subject.add_argument("--vllm", default="vllm", metavar="COMMAND", help="of vLLM (vllm)")
    subject.add_argument("--encoder", default="encoder-svc", metavar="COMMAND", help="of the encoder (encoder-svc)")
    subject.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of weights and embeddings (bfloat16)")
    subject.add_argument(
        "--vllm-option", action="append", default=[], metavar="OPTION",
        help="of both engines, such as --vllm-option=--max-model-len=4096",
    )  # fmt: skip
    subject.add_argument(
        "--encoder-option", action="append", default=[], metavar="OPTION",
        help="of the encoder, such as --encoder-option=--engine-threads=1",
    )  # fmt: skip
    load = bench.add_argument_group("with what")
    for name, value, text in (
        ("--image-size", 448, "side of the images in pixels"),
        ("--images", 1, "of a request"),
        ("--pictures", 100, "that repeated images go round"),
        ("--tokens", 16, "of each answer"),
        ("--concurrency", 4, "requests at a time"),
        ("--requests", 40, "of each deployment and workload, in each round"),
        ("--rounds", 4, "in which the deployments take turns"),
    ):
        load.add_argument(name, type=_positive, default=value, metavar="N", help=f"{text} ({value})")
    output = bench.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it")


def run(arguments: argparse.Namespace) -> int:
    """Measures, shows, and writes. Returns the exit code.

    Raises:
        EncoderClientError: it cannot measure as it was called, or a request failed.
    """
    _check(arguments)
    from rich.console import Console

    from encoder_client.bench.display import Display, result_table, write_plot
    from encoder_client.bench.vllm import Options

    options = Options(
        model=arguments.model.absolute(),
        vllm=arguments.vllm,
        encoder=arguments.encoder,
        dtype=arguments.dtype,
        image_size=arguments.image_size,
        images=arguments.images,
        pictures=arguments.pictures,
        tokens=arguments.tokens,
        concurrency=arguments.concurrency,
        requests=arguments.requests,
        rounds=arguments.rounds,
        vllm_options=tuple(arguments.vllm_option),
        encoder_options=tuple(arguments.encoder_option),
    )
    display = Display(Console(stderr=True))
    with display.shown():
        result = asyncio.run(_measure(options, display))
    Console().print(result_table(result))
    if arguments.json is not None:
        arguments.json.write_text(result.to_json())
    if arguments.plot is not None:
        write_plot(result, arguments.plot)
    return 0


async def _measure(options: Options, display: Display) -> Result:
    from encoder_client.bench.vllm import measure_vllm

    # Whoever stops us must not leave servers behind: leaving the blocks that started them stops them.
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await measure_vllm(options, shlex.join(["encoder-client", *sys.argv[1:]]), display)
    except asyncio.CancelledError:
        raise EncoderClientError("stopped") from None


def _check(arguments: argparse.Namespace) -> None:
    """What is needed during and after the run is looked for before it."""
    needed = ["aiohttp", "numpy", "PIL", "psutil", "rich", *(["matplotlib"] if arguments.plot is not None else [])]
    for name in needed:
        try:
            importlib.import_module(name)
        except ImportError as error:
            message = f"the bench needs the extra: pip install 'encoder-client[bench]' ({error})"
            raise EncoderClientError(message) from None
    for file in (arguments.json, arguments.plot):
        if file is not None and not file.resolve().parent.is_dir():
            raise EncoderClientError(f"{file} cannot be written: there is no folder {file.parent}")
    if not (arguments.model / "config.json").is_file():
        raise EncoderClientError(f"--model {arguments.model} is no checkpoint: it has no config.json")


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError("must be a whole number of 1 or more")
    return value
