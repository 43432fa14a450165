"""The runtime runs on uvloop, so its tests do."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping

import uvloop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], AbstractEventLoop]]:
    """The front's loop."""
    return {"uvloop": uvloop.new_event_loop}
