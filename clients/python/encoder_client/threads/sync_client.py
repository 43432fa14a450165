"""Encoders for programs that have threads and may not wait: an engine's scheduler loop, for one."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, suppress
from functools import partial
from time import monotonic
from types import TracebackType
from typing import Self

import grpc

from encoder_client.client_settings import ClientSettings
from encoder_client.embedding import Embedding
from encoder_client.errors import EncoderClientError, EncoderError, HandleError, PartError, PoolError
from encoder_client.events import Layout
from encoder_client.fleet.encoder_fleet import EncoderFleet
from encoder_client.fleet.fleet_call import FleetCall
from encoder_client.media import placed_items
from encoder_client.pool.embedding_handle import EmbeddingHandle
from encoder_client.pool.embedding_pool import EmbeddingPool
from encoder_client.pool.pool_ledger import PoolStatistics
from encoder_client.pool.pool_sharing import PoolSharing
from encoder_client.threads.loop_thread import LoopThread
from encoder_client.threads.submission import Submission
from epd.encoder.v1.encoder_service_pb2 import CachePolicy
from epd.encoder.v1.media_pb2 import MediaItem

logger = logging.getLogger("encoder_client")

Outcome = Layout | Embedding | PartError
"""What :meth:`SyncEncoderClient.poll` tells; ``chunk.prompt_id`` and ``chunk.part_idx``, or those of the error, say of
which part."""

CLOSE_SECONDS = 10.0
"""That :meth:`SyncEncoderClient.close` waits at most: leases are given back."""
START_SECONDS = 10.0


class SyncEncoderClient:
    """A client of one or several encoders whose methods do not wait for them.

    A thread of its own runs an :class:`EncoderFleet`, of one member if there is one target. All methods can be called
    from any thread; embeddings and their views may be used and dropped in any thread.

    Args:
        targets: as for :class:`EncoderFleet`.
        settings: as for :class:`EncoderFleet`.
        pool: where embeddings are read to. None: a pool of 256 MiB. It must be nobody else's.
        most_parts: parts that may be under way or wait for :meth:`poll`. More are refused.
        max_holds: embeddings that other processes of the host may have open at once, by :meth:`share`. 0: the pool is
            not shared.

    Example:
        >>> with SyncEncoderClient(["encoder-0:50051", "encoder-1:50051"]) as client:
        ...     client.submit([image(photo)], prompt_id="p7", timeout=5.0)
        ...     while scheduler.step():
        ...         for outcome in client.poll():
        ...             match outcome:
        ...                 case Layout(chunk): ...
        ...                 case Embedding(): ...
        ...                 case PartError(): ...
    """

    def __init__(
        self,
        targets: Sequence[str],
        settings: ClientSettings | None = None,
        *,
        pool: EmbeddingPool | None = None,
        most_parts: int = 4096,
        max_holds: int = 0,
    ) -> None:
        self._thread = LoopThread("encoder-client")
        self._prompts = _Prompts(most_parts, max_holds)
        self._thread.run(self._prompts.open(partial(EncoderFleet, targets, settings, pool=pool))).result(START_SECONDS)

    def submit(
        self,
        items: Sequence[MediaItem],
        *,
        prompt_id: str = "",
        num_parts: int = 0,
        timeout: float | None = None,
        part_timeouts: Mapping[int, float] | None = None,
        priority: int = 0,
        cache_policy: CachePolicy = CachePolicy.CACHE_POLICY_UNSPECIFIED,
        cache_salt: bytes = b"",
        holders: Mapping[int, str] | None = None,
        polled: bool = True,
    ) -> Submission:
        """Begins to encode some or all items of one prompt, and to read the embeddings.

        Args:
            items: as in :meth:`EncoderFleet.encode`, like all that follow but the last.
            prompt_id: groups the parts of the prompt. Empty: one is made.
            num_parts: the items of the whole prompt. 0: as many as ``items``.
            timeout: the deadline of all parts, in seconds from now.
            part_timeouts: earlier deadlines of single parts, by ``part_idx``.
            priority: larger goes first.
            cache_policy: how the encoders' caches are used.
            cache_salt: separates cache entries.
            holders: instance ids of encoders that have the contents of parts, by ``part_idx``.
            polled: :meth:`poll` tells what happens. False: only the futures do.

        Raises:
            ValueError: items and places do not fit together.
            EncoderError: RESOURCE_EXHAUSTED: ``most_parts`` would be exceeded. Poll, or submit later.
            RuntimeError: the client is closed, or another process's.
        """
        self._thread.check()
        placed = placed_items(items, num_parts)
        self._prompts.admit(len(placed))
        prompt_id = prompt_id or secrets.token_hex(16)
        begun = monotonic()

        def call(fleet: EncoderFleet) -> FleetCall:
            waited = monotonic() - begun
            return fleet.encode(
                list(placed.values()),
                prompt_id=prompt_id,
                num_parts=num_parts,
                timeout=None if timeout is None else timeout - waited,
                part_timeouts={part_idx: seconds - waited for part_idx, seconds in (part_timeouts or {}).items()},
                priority=priority,
                cache_policy=cache_policy,
                cache_salt=cache_salt,
                holders=holders,
            )

        key = object()
        submission = Submission(prompt_id, placed, partial(self._prompts.cancel, key))
        self._thread.soon(self._prompts.begin, key, submission, call, polled)
        return submission

    def poll(self, limit: int | None = None) -> list[Outcome]:
        """What has happened since the last time: layouts, embeddings, failures. Never waits.

        Args:
            limit: so many at most. None: all.
        """
        return self._prompts.take(limit)

    def share(self, embedding: Embedding) -> EmbeddingHandle:
        """Makes a handle by which another process of the host opens an embedding, without a copy. Never waits.

        Args:
            embedding: of this client. The handle alone does not keep it.

        Raises:
            HandleError: the client was made with ``max_holds=0``, or the embedding lies elsewhere.
            ValueError: the embedding was released.
        """
        if self._prompts.sharing is None:
            raise HandleError("this client does not share its pool; make it with max_holds")
        return self._prompts.sharing.share(embedding)

    def pool_statistics(self, timeout: float = 1.0) -> PoolStatistics:
        """What the pool holds. It asks the thread, so it may wait: it is not for a scheduler's loop."""
        return self._thread.run(self._prompts.pool_statistics()).result(timeout)

    def close(self) -> None:
        """Cancels all prompts (their futures end), gives leases back, and ends the thread. Idempotent."""
        self._thread.close(CLOSE_SECONDS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Prompts:
    """The prompts of one client. All but ``admit`` and ``take`` runs in its thread."""

    def __init__(self, most_parts: int, max_holds: int) -> None:
        self.sharing: PoolSharing | None = None
        self._most_parts = most_parts
        self._max_holds = max_holds
        self._parts = 0
        self._lock = threading.Lock()
        self._outcomes: deque[Outcome] = deque()
        self._tasks: dict[object, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._fleet: EncoderFleet | None = None
        self._opened: asyncio.Future[None] | None = None
        self._keeper: asyncio.Task[None] | None = None

    def admit(self, count: int) -> None:
        with self._lock:
            if self._parts + count > self._most_parts:
                raise EncoderError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"{self._parts} parts are under way or wait for poll(), and {self._most_parts} may; poll, wait, or "
                    "give the client a larger most_parts",
                )
            self._parts += count

    def take(self, limit: int | None) -> list[Outcome]:
        found: list[Outcome] = []
        while self._outcomes and (limit is None or len(found) < limit):
            try:
                found.append(self._outcomes.popleft())
            except IndexError:  # another thread was faster
                break
        self._dismiss(sum(not isinstance(outcome, Layout) for outcome in found))
        return found

    async def open(self, make: Callable[[], EncoderFleet]) -> None:
        self._loop = asyncio.get_running_loop()
        self._fleet = make()
        sharing = PoolSharing(self._fleet.pool, max_holds=self._max_holds) if self._max_holds else None
        self._opened = self._loop.create_future()
        self._keeper = self._loop.create_task(self._keep(self._fleet, sharing, self._opened))
        await self._opened

    async def _keep(self, fleet: EncoderFleet, sharing: PoolSharing | None, opened: asyncio.Future[None]) -> None:
        """Holds the fleet open until the thread ends, and longer than every prompt."""
        async with AsyncExitStack() as stack:
            try:
                await stack.enter_async_context(fleet)
                if sharing is not None:
                    self.sharing = await stack.enter_async_context(sharing)
            except Exception as error:  # whoever made the client learns it
                opened.set_exception(error)
                return
            opened.set_result(None)
            try:
                await asyncio.Event().wait()
            finally:
                for task in self._tasks.values():
                    task.cancel()
                await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def begin(
        self, key: object, submission: Submission, call: Callable[[EncoderFleet], FleetCall], polled: bool
    ) -> None:
        assert self._loop is not None
        assert self._fleet is not None
        task = self._loop.create_task(self._run(submission, call, self._fleet, polled))
        self._tasks[key] = task
        task.add_done_callback(partial(self._ended, key, submission, polled))

    def cancel(self, key: object) -> None:
        """Can be called from any thread."""
        assert self._loop is not None
        with suppress(RuntimeError):  # the thread has ended, and all futures with it
            self._loop.call_soon_threadsafe(self._cancel, key)

    async def pool_statistics(self) -> PoolStatistics:
        assert self._fleet is not None
        return self._fleet.pool.statistics

    def _cancel(self, key: object) -> None:
        if (task := self._tasks.get(key)) is not None:
            task.cancel()

    async def _run(
        self, submission: Submission, make: Callable[[EncoderFleet], FleetCall], fleet: EncoderFleet, polled: bool
    ) -> None:
        async with make(fleet) as call, aclosing(call.results()) as results:
            async for result in results:
                match result:
                    case Layout() if polled:
                        self._outcomes.append(result)
                    case Embedding():
                        self._tell(submission, result.chunk.part_idx, result, polled)
                    case PartError():
                        self._tell(submission, result.part_idx, result, polled)
                del result  # it is the caller's now

    def _ended(self, key: object, submission: Submission, polled: bool, task: asyncio.Task[None]) -> None:
        """Whatever a prompt's end was: each of its parts has one."""
        del self._tasks[key]
        if not submission.open:
            return
        error = _why(task)
        for part_idx in sorted(submission.open):
            self._tell(submission, part_idx, PartError(submission.prompt_id, part_idx, error), polled)

    def _tell(self, submission: Submission, part_idx: int, result: Embedding | PartError, polled: bool) -> None:
        if polled and not submission.futures[part_idx].cancelled():
            self._outcomes.append(result)
        else:
            self._dismiss(1)
        submission.deliver(part_idx, result)

    def _dismiss(self, count: int) -> None:
        with self._lock:
            self._parts -= count


def _why(task: asyncio.Task[None]) -> EncoderError:
    if task.cancelled():
        return EncoderError(grpc.StatusCode.CANCELLED, "the prompt was cancelled, or the client closed")
    match task.exception():
        case EncoderError() as error:
            return error
        case PoolError() as error:
            return EncoderError(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        case EncoderClientError() as error:
            return EncoderError(grpc.StatusCode.UNAVAILABLE, str(error))
        case error:
            logger.error("a prompt failed here", exc_info=error)
            return EncoderError(grpc.StatusCode.INTERNAL, f"the prompt failed in the client: {error!r}")
