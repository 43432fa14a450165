"""One read by Mooncake, from its begin until its memory is not written any more."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from threading import Lock

from encoder_client.pool.embedding_pool import Slot
from epd.encoder.v1.embedding_pb2 import MooncakeLocator


class MooncakeTransfer:
    """One read, between the event loop that waits for it and the thread that makes it.

    Args:
        place: what is read.
        slot: where to.
        nbytes: so much of it.
        loop: where it is waited for.
    """

    def __init__(self, place: MooncakeLocator, slot: Slot, nbytes: int, loop: asyncio.AbstractEventLoop) -> None:
        self.place = place
        self.slot: Slot | None = slot
        """Held until the transfer has ended, whoever still waits for it: late bytes must hit nobody else's memory."""
        self.address = slot.address
        self.nbytes = nbytes
        self.loop = loop
        self.answer: asyncio.Future[str] = loop.create_future()
        """What went wrong; empty: nothing. A text: the traceback of an error would hold the slot."""
        self.claim = Lock()
        """Taken once: by whoever begins it, or by the loop that gives it up before."""
        self.begun = 0.0
        self.batch = 0
        self.hangs = False
        """It was given up while it was under way."""
        self.ended = False

    def end(self, fault: str) -> None:
        """Its memory is not written any more. Called by the thread."""
        self.let_go()
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self.loop.call_soon_threadsafe(self.tell, fault)

    def let_go(self) -> None:
        """Its memory is not written any more."""
        self.slot = None
        self.ended = True

    def tell(self, fault: str) -> None:
        """Answers whoever waits. Called by the loop."""
        if not self.answer.done():
            self.answer.set_result(fault)
