"""``encoder-svc bench``: measures a server of its own beside its reference."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shlex
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvloop
from pydantic import ByteSize, TypeAdapter, ValidationError
from rich.console import Console

from encoder_client import EncoderClientError
from encoder_client.transports import TRANSPORTS
from encoder_svc.bench.batching import BatchingOptions, measure_batching
from encoder_svc.bench.display import Display, result_table
from encoder_svc.bench.fairness import FairnessOptions, measure_fairness
from encoder_svc.bench.loop import LoopOptions, measure_loop
from encoder_svc.bench.media import MEDIUM_NAMES, MediumName
from encoder_svc.bench.overhead import OverheadOptions, measure_overhead
from encoder_svc.bench.plot import require_matplotlib, write_plot
from encoder_svc.bench.result import AnyResult, SoakResult
from encoder_svc.bench.run import Measurement, Run, Subject
from encoder_svc.bench.service import cached_checkpoint, load_psutil
from encoder_svc.bench.soak import SoakOptions, measure_soak
from encoder_svc.bench.throughput import ThroughputOptions, measure_throughput
from encoder_svc.bench.transport import TransportOptions, measure_transport
from encoder_svc.cli.device import resolve_device
from encoder_svc.errors import SetupError
from encoder_svc.models.checkpoint import open_checkpoint
from encoder_svc.models.dtypes import resolve_dtype
from encoder_svc.models.registry import FAMILIES, check_servable, find_family
from encoder_svc.settings import Settings
from epd.encoder.v1.media_pb2 import Modality

if TYPE_CHECKING:
    from argparse import _SubParsersAction

Measure = Callable[[Any, Any], Coroutine[Any, Any, AnyResult]]
"""From a :class:`Run`, or a :class:`Measurement` where no server is measured, and the options of the sub-command."""

DEFAULT_FAMILY = "qwen2_5_vl"

_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}
_EPILOG = """\
examples:
  encoder-svc bench throughput --dtype bf16 --image-size 224 --concurrency 16 --json throughput.json
  encoder-svc bench throughput --family qwen3_vl --medium video --image-size 224
  encoder-svc bench throughput --family whisper
  encoder-svc bench overhead --plot overhead.png
  encoder-svc bench soak --requests 10000 --cancel-share 0.2

It starts a server of its own on a free port, with a random checkpoint of its own unless --model names one, and is its
only caller. Measure on a machine that does nothing else. docs/performance.md says what each figure means.
"""


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command and its sub-commands."""
    parser = subparsers.add_parser(
        "bench",
        help="measure a server of its own beside its reference",
        description="Measures a server beside its reference, in one run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    benches = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    for add in (
        _add_throughput, _add_overhead, _add_batching, _add_fairness, _add_soak, _add_loop, _add_transport
    ):  # fmt: skip
        add(benches)


