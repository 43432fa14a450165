"""What has arrived of prompts, from several encoders, before or after somebody asks for an answer. No I/O."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field

import grpc

from encoder_client.client import EncoderClient
from encoder_client.errors import EncoderError
from encoder_client.events import Layout, LeaseRevoked, PartCancelled, PartFailed, Ready, SubscriptionEvent, Synced
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk

CLOSED_PROMPTS = 4096
"""Prompts whose end is remembered: what still arrives of them is given back at once."""


@dataclass(frozen=True)
class Arrival:
    """A part that can be read."""

    client: EncoderClient
    """By which."""
    chunk: EmbeddingChunk = field(repr=False)
    """READY. It holds secrets."""


@dataclass(eq=False)
class PromptParts:
    """The newest of each part of a prompt."""

    id: str
    layouts: dict[int, EmbeddingChunk] = field(default_factory=dict, repr=False)
    """By ``part_idx``; of a part that was sent twice, the first."""
    ready: dict[int, Arrival] = field(default_factory=dict, repr=False)
    """Those that nobody has begun to read."""
    faults: dict[int, EncoderError] = field(default_factory=dict)
    """Why a part will not come from where it was sent. Whoever heeds it takes it out."""
    changed: asyncio.Event = field(default_factory=asyncio.Event, repr=False)


class Inbox:
    """The prompts of one worker.

    Args:
        max_prompts: prompts that are being answered, and as many again that nobody has asked for yet. Of the latter the
            oldest gives way.
    """

    def __init__(self, max_prompts: int) -> None:
        self._max_prompts = max_prompts
        self._asked: dict[str, PromptParts] = {}
        self._early: OrderedDict[str, PromptParts] = OrderedDict()
        self._closed: OrderedDict[str, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._asked)

    @property
    def full(self) -> bool:
        """No further prompt may be opened."""
        return len(self._asked) >= self._max_prompts

    def is_open(self, prompt_id: str) -> bool:
        """The prompt is being answered."""
        return prompt_id in self._asked

    def open(self, prompt_id: str) -> PromptParts:
        """Somebody asks for the answer of a prompt, which is not open."""
        parts = self._early.pop(prompt_id, None) or PromptParts(prompt_id)
        self._closed.pop(prompt_id, None)
        self._asked[prompt_id] = parts
        return parts

    def close(self, parts: PromptParts) -> list[Arrival]:
        """The answer is over. Returns what nobody will read."""
        del self._asked[parts.id]
        self._closed[parts.id] = None
        if len(self._closed) > CLOSED_PROMPTS:
            self._closed.popitem(last=False)
        return list(parts.ready.values())

    def take(self, client: EncoderClient, event: SubscriptionEvent) -> list[Arrival]:
        """Something arrived. Returns what nobody will read."""
        if isinstance(event, Synced):
            return []
        prompt_id = event.chunk.prompt_id if isinstance(event, Layout | Ready) else event.prompt_id
        if prompt_id in self._closed:
            return [Arrival(client, event.chunk)] if isinstance(event, Ready) else []
        parts, unread = self._find(prompt_id)
        match event:
            case Layout(chunk):
                parts.layouts.setdefault(chunk.part_idx, chunk)
            case Ready(chunk):
                if (first := parts.ready.pop(chunk.part_idx, None)) is not None:
                    unread.append(first)
                parts.ready[chunk.part_idx] = Arrival(client, chunk)
                parts.faults.pop(chunk.part_idx, None)
            case PartFailed() | LeaseRevoked():
                self._lose(parts, event.request_id, event.part_idx, event.error)
            case PartCancelled():
                cancelled = EncoderError(grpc.StatusCode.CANCELLED, "the part was cancelled")
                self._lose(parts, event.request_id, event.part_idx, cancelled)
        parts.changed.set()
        return unread

    def _find(self, prompt_id: str) -> tuple[PromptParts, list[Arrival]]:
        """The prompt; and what nobody will read of one that gives way to it."""
        parts = self._asked.get(prompt_id) or self._early.get(prompt_id)
        if parts is not None:
            return parts, []
        parts = self._early[prompt_id] = PromptParts(prompt_id)
        if len(self._early) <= self._max_prompts:
            return parts, []
        _, oldest = self._early.popitem(last=False)
        return parts, list(oldest.ready.values())

    def _lose(self, parts: PromptParts, request_id: str, part_idx: int, error: EncoderError) -> None:
        arrival = parts.ready.get(part_idx)
        if arrival is not None and arrival.chunk.request_id != request_id:
            return  # it was sent again meanwhile, and is here
        parts.ready.pop(part_idx, None)
        parts.faults[part_idx] = error
