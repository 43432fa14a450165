"""The events of one request between the runtime that makes them and the call that writes them."""

from __future__ import annotations

import asyncio

from encoder_svc.runtime.events import Completed, Event


class Outbox:
    """Events in order. It holds at most three for each part of its request, so the request's limits bound it.

    Belongs to the event loop's thread.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._filled = asyncio.Event()

    def put(self, event: Event) -> None:
        """Adds an event. It is the runtime's sink."""
        self._events.append(event)
        self._filled.set()

    async def take(self) -> tuple[list[Event], bool]:
        """Waits for events.

        Returns:
            All that are there, at least one; and whether the last of them ends the request.
        """
        await self._filled.wait()
        self._filled.clear()
        events = self.rest()
        return events, isinstance(events[-1], Completed)

    def rest(self) -> list[Event]:
        """All that are there, perhaps none: what nobody has been told of when the call has ended."""
        events, self._events = self._events, []
        return events
