"""``encoder-svc serve``: one server, from its settings to its last child."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from collections.abc import Coroutine, Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import uvloop

from encoder_svc.cli.device import resolve_device
from encoder_svc.heap import keep_large_blocks
from encoder_svc.media.fetch import Fetcher
from encoder_svc.media.fetch_policy import FetchPolicy
from encoder_svc.models.dtypes import resolve_dtype
from encoder_svc.models.registry import check_servable
from encoder_svc.rpc.server import RpcServer
from encoder_svc.runtime.configuration import Serving
from encoder_svc.runtime.front import Front
from encoder_svc.settings import Settings, add_arguments, load_settings
from encoder_svc.telemetry.logging import configure_logging
from encoder_svc.telemetry.loop_lag import LoopLag
from encoder_svc.telemetry.metrics import Metrics
from encoder_svc.telemetry.metrics_page import serve_metrics
from epd.addresses import split_address

if TYPE_CHECKING:
    from argparse import _SubParsersAction

logger = logging.getLogger(__name__)

OBSERVE_SECONDS = 1.0
"""Between two looks at the runtime for the gauges."""
GOODBYE_SECONDS = 1.0
"""For calls that are still open after the drain, such as a health watch."""

_EPILOG = """\
examples:
  encoder-svc serve --model /models/Qwen2.5-VL-7B-Instruct
  encoder-svc serve --model /tmp/tiny --listen 127.0.0.1:0 --device cpu --log-level debug
  encoder-svc serve --model /models/m --listen 0.0.0.0:50051 --tls-certificate s.pem --tls-key s.key

Each option can be given as an environment variable instead (ENCODER_SVC_MODEL, ...) or in the file of --config.
It prints `encoder-svc ready target=HOST:PORT` when requests are taken. SIGTERM or Ctrl-C drains and stops; a second one
stops at once.
"""


def add_parser(subparsers: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "serve",
        help="load the towers of a checkpoint and serve them",
        description="Loads the vision and audio towers of a checkpoint, and nothing else of it, and serves them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.set_defaults(func=run)


def run(arguments: argparse.Namespace) -> NoReturn:
    """Serves until it is told to stop, then ends the process.

    Its exit code is 0 after a clean stop, 1 when a second signal cut it short.

    Raises:
        SetupError: it cannot serve as it is set up.
    """
    settings = load_settings(arguments)
    checkpoint = check_servable(settings.model, settings.options)
    devices = _devices(settings)
    dtype = resolve_dtype(settings.dtype, checkpoint.dtype, devices[0])
    configure_logging(settings.log_level, "front")
    keep_large_blocks()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        code = runner.run(_serve(settings, checkpoint.name, devices, dtype))
    # All that the server began has ended, but Python would wait for its threads, and a name server or a file system
    # that does not answer can hold one for minutes.
    logging.shutdown()
    os._exit(code)


def _devices(settings: Settings) -> tuple[str, ...]:
    """One for each engine."""
    if settings.devices:
        return tuple(name.strip() for name in settings.devices.split(","))
    return (resolve_device(settings.device),) * settings.engines


async def _serve(settings: Settings, model_name: str, devices: tuple[str, ...], dtype: str) -> int:
    stop, stop_at_once = _signals()
    metrics = Metrics()
    server = RpcServer(settings, metrics)
    _say(f"listening on {server.address}")
    serving = Serving(grpc_target=server.target, model_name=model_name, devices=devices, dtype=dtype)
    with LoopLag() as lag, _metrics_endpoint(settings, metrics):
        async with (
            Fetcher(FetchPolicy.from_settings(settings)) as fetcher,
            Front(settings, serving, fetcher, metrics, lag.worst) as front,
        ):
            await server.start(front)
            observer = asyncio.create_task(_observe(front, metrics), name="observe")
            try:
                _say(f"loading the towers of {model_name} in {dtype} on {', '.join(devices)}")
                if not await _unless(stop, front.wait_ready()):
                    return 0
                # What is alive now stays alive: a full collection, which holds the loop, need not look at it again.
                gc.collect()
                gc.freeze()
                _say(f"encoder-svc ready target={server.target}")
                await stop.wait()
                _say(f"stopping: admitted work has {settings.drain_seconds:g} s to end; a second signal stops at once")
                server.stop_serving()
                drained = await _unless(stop_at_once, front.drain(settings.drain_seconds))
                return 0 if drained else 1
            finally:
                await server.stop(grace=0 if stop_at_once.is_set() else GOODBYE_SECONDS)
                observer.cancel()


def _signals() -> tuple[asyncio.Event, asyncio.Event]:
    """SIGTERM and SIGINT as events: the first asks to stop, the second to stop at once."""
    stop, stop_at_once = asyncio.Event(), asyncio.Event()

    def take() -> None:
        (stop_at_once if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, take)
    return stop, stop_at_once


async def _unless(event: asyncio.Event, work: Coroutine[Any, Any, None]) -> bool:
    """Waits for work, unless an event comes first: then the work is cancelled.

    Returns:
        The work has ended.
    """
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(event.wait())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        ended = tasks[0].done()
        if ended:
            await tasks[0]
        return ended
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _observe(front: Front, metrics: Metrics) -> None:
    while True:
        metrics.observe(front.describe(), front.load())
        await asyncio.sleep(OBSERVE_SECONDS)


@contextlib.contextmanager
def _metrics_endpoint(settings: Settings, metrics: Metrics) -> Iterator[None]:
    if not settings.metrics_listen:
        yield
        return
    host, port = split_address(settings.metrics_listen)
    port, stop = serve_metrics(metrics, host, port)
    _say(f"metrics on http://{host}:{port}/metrics")
    try:
        yield
    finally:
        stop()


def _say(line: str) -> None:
    """Prints a line for whoever started the server; one who has left, or whose disk is full, stops nothing."""
    try:
        # Into a pipe Python would let nothing through before it has filled a block.
        print(line, flush=True)
    except OSError as error:
        logger.warning("stdout takes nothing any more: %s", error.strerror)
        # What Python holds back of it would fail once more at the end, and decide the exit code.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
