"""Tokens of a language model, from its thread to the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

_END = -1


class GenerationThread:
    """Runs one generation after another, in the order in which they were asked for, in a thread of its own."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="generation")

    def close(self) -> None:
        """Takes no more. It does not wait for the token that is being made: a device that hangs never ends it."""
        self._executor.shutdown(wait=False)

    @asynccontextmanager
    async def stream(self, begin: Callable[[], Iterator[int]]) -> AsyncIterator[AsyncIterator[list[int]]]:
        """The tokens of a generation, those together that are there together.

        Args:
            begin: begins it, in the thread. What it raises is raised in the loop.

        Leaving the context ends the generation after its current token, and waits for that.
        """
        loop = asyncio.get_running_loop()
        tokens: asyncio.Queue[int] = asyncio.Queue()  # at most the tokens that were asked for
        left = threading.Event()

        def run() -> None:
            if left.is_set():
                return
            generation = begin()
            try:
                for token in generation:
                    loop.call_soon_threadsafe(tokens.put_nowait, token)
                    if left.is_set():
                        return
            finally:
                if isinstance(generation, Generator):
                    generation.close()

        work = loop.run_in_executor(self._executor, run)
        # Behind its last token, however it ends, and also if it never begins.
        work.add_done_callback(lambda _: tokens.put_nowait(_END))
        try:
            yield _batches(tokens, work)
        finally:
            left.set()
            await asyncio.wait([work])
            with suppress(Exception):  # it was raised to whoever took the tokens; if nobody did, nobody cares
                work.result()


async def _batches(tokens: asyncio.Queue[int], work: asyncio.Future[None]) -> AsyncIterator[list[int]]:
    ended = False
    while not ended:
        batch = [await tokens.get()]
        while not tokens.empty():
            batch.append(tokens.get_nowait())
        if batch[-1] == _END:
            ended = True
            batch.pop()
        if batch:
            yield batch
    await work
