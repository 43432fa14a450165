"""The table of live requests and prompts: who waits for which part, and that each part ends once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.commands import EncodeCommand
from encoder_svc.runtime.events import Accepted, ChunkEvent, Completed, Event, PartCancelled, PartFailed
from encoder_svc.runtime.parts import Part, PartState
from encoder_svc.runtime.timers import Timer
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, EncoderRef

Sink = Callable[[Event], None]


@dataclass(eq=False)
class Prompt:
    """What one language-model request contains, as far as this server sees it. It lives while a request of it does."""

    identity: str
    id: str
    order: int
    """Prompts that came earlier have smaller numbers; space is granted in this order."""
    num_parts: int
    requests: dict[str, Request] = field(default_factory=dict, repr=False)
    live_parts: set[int] = field(default_factory=set, repr=False)
    part_bytes: dict[int, int] = field(default_factory=dict, repr=False)
    """What it is charged for the embedding of each ``part_idx`` that was measured or cached and has not failed."""
    slot_bytes: int = 0
    """What it is charged for all of them."""


@dataclass(eq=False)
class Request:
    """One ``Encode`` call."""

    command: EncodeCommand = field(repr=False)
    prompt: Prompt
    sink: Sink | None = field(repr=False)
    """Where events go. None: the caller is gone."""
    admitted_at: float
    parts: list[Part] = field(default_factory=list)
    open_parts: int = 0
    ends: Counter[PartState] = field(default_factory=Counter)
    from_cache: int = 0
    deadline: Timer | None = None

    @property
    def priority(self) -> int:
        """Larger goes first."""
        return self.command.priority

    def tell(self, event: Event) -> None:
        """Tells the caller, if there still is one."""
        if self.sink is not None:
            self.sink(event)


class RequestTable:
    """All live requests.

    Args:
        on_end: called when a part has had its end and its caller was told, with the state before and the time.
    """

    def __init__(self, on_end: Callable[[Part, PartState, float], None]) -> None:
        self._on_end = on_end
        self._requests: dict[tuple[str, str], Request] = {}
        self._prompts: dict[tuple[str, str], Prompt] = {}
        self._order = count()
        self._keys = count(1)
        self._parts: dict[int, Part] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def live(self) -> list[Request]:
        """All requests that have not completed."""
        return list(self._requests.values())

    def live_parts(self) -> Counter[str]:
        """How many parts are in each live state."""
        return Counter(part.state.value for part in self._parts.values())

    def part(self, key: int) -> Part | None:
        """The live part with this number."""
        return self._parts.get(key)

    def request(self, identity: str, request_id: str) -> Request | None:
        """The live request of this caller."""
        return self._requests.get((identity, request_id))

    def prompt(self, identity: str, prompt_id: str) -> Prompt | None:
        """The live prompt of this caller."""
        return self._prompts.get((identity, prompt_id))

    def admit(
        self, command: EncodeCommand, sink: Sink, encoder: EncoderRef, patches: Sequence[int], now: float
    ) -> Request:
        """Enters a request, tells ``Accepted``, and makes its parts.

        Args:
            command: what is asked.
            sink: where its events go.
            encoder: this server.
            patches: what admission was charged for each item's forward.
            now: the time.

        Raises:
            ServiceError: an id or a part is live already, or the prompt has another number of parts.
        """
        request_key = (command.identity, command.request_id)
        if request_key in self._requests:
            raise ServiceError(
                Reason.REQUEST_ID_LIVE,
                "a request with this request_id has not ended; wait for it, cancel it, or choose another id",
                field="request_id",
            )
        prompt_key = (command.identity, command.prompt_id)
        prompt = self._prompts.get(prompt_key)
        if prompt is None:
            prompt = Prompt(command.identity, command.prompt_id, next(self._order), command.num_parts)
        elif prompt.num_parts != command.num_parts:
            raise ServiceError(
                Reason.PART_ALREADY_SUBMITTED,
                f"another live request of this prompt says num_parts {prompt.num_parts}, this one {command.num_parts}",
                field="num_parts",
            )
        for index, item in enumerate(command.items):
            if item.item.part_idx in prompt.live_parts:
                raise ServiceError(
                    Reason.PART_ALREADY_SUBMITTED,
                    f"another live request of this prompt holds part {item.item.part_idx}",
                    field=f"items[{index}].part_idx",
                )
        request = Request(command, prompt, sink, now)
        self._prompts[prompt_key] = prompt
        self._requests[request_key] = request
        prompt.requests[command.request_id] = request
        for item, charge in zip(command.items, patches, strict=True):
            part = Part(next(self._keys), request, item.item, item.media_bytes, charge, now)
            request.parts.append(part)
            prompt.live_parts.add(item.item.part_idx)
            self._parts[part.key] = part
        request.open_parts = len(request.parts)
        request.tell(Accepted(command.request_id, command.prompt_id, command.num_parts, encoder))
        return request

    def end_ready(self, part: Part, chunk: EmbeddingChunk, now: float) -> None:
        """The part's embedding is there."""
        part.request.from_cache += chunk.from_cache
        self._end(part, PartState.READY, ChunkEvent(chunk), now)

    def end_failed(self, part: Part, error: ServiceError, now: float) -> PartFailed:
        """The part failed. Returns what its caller was told."""
        command = part.request.command
        event = PartFailed(command.prompt_id, command.request_id, part.item.part_idx, error)
        self._end(part, PartState.FAILED, event, now)
        return event

    def end_cancelled(self, part: Part, now: float) -> PartCancelled:
        """The part was cancelled. Returns what its caller was told."""
        command = part.request.command
        event = PartCancelled(command.prompt_id, command.request_id, part.item.part_idx)
        self._end(part, PartState.CANCELLED, event, now)
        return event

    def _end(self, part: Part, state: PartState, event: Event, now: float) -> None:
        previous = part.state
        part.finish(state)
        request = part.request
        request.ends[state] += 1
        request.open_parts -= 1
        request.prompt.live_parts.discard(part.item.part_idx)
        del self._parts[part.key]
        request.tell(event)
        self._on_end(part, previous, now)
        if request.open_parts == 0:
            self._complete(request, now)

    def _complete(self, request: Request, now: float) -> None:
        command, prompt = request.command, request.prompt
        if request.deadline is not None:
            request.deadline.cancel()
        del self._requests[command.identity, command.request_id]
        del prompt.requests[command.request_id]
        if not prompt.requests:
            del self._prompts[prompt.identity, prompt.id]
        request.tell(
            Completed(
                ready=request.ends[PartState.READY],
                failed=request.ends[PartState.FAILED],
                cancelled=request.ends[PartState.CANCELLED],
                from_cache=request.from_cache,
                total_seconds=now - request.admitted_at,
            )
        )
        request.sink = None