def _add_throughput(benches: _SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "images, videos or sounds per second, beside the plain loop of transformers"
    bench = _add(benches, "throughput", text, measure_throughput)
    bench.add_argument(
        "--family", default=DEFAULT_FAMILY, metavar="FAMILY", help=f"of the random checkpoint ({DEFAULT_FAMILY})"
    )
    bench.add_argument(
        "--medium", choices=MEDIUM_NAMES, help="what is encoded (image, or audio with a family that only hears)"
    )
    _add_sizes(bench, image_size=224, concurrency=16)
    _add_lengths(bench, seconds=20.0)
    bench.set_defaults(options=_throughput_options)


def _throughput_options(arguments: argparse.Namespace) -> ThroughputOptions:
    family = FAMILIES.get(arguments.family)
    if arguments.model is not None:
        family = find_family(open_checkpoint(arguments.model))
    if family is None:
        raise SetupError(f"--family {arguments.family} is none of {', '.join(sorted(FAMILIES))}")
    encoded = [name for name in MEDIUM_NAMES if Modality.Value(f"MODALITY_{name.upper()}") in family.modalities]
    medium: MediumName = arguments.medium or encoded[0]
    if medium not in encoded:
        raise SetupError(f"--medium {medium}: {family.model_type} encodes {', '.join(encoded)} only")
    return ThroughputOptions(
        family.model_type,
        medium,
        arguments.image_size,
        arguments.concurrency,
        arguments.seconds,
        arguments.requests,
        arguments.rounds,
    )


def _add_overhead(benches: _SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = _add(benches, "overhead", "what a request costs beside its forward, and a cached one", measure_overhead)
    _add_sizes(bench, image_size=224, concurrency=32)
    bench.add_argument("--requests", type=_positive, default=500, metavar="N", help="behind each percentile (500)")
    bench.set_defaults(options=lambda a: OverheadOptions(a.image_size, a.requests, a.concurrency))


def _add_batching(benches: _SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = _add(benches, "batching", "what running images together gains, by their size", measure_batching)
    bench.add_argument(
        "--image-sizes", type=_sizes, default=(56, 112, 224, 448), metavar="PX,PX", help="sides (56,112,224,448)"
    )
    bench.add_argument("--concurrency", type=_positive, default=16, metavar="N", help="requests at a time (16)")
    _add_lengths(bench, seconds=6.0)
    bench.set_defaults(options=lambda a: BatchingOptions(a.image_sizes, a.concurrency, a.seconds, a.requests, a.rounds))


def _add_fairness(benches: _SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = _add(benches, "fairness", "what one large prompt does to single images of others", measure_fairness)
    _add_sizes(bench, image_size=224, concurrency=4)
    bench.add_argument("--prompt-images", type=_positive, default=64, metavar="N", help="of the large prompt (64)")
    bench.add_argument("--prompts", type=_positive, default=10, metavar="N", help="one after the other (10)")
    bench.set_defaults(options=lambda a: FairnessOptions(a.image_size, a.concurrency, a.prompt_images, a.prompts))


def _add_soak(benches: _SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "many requests, some cancelled, some under a killed engine: exit code 1 if a bound is broken"
    bench = _add(benches, "soak", text, measure_soak)
    _add_sizes(bench, image_size=56, concurrency=32)
    bench.add_argument("--requests", type=_positive, default=10_000, metavar="N", help="in all (10000)")
    bench.add_argument("--cancel-share", type=_share, default=0.2, metavar="X", help="that are cancelled (0.2)")
    bench.add_argument(
        "--kill-engine-every", type=_count, default=0, metavar="N", help="requests between kills; 0 kills none (0)"
    )
    bench.add_argument("--seed", type=int, default=0, metavar="N", help="of what is cancelled, and when (0)")
    bench.set_defaults(
        options=lambda a: SoakOptions(
            a.image_size, a.concurrency, a.requests, a.cancel_share, a.kill_engine_every, a.seed
        )
    )


def _add_loop(benches: _SubParsersAction[argparse.ArgumentParser]) -> None:
    bench = _add(benches, "loop", "how soon a small call is answered by a busy server", measure_loop)
    bench.add_argument(
        "--requests", type=_positive, default=1500, metavar="N", help="calls behind each percentile (1500)"
    )
    bench.add_argument("--forward-seconds", type=float, default=2.0, metavar="S", help="of the forward beside (2)")
    bench.add_argument("--streams", type=_positive, default=16, metavar="N", help="large requests at a time (16)")
    bench.add_argument("--stream-bytes", type=_positive, default=5_000_000, metavar="N", help="of each (5000000)")
    bench.set_defaults(options=lambda a: LoopOptions(a.requests, a.forward_seconds, a.streams, a.stream_bytes))


def _add_transport(benches: _SubParsersAction[argparse.ArgumentParser]) -> None:
    text = "reads by each transport, beside the bare loop of its library; needs no model"
    bench = _add_bare(benches, "transport", text, measure_transport)
    bench.add_argument(
        "--transports", type=_transports, default=TRANSPORTS, metavar="NAME,NAME", help=f"({','.join(TRANSPORTS)})"
    )
    bench.add_argument(
        "--sizes", type=_byte_sizes, default=(1 << 20, 8 << 20, 64 << 20), metavar="BYTES,BYTES",
        help="of embeddings (1MiB,8MiB,64MiB)",
    )  # fmt: skip
    bench.add_argument("--rounds", type=_positive, default=5, metavar="N", help="in which the sides take turns (5)")
    bench.set_defaults(options=lambda a: TransportOptions(a.transports, a.sizes, a.rounds))


def _add_bare(
    benches: _SubParsersAction[argparse.ArgumentParser], name: str, text: str, measure: Measure
) -> argparse.ArgumentParser:
    bench = benches.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    bench.set_defaults(func=run, measure=measure, has_subject=False)
    output = bench.add_argument_group("output")
    output.add_argument("--json", type=Path, metavar="FILE", help="write everything as JSON")
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it")
    return bench


def _add(
    benches: _SubParsersAction[argparse.ArgumentParser], name: str, text: str, measure: Measure
) -> argparse.ArgumentParser:
    bench = _add_bare(benches, name, text, measure)
    bench.set_defaults(has_subject=True)
    common = bench.add_argument_group("what is measured")
    common.add_argument("--model", type=Path, metavar="PATH", help="a checkpoint (a random one is written and kept)")
    common.add_argument("--preset", default="small", metavar="{tiny,small,base}", help="of the random one (small)")
    common.add_argument("--dtype", default="bf16", metavar="{bf16,fp32,fp16,auto}", help="of weights and rows (bf16)")
    common.add_argument("--device", default="auto", metavar="DEVICE", help="as of serve (auto)")
    common.add_argument("--threads", type=_positive, metavar="N", help="of a forward (one for each core)")
    common.add_argument("--transport", choices=["auto", *TRANSPORTS], default="auto", help="how rows are read (auto)")
    common.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the server, such as batch_patches=1024",
    )
    return bench


def _add_sizes(bench: argparse.ArgumentParser, image_size: int, concurrency: int) -> None:
    bench.add_argument(
        "--image-size", type=_positive, default=image_size, metavar="PX", help=f"side of the images ({image_size})"
    )
    bench.add_argument(
        "--concurrency", type=_positive, default=concurrency, metavar="N", help=f"requests at a time ({concurrency})"
    )


def _add_lengths(bench: argparse.ArgumentParser, seconds: float) -> None:
    bench.add_argument("--seconds", type=float, default=seconds, metavar="S", help=f"of each side ({seconds:g})")
    bench.add_argument("--requests", type=_count, default=0, metavar="N", help="of each side, instead of a time")
    bench.add_argument("--rounds", type=_positive, default=4, metavar="N", help="in which the sides take turns (4)")


@contextmanager
def _whole_process() -> Iterator[None]:
    """Sets what belongs to the whole process, for as long as it measures."""
    client = logging.getLogger("encoder_client")
    level = client.level
    # What a failed read means is in the figures; lines about it would tear the display.
    client.setLevel(logging.CRITICAL)
    # Whoever stops us must not leave a server behind: leaving the blocks that started it stops it.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        client.setLevel(level)


def run(arguments: argparse.Namespace) -> int:
    """Measures, shows, and writes.

    Returns:
        0; 1 if a request failed that must not, or a soak broke a bound.

    Raises:
        SetupError: it cannot measure as it was called.
    """
    _check_output(arguments)
    subject = _subject(arguments) if arguments.has_subject else None
    options = arguments.options(arguments)
    parameters = {name: _plain(value) for name, value in vars(options).items()}
    console = Console(stderr=True)
    display = Display(console)
    command_line = shlex.join(["encoder-svc", *sys.argv[1:]])
    try:
        with _whole_process(), display.shown(), asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            bench = (
                Run(subject, command_line, parameters, display)
                if subject is not None
                else Measurement(command_line, parameters, display, len(os.sched_getaffinity(0)))
            )
            result: AnyResult = runner.run(arguments.measure(bench, options))
    except EncoderClientError as error:
        console.print(f"encoder-svc bench: a request failed: {error}", style="red", highlight=False, markup=False)
        return 1
    Console().print(result_table(result))
    if arguments.json is not None:
        arguments.json.write_text(result.model_dump_json(indent=2) + "\n")
    if arguments.plot is not None:
        write_plot(result, arguments.plot)
    return 1 if isinstance(result, SoakResult) and not result.ok else 0


def _check_output(arguments: argparse.Namespace) -> None:
    """What is needed after the run is looked for before it."""
    for file in (arguments.json, arguments.plot):
        if file is not None and not file.resolve().parent.is_dir():
            raise SetupError(f"{file} cannot be written: there is no folder {file.parent}")
    if arguments.plot is not None:
        require_matplotlib()
    if arguments.bench == "soak":
        load_psutil()


def _subject(arguments: argparse.Namespace) -> Subject:
    model = arguments.model
    if model is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        model = cached_checkpoint(
            getattr(arguments, "family", DEFAULT_FAMILY), arguments.preset, cache / "encoder-svc" / "bench"
        )
    checkpoint = check_servable(model)
    device = resolve_device(arguments.device)
    dtype = resolve_dtype(_DTYPES.get(arguments.dtype, arguments.dtype), checkpoint.dtype, device)
    return Subject(
        model=model.resolve(),
        dtype=dtype,
        device=device,
        threads=arguments.threads or len(os.sched_getaffinity(0)),
        transport=arguments.transport,
        settings=dict(_setting(text) for text in arguments.set),
    )


def _setting(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    name = name.strip().replace("-", "_")
    if name not in Settings.model_fields or not value:
        raise SetupError(f"--set {text}: give NAME=VALUE, with a name of `encoder-svc serve --help`")
    return name, value


def _plain(value: Any) -> str | int | float | bool:
    return ",".join(str(one) for one in value) if isinstance(value, tuple) else value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError("must not be negative")
    return value


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError("must be from 0 to 1")
    return value


def _transports(text: str) -> tuple[str, ...]:
    names = tuple(name.strip().replace("-", "_") for name in text.split(","))
    for name in names:
        if name not in TRANSPORTS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(TRANSPORTS)}")
    return names


def _byte_sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(TypeAdapter(ByteSize).validate_python(part.strip())) for part in text.split(","))
    except ValidationError:
        raise argparse.ArgumentTypeError("give sizes such as 256KiB,8MiB") from None
    if min(sizes) < 64:
        raise argparse.ArgumentTypeError("must be at least 64 bytes")
    return sizes


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))
