"""The serving halves of the transports: others read an engine's arena, and its forward never waits for them."""

from __future__ import annotations

from typing import Protocol

from epd.encoder.v1.embedding_pb2 import Locator


class TransportUnavailableError(Exception):
    """A transport cannot serve here. The message says why, and what to do."""


class TransportServer(Protocol):
    """A transport that serves one arena. It does so as long as this object and the process live."""

    @property
    def locator(self) -> Locator:
        """Where a slot is read whose header is the arena's first byte."""
        ...
