"""A prompt that was given to a :class:`~encoder_client.threads.sync_client.SyncEncoderClient`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from weakref import ref

from encoder_client.embedding import Embedding
from encoder_client.errors import PartError


class Submission:
    """A prompt under way: a future for each part, and a way to cancel it.

    A future ends with the part's embedding, or raises :class:`PartError`. Its callbacks run in the client's thread:
    they must be short. A future that is cancelled gives its part up; when all are, the prompt is cancelled.

    Args:
        prompt_id: the prompt's id, given or made.
        parts: the ``part_idx`` of the items.
        cancel: cancels the prompt.
    """

    def __init__(self, prompt_id: str, parts: Mapping[int, object], cancel: Callable[[], None]) -> None:
        self.prompt_id = prompt_id
        self.futures: dict[int, Future[Embedding]] = {part_idx: Future() for part_idx in parts}
        """By ``part_idx``."""
        self.open = set(parts)
        """The parts that have no end yet. The client's thread alone looks at it."""
        self._cancel = cancel
        for future in self.futures.values():
            # Not the submission itself: what a future holds would live until the garbage collector finds the circle.
            future.add_done_callback(partial(_look, ref(self)))

    def done(self) -> bool:
        """Every part has ended."""
        return all(future.done() for future in self.futures.values())

    def cancel(self) -> None:
        """Cancels the parts that are not READY. Does not wait; parts that have ended stay as they are."""
        self._cancel()

    def deliver(self, part_idx: int, result: Embedding | PartError) -> None:
        """Ends a part. Called by the client."""
        self.open.discard(part_idx)
        future = self.futures[part_idx]
        if not future.done() and future.set_running_or_notify_cancel():
            if isinstance(result, PartError):
                future.set_exception(result)
            else:
                future.set_result(result)


def _look(submission: ref[Submission], future: Future[Embedding]) -> None:
    alive = submission() if future.cancelled() else None
    if alive is not None and all(other.cancelled() for other in alive.futures.values()):
        alive.cancel()
