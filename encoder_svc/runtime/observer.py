"""Who counts what happens, where it happens."""

from __future__ import annotations

from typing import Protocol

from encoder_svc.errors import Reason
from encoder_svc.runtime.parts import PartState


class Observer(Protocol):
    """The metrics, as the runtime sees them. Calls must return at once."""

    def request_admitted(self) -> None:
        """A request came in."""
        ...

    def request_refused(self, reason: Reason) -> None:
        """A request was refused as a whole."""
        ...

    def part_ended(self, end: PartState, reason: Reason | None, seconds: float) -> None:
        """A part had its end, ``seconds`` after its admission."""
        ...

    def stage_took(self, stage: str, seconds: float) -> None:
        """An item has passed a stage: fetch, queue, prepare, batch_wait."""
        ...

    def batch_ran(self, items: int, patches: int, forward_seconds: float, stage_seconds: float) -> None:
        """A batch came back from an engine."""
        ...

    def cache_looked_up(self, result: str) -> None:
        """A part's content was looked for: hit, joined (it was in the making), or miss."""
        ...
