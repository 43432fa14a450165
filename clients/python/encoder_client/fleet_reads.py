"""Reads the embeddings of a prompt at a fleet, as they get READY."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from encoder_client.client import EncoderClient
from encoder_client.embedding import Embedding
from encoder_client.errors import PartError, ReadError
from encoder_client.events import Layout
from encoder_client.pool import Reservation, Slot

if TYPE_CHECKING:
    from encoder_client.fleet_call import FleetCall

GIVE_BACK_SECONDS = 0.1
"""A prompt that waits longer for space in the pool gives back the leases that it cannot use yet: whoever has space must
find it at the encoders."""

Result = Layout | Embedding | PartError


class FleetReads:
    """What becomes of the parts of one call, read into the pool.

    Args:
        call: the call.
        client: reads, and has the pool.
    """

    def __init__(self, call: FleetCall, client: EncoderClient) -> None:
        self._call = call
        self._client = client
        self._results: asyncio.Queue[Result | None] = asyncio.Queue()
        self._reads: dict[int, asyncio.Task[None]] = {}
        self._told: set[tuple[str, int]] = set()
        self._given_back: set[int] = set()

    async def results(self) -> AsyncGenerator[Result, None]:
        """See :meth:`FleetCall.results`."""
        driver = asyncio.create_task(self._drive())
        try:
            while (result := await self._results.get()) is not None:
                yield result
                del result  # it is the caller's
            await driver
        finally:
            for task in (driver, *self._reads.values()):
                task.cancel()
            await asyncio.gather(driver, *self._reads.values(), return_exceptions=True)
            unread = set(self._call.chunks) - set(self._reads) - self._given_back
            await self._call.give_back(sorted(unread))

    async def _drive(self) -> None:
        reservation: Reservation | None = None
        try:
            while True:
                self._tell()
                wanted = [part_idx for part_idx in self._call.parts if part_idx not in self._call.failures]
                if reservation is None and (sizes := self._sizes(wanted)):
                    places = {part_idx: place for place, part_idx in enumerate(wanted)}
                    reservation = await self._reserve(sizes)
                if reservation is not None:
                    for part_idx, chunk in self._call.chunks.items():
                        if part_idx not in self._reads and part_idx in places:
                            self._begin(part_idx, reservation.take(places[part_idx], chunk.nbytes))
                if await anext(aiter(self._call), None) is None:
                    break
            await asyncio.gather(*self._reads.values())
        finally:
            if reservation is not None:
                reservation.close()
            self._results.put_nowait(None)

    def _begin(self, part_idx: int, slot: Slot) -> None:
        self._reads[part_idx] = asyncio.create_task(self._read(part_idx, slot))

    def _tell(self) -> None:
        for part_idx, chunk in self._call.layouts.items():
            self._tell_once("layout", part_idx, Layout(chunk))
        for part_idx, failure in self._call.failures.items():
            self._tell_once("failure", part_idx, failure)

    def _tell_once(self, kind: str, part_idx: int, result: Result) -> None:
        if (kind, part_idx) not in self._told:
            self._told.add((kind, part_idx))
            self._results.put_nowait(result)

    def _sizes(self, wanted: list[int]) -> list[int]:
        known = {**self._call.layouts, **self._call.chunks}
        return [known[part_idx].nbytes for part_idx in wanted] if set(wanted) <= set(known) else []

    async def _reserve(self, sizes: list[int]) -> Reservation:
        pool, timeout = self._client.pool, self._client.read_timeout
        wish = asyncio.create_task(pool.reserve(self._call.prompt_id, sizes, timeout))
        try:
            while not (await asyncio.wait({wish}, timeout=GIVE_BACK_SECONDS))[0]:
                fresh = sorted(set(self._call.chunks) - self._given_back)
                self._given_back.update(fresh)
                await self._call.give_back(fresh)
        finally:
            if not wish.done():
                wish.cancel()
        return wish.result()

    async def _read(self, part_idx: int, slot: Slot) -> None:
        lost = ""
        try:
            chunk = self._call.chunks[part_idx]
            if part_idx in self._given_back:
                chunk = await self._call.again(part_idx)
            try:
                embedding = await self._client.read_into(chunk, slot)
            except ReadError as error:
                lost = str(error)
            # A transfer that hangs may still write to it.
            del slot
            if lost:
                embedding = await self._call.read(await self._call.again(part_idx, lost))
        except PartError as failure:
            self._results.put_nowait(failure)
        else:
            self._results.put_nowait(embedding)
