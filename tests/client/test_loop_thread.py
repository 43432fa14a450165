"""An event loop in a thread: what it was given ends, whenever that was."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from threading import Event, Thread

from encoder_client.threads.loop_thread import LoopThread
from tests.server_process import START_SECONDS


class SlowCaller(LoopThread):
    """A caller of it is held behind the look that says that it is open, until it is about to be closed."""

    def __init__(self) -> None:
        super().__init__("slow")
        self.looked, self.cancelled = Event(), Event()
        self.hold = False

    def check(self) -> None:
        super().check()
        if self.hold:
            self.looked.set()
            # It comes at once unless the close waits for this caller, as it should.
            self.cancelled.wait(0.5)


def test_what_is_begun_while_another_thread_closes_ends() -> None:
    slow = SlowCaller()
    ended: Future[None] = Future()

    async def keeper() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            slow.cancelled.set()
            await asyncio.to_thread(caller.join)

    async def for_ever() -> None:
        await asyncio.Event().wait()

    def begin() -> None:
        asyncio.ensure_future(for_ever()).add_done_callback(lambda _: ended.set_result(None))

    caller = Thread(target=slow.soon, args=(begin,))
    slow.run(keeper())
    slow.hold = True
    caller.start()
    slow.looked.wait()
    slow.close(START_SECONDS)
    caller.join()
    ended.result(START_SECONDS)
