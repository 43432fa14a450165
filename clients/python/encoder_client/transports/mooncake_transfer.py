"""One read by Mooncake: transfers of its pieces, until nothing writes to its memory any more."""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from math import ceil
from threading import Lock
from time import monotonic
from typing import Any, NamedTuple

from encoder_client.checksums import RunningChecksum
from encoder_client.pool.embedding_pool import Slot
from epd.encoder.v1.embedding_pb2 import MooncakeLocator

MOST_PIECES = 2
"""Of one read that are under way: while one is summed, the other comes. More share the same wire, and end together."""

_GOES_ON, _DONE = 0, 1  # what transfer_check_status answers; less: it failed


class _Piece(NamedTuple):
    """What one of Mooncake's transfers moves: the bytes from ``begin`` to ``end``."""

    batch: int
    begin: int
    end: int


class MooncakeTransfer:
    """One read, between the event loop that waits for it and whoever makes it: the loop itself, or the thread.

    Args:
        engine: Mooncake's ``TransferEngine``.
        place: what is read.
        slot: where to.
        nbytes: so much of it.
        checksum: is given the pieces.
        loop: where it is waited for.
    """

    def __init__(
        self,
        engine: Any,
        place: MooncakeLocator,
        slot: Slot,
        nbytes: int,
        checksum: RunningChecksum,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self.place = place
        self.nbytes = nbytes
        self.answer: asyncio.Future[str] = loop.create_future()
        """What went wrong; empty: nothing. A text: the traceback of an error would hold the slot."""
        self.claim = Lock()
        """Taken once: by whoever begins it, or by the loop that gives it up before."""
        self.fault = ""
        """What went wrong first. After it no piece is begun or summed; those that are under way go on."""
        self.begun = self.youngest = 0.0
        """When it was begun, and when its youngest piece was."""
        self.hangs = False
        """It was given up while it was under way."""
        self._engine = engine
        self._slot: Slot | None = slot
        """Held until all pieces have ended, whoever still waits for them: late bytes must hit nobody else's memory."""
        self._address = slot.address
        self._checksum = checksum
        self._loop = loop
        self._flying: deque[_Piece] = deque()
        self._piece_bytes = nbytes
        self._asked = 0
        """So many of its first bytes have come or are under way."""

    @property
    def ended(self) -> bool:
        """Its memory is not written any more."""
        return self._slot is None

    @property
    def flying(self) -> int:
        """How many of its pieces are under way, and write to its memory."""
        return len(self._flying)

    def begin(self, piece_bytes: int) -> None:
        """Begins the first pieces. All but the last are equal, and at least so large if there are more than one."""
        self.begun = monotonic()
        self._piece_bytes = ceil(self.nbytes / max(self.nbytes // piece_bytes, 1))
        self._begin_pieces()

    def look(self) -> None:
        """Looks at the piece that was begun first. If it has come, the next one is begun, and this one summed.

        One piece at a time: whoever looks has other things to do. Not while nothing is under way.
        """
        state: int = self._engine.transfer_check_status(self._flying[0].batch)
        if state == _GOES_ON:
            return
        piece = self._flying.popleft()
        if state != _DONE:
            self.fault = self.fault or f"the transfer engine answered {state}: the encoder is gone or unreachable"
        self._begin_pieces()
        if not self.fault and self._slot:
            self._checksum.take(self._slot.view[piece.begin : piece.end], piece.begin)

    def _begin_pieces(self) -> None:
        while not self.fault and self._asked < self.nbytes and len(self._flying) < MOST_PIECES:
            begin, end = self._asked, min(self._asked + self._piece_bytes, self.nbytes)
            self.youngest = monotonic()
            try:
                batch: int = self._engine.batch_transfer_async_read(
                    self.place.session, [self._address + begin], [self.place.address + begin], [end - begin]
                )
            except Exception as error:  # such as of a place that no address can have
                self.fault = str(error)
                return
            if not batch:
                self.fault = "the transfer engine does not reach the encoder"
                return
            self._asked = end
            self._flying.append(_Piece(batch, begin, end))

    def give_up(self, fault: str) -> None:
        """Nobody shall wait any more, and no piece be begun. Called by the loop."""
        self.fault = self.fault or fault
        self.tell()

    def end(self) -> None:
        """Lets go, and answers whoever waits. Called by the thread."""
        self.let_go()
        with suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self.tell)

    def let_go(self) -> None:
        """Its memory is not written any more."""
        self._slot = None

    def tell(self) -> None:
        """Answers whoever waits. Called by the loop."""
        if not self.answer.done():
            self.answer.set_result(self.fault)
