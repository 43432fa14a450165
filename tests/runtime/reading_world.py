"""Encoders that are real schedulers, and readers whose pools are the client library's real books, without processes.

A reader reserves for its whole prompt, all or nothing, as soon as it knows all sizes; it reads what is READY, gives the
lease back, and gives its own space back when it has the whole prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random

from encoder_client.pool.pool_ledger import PoolLedger, Ticket, TicketState
from encoder_svc.errors import ServiceError
from encoder_svc.runtime.commands import AcquireCommand, CancelCommand
from encoder_svc.runtime.events import ChunkEvent, Event, PartCancelled, PartFailed
from encoder_svc.runtime.leases import LeaseState
from encoder_svc.runtime.slots import footprint
from epd.encoder.v1.embedding_pb2 import ChunkState, EmbeddingChunk
from epd.encoder.v1.encoder_service_pb2 import CachePolicy, ReadOutcome
from tests.runtime.recording_hands import Brain, Caller, digest_of, encode_command

ENCODERS = 2
ARENA, INPUT, POOL = 2048, 1024, 1024
SIZES = [(64, 64), (192, 256), (448, 512), (960, 960)]
"""Bytes of the embedding and of the input."""
SECONDS = 20.0
ENDLESS = 1e9


@dataclass(eq=False)
class PromptOfReader:
    """One prompt, as its reader sees it."""

    name: str
    parts: list[tuple[int, int]]
    """For each: its encoder, and which of SIZES it has."""
    first_content: int | None = None
    """The content of its first part; those of the others follow. None: they bypass the caches."""
    callers: list[Caller] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    failed: dict[int, ServiceError] = field(default_factory=dict)
    ready: dict[int, EmbeddingChunk] = field(default_factory=dict)
    """Parts that are leased and not read."""
    given_back: dict[int, EmbeddingChunk] = field(default_factory=dict)
    """Parts whose leases went back unread."""
    read: set[int] = field(default_factory=set)
    cancelled: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    """Parts whose lease ran out before they were read."""
    ticket: Ticket | None = None

    @property
    def done(self) -> bool:
        """Every part was read, was lost, failed or was cancelled."""
        return len(self.read) + len(self.lost) + len(self.failed) + len(self.cancelled) == len(self.parts)

    @property
    def waits_for_space(self) -> bool:
        """It is in the queue of its pool."""
        return self.ticket is not None and self.ticket.state is TicketState.WAITING

    @property
    def waits_for_encoder(self) -> bool:
        """It has its space, and not all its parts."""
        return self.ticket is not None and self.ticket.state is TicketState.GRANTED and not self.done

    def told(self, event: Event) -> None:
        """Learns sizes, leases and failures."""
        match event:
            case ChunkEvent(chunk):
                self.sizes[chunk.part_idx] = chunk.nbytes
                if chunk.state == ChunkState.CHUNK_STATE_READY:
                    self.ready[chunk.part_idx] = chunk
            case PartFailed():
                self.failed[event.part_idx] = event.error
            case PartCancelled():
                self.cancelled.add(event.part_idx)


class World:
    """Encoders, and readers with a pool each.

    Args:
        readers: how many.
        space_seconds: the limit of waits for space; leases live three times as long.
        pool: bytes of each pool.
        engines: of each encoder.
        gives_back: readers whose pool stalls give leases back.
        eager: they do so as soon as it may have stalled, not only when nothing else can happen any more.
    """

    def __init__(
        self,
        readers: int,
        space_seconds: float = SECONDS,
        pool: int = POOL,
        engines: int = 1,
        *,
        gives_back: bool = False,
        eager: bool = False,
    ) -> None:
        self.gives_back = gives_back
        self.eager = eager
        self.encoders = [
            Brain(
                engines=engines,
                arena_bytes=ARENA,
                prompt_bytes=ARENA // 2,
                input_bytes=INPUT,
                budget=8,
                space_seconds=space_seconds,
                lease_seconds=3 * space_seconds,
                max_lease_seconds=3 * space_seconds,
                prepare_seconds=ENDLESS,
                forward_seconds=ENDLESS,
            )
            for _ in range(ENCODERS)
        ]
        self.pools = [PoolLedger(pool) for _ in range(readers)]
        self.prompts: list[list[PromptOfReader]] = [[] for _ in range(readers)]
        self.size_of: dict[tuple[int, int], int] = {}
        self.now = 100.0

    def submit(self, reader: int, prompt: PromptOfReader) -> None:
        """A reader asks the encoders for the parts of a prompt."""
        self.prompts[reader].append(prompt)
        for index in range(ENCODERS):
            self.ask_one(prompt, index)

    def ask_one(self, prompt: PromptOfReader, index: int) -> None:
        """A reader asks one encoder for its parts of a prompt, if there are any."""
        if parts := [part for part, (where, _) in enumerate(prompt.parts) if where == index]:
            self.ask(index, prompt, prompt.name, parts)

    def ask(self, index: int, prompt: PromptOfReader, request_id: str, parts: list[int]) -> None:
        """A reader asks one encoder for some parts.

        Raises:
            ServiceError: the encoder is full.
        """
        command = encode_command(request_id, prompt_id=prompt.name, parts=parts, num_parts=len(prompt.parts))
        if prompt.first_content is not None:
            items = [
                replace(item, digest=digest_of(prompt.first_content + part))
                for part, item in zip(parts, command.items, strict=True)
            ]
            command = replace(command, items=tuple(items), cache_policy=CachePolicy.CACHE_POLICY_USE)
        caller = Caller(command)

        def sink(event: Event) -> None:
            caller(event)
            prompt.told(event)

        encoder = self.encoders[index]
        request = encoder.scheduler.submit(command, sink, encoder.now)
        prompt.callers.append(caller)
        for part in request.parts:
            assert part.computation is not None
            self.size_of[index, part.computation.key] = prompt.parts[part.item.part_idx][1]

    def children_step(self, index: int) -> bool:
        """An encoder's worker or engine does what it can. Returns whether there was anything."""
        encoder = self.encoders[index]
        moved = False
        for task in list(encoder.hands.tasks[0]):
            nbytes, input_bytes = SIZES[self.size_of[index, task.part]]
            if not task.measured and not task.dropped:
                encoder.measure(nbytes=nbytes, input_bytes=input_bytes, patches=4)
                moved = True
        first = next(iter(encoder.hands.tasks[0]), None)
        if first is not None and (first.comes_back or first.offset is not None):
            encoder.finish()
            moved = True
        for engine in encoder.hands.batches:
            if encoder.hands.batches[engine]:
                encoder.finish_batch(engine)
                moved = True
        return moved

    def cancel(self, prompt: PromptOfReader) -> None:
        """A reader wants nothing of a prompt any more that is not READY."""
        for encoder in self.encoders:
            encoder.scheduler.cancel(CancelCommand("", "prompt", prompt.name), encoder.now)

    def reader_step(self, reader: int) -> bool:
        """A reader reserves, reads and gives back what it can. Returns whether there was anything."""
        pool = self.pools[reader]
        moved = False
        for prompt in self.prompts[reader]:
            alive = [part for part in range(len(prompt.parts)) if part not in prompt.failed.keys() | prompt.cancelled]
            wanted = [prompt.sizes[part] for part in alive if part in prompt.sizes]
            if prompt.ticket is None and wanted and len(wanted) == len(alive):
                prompt.ticket = pool.ask(prompt.name, wanted, ENDLESS)
                moved = True
            pool.settle(self.now)
            if prompt.ticket is not None and prompt.ticket.state is TicketState.GRANTED:
                moved |= self.read(prompt) | self.ask_again(prompt)
                if prompt.done and prompt.ticket.offsets:
                    for offset in prompt.ticket.offsets:
                        pool.give_back(offset)
                    prompt.ticket.offsets = ()
                    moved = True
        return moved

    def read(self, prompt: PromptOfReader) -> bool:
        """Reads what is READY of a prompt that has its space."""
        moved = bool(prompt.ready)
        for part, chunk in prompt.ready.items():
            state = self.release(prompt, chunk, ReadOutcome.READ_OUTCOME_OK)
            (prompt.read if state is LeaseState.RELEASED else prompt.lost).add(part)
        prompt.ready.clear()
        return moved

    def release(self, prompt: PromptOfReader, chunk: EmbeddingChunk, outcome: ReadOutcome) -> LeaseState | None:
        """Gives a lease back. Returns what became of it."""
        encoder = self.encoders[prompt.parts[chunk.part_idx][0]]
        ((_, after),) = encoder.scheduler.release([(chunk.leases[0].lease_id, outcome)], encoder.now)
        return after

    def stall_step(self, reader: int) -> bool:
        """In a pool where one who has space waits for an encoder, those who have none give leases back."""
        prompts = self.prompts[reader]
        if not any(prompt.waits_for_encoder for prompt in prompts):
            return False
        moved = False
        for prompt in prompts:
            if prompt.waits_for_space and prompt.ready:
                for chunk in prompt.ready.values():
                    self.release(prompt, chunk, ReadOutcome.READ_OUTCOME_ABANDONED)
                prompt.given_back |= prompt.ready
                prompt.ready.clear()
                moved = True
        return moved

    def ask_again(self, prompt: PromptOfReader) -> bool:
        """Asks for what went back, by content; and what is gone, by media."""
        moved = False
        for part, chunk in list(prompt.given_back.items()):
            index = prompt.parts[part][0]
            encoder = self.encoders[index]
            command = AcquireCommand("", chunk.content_key, ("",), prompt.name, part, len(prompt.parts), None)
            try:
                prompt.ready[part] = encoder.scheduler.acquire(command, encoder.now)
            except ServiceError:
                self.ask(index, prompt, f"{prompt.name}, part {part} again", [part])
            del prompt.given_back[part]
            moved = True
        return moved

    def advance(self, seconds: float) -> None:
        """Time passes for all."""
        self.now += seconds
        for encoder in self.encoders:
            encoder.advance(seconds)

    def everything_that_can(self, chance: Random) -> None:
        """Goes on, in any order, until nobody can do anything."""
        readers = range(len(self.pools))
        steps: list[Callable[[], bool]] = [
            *(partial(self.children_step, index) for index in range(ENCODERS)),
            *(partial(self.reader_step, reader) for reader in readers),
        ]
        stalls: list[Callable[[], bool]] = [partial(self.stall_step, reader) for reader in readers]
        if not self.gives_back:
            stalls.clear()
        elif self.eager:
            steps += stalls
        moved = True
        while moved:
            for of_reader in self.prompts:
                chance.shuffle(of_reader)  # whatever a reader hears of first
            chance.shuffle(steps)
            moved = sum(step() for step in steps) > 0 or sum(step() for step in stalls) > 0

    def all_prompts(self) -> list[PromptOfReader]:
        """Those of all readers."""
        return [prompt for of_reader in self.prompts for prompt in of_reader]


def fits(parts: list[tuple[int, int]]) -> bool:
    """A reader has room for a prompt, and so has each encoder in the share of one prompt."""
    shares = [sum(footprint(SIZES[size][0]) for where, size in parts if where == index) for index in range(ENCODERS)]
    return sum(SIZES[size][0] for _, size in parts) <= POOL and max(shares) <= ARENA // 2
