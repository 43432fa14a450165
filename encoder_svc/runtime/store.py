"""Embeddings by content: those that are cached, and those in the making.

A computation belongs to the store, not to the caller who asked first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from encoder_svc.runtime.computations import Computation
from encoder_svc.runtime.requests import Request
from encoder_svc.runtime.slots import ContentName, Slot, SlotTable
from epd.encoder.v1.media_pb2 import MediaItem


class Store:
    """What can be had without computing it again.

    Args:
        tables: the slot tables of all engines.
    """

    def __init__(self, tables: Sequence[SlotTable]) -> None:
        self._tables = tables
        self._keys = count(1)
        self._live: dict[int, Computation] = {}
        self._by_name: dict[ContentName, Computation] = {}

    def __len__(self) -> int:
        return len(self._live)

    def cached(self, name: ContentName) -> Slot | None:
        """A FILLED slot with this content, in any arena."""
        return next((slot for table in self._tables if (slot := table.find(name)) is not None), None)

    def in_the_making(self, name: ContentName) -> Computation | None:
        """The computation that will make this content."""
        return self._by_name.get(name)

    def begin(
        self, item: MediaItem, files: tuple[bytes, ...], name: ContentName | None, request: Request, now: float
    ) -> Computation:
        """Begins a computation. The next parts with the same name join this one."""
        command = request.command
        computation = Computation(
            next(self._keys), item, files, name, request.prompt, command.priority, now, command.engine
        )
        self._live[computation.key] = computation
        if name is not None:
            older = self._by_name.get(name)
            if older is not None:
                # The newer one is to replace it, whichever of them ends first: the older one keeps nothing.
                older.name = None
            self._by_name[name] = computation
        return computation

    def end(self, computation: Computation) -> None:
        """A computation is over, whatever came of it."""
        computation.ended = True
        computation.files = ()
        del self._live[computation.key]
        name = computation.name
        if name is not None and self._by_name.get(name) is computation:
            del self._by_name[name]

    def replace(self, name: ContentName) -> None:
        """Caches a content no more in any arena: a newer embedding of it was made."""
        for table in self._tables:
            slot = table.find(name)
            if slot is not None:
                table.forget(slot)
