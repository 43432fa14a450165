"""Tokens, one by one, from a generation in another thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import torch
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer


def stream(generate: Callable[..., Any]) -> Iterator[int]:
    """Runs a generation and yields its tokens as they come.

    Args:
        generate: takes ``streamer`` and ``stopping_criteria`` as ``transformers.GenerationMixin.generate`` does.

    Closing the iterator ends the generation after its current token. What ``generate`` raises is raised here.
    """
    tokens = _TokenQueue()
    left = Event()

    def run() -> None:
        try:
            generate(streamer=tokens, stopping_criteria=StoppingCriteriaList([_WhenSet(left)]))
        except BaseException as error:  # it belongs to whoever iterates
            tokens.queue.put(error)
        else:
            tokens.queue.put(None)

    thread = Thread(target=run, name="generation")
    thread.start()
    try:
        while (token := tokens.queue.get()) is not None:
            if isinstance(token, BaseException):
                raise token
            yield token
    finally:
        left.set()
        thread.join()


class _TokenQueue(BaseStreamer):
    """Hands tokens on to another thread."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[int | BaseException | None] = SimpleQueue()
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:
        if self._prompt:  # the first call brings the prompt
            self._prompt = False
            return
        for token in value.flatten().tolist():
            self.queue.put(token)

    def end(self) -> None:
        """The end is told by the thread, which also knows errors."""


class _WhenSet(StoppingCriteria):
    """Stops when an event is set."""

    def __init__(self, event: Event) -> None:
        self._event = event

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), self._event.is_set(), device=input_ids.device)
