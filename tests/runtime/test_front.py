"""The front's own clock."""

from __future__ import annotations

import asyncio
from pathlib import Path

from encoder_svc.media.fetch import Fetcher
from encoder_svc.media.fetch_policy import FetchPolicy
from encoder_svc.runtime.configuration import Serving
from encoder_svc.runtime.front import Front
from encoder_svc.settings import Settings
from encoder_svc.telemetry.metrics import Metrics


async def test_f06_what_is_due_stumbles_and_what_is_due_later_has_its_time() -> None:
    faults: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(repr(context["exception"])))
    settings = Settings(model=Path("/nowhere"))
    serving = Serving(grpc_target="127.0.0.1:1", model_name="m", devices=("cpu",), dtype="float32")
    front = Front(settings, serving, Fetcher(FetchPolicy()), Metrics(), lambda: 0.0)
    ran = asyncio.Event()

    def stumble(_: float) -> None:
        raise ZeroDivisionError

    now = front.now()
    front.scheduler.timers.at(now, stumble)
    front.scheduler.timers.at(now + 0.05, lambda _: ran.set())
    front.changed()
    await ran.wait()
    assert faults == ["ZeroDivisionError()"]
    await front.__aexit__(None, None, None)
