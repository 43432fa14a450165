"""Prompts that need space on several encoders and in their readers' pools at once: everything comes to an end.

The encoders are real schedulers, the pools are the client library's real books. A reader reserves for its whole prompt,
all or nothing, as soon as it knows all sizes; it reads what is READY, gives the lease back, and gives its own space
back when it has the whole prompt.

If readers have room for what they ask for, nothing waits in a circle: without any limit of time, everything ends. If
their pools are small, a pool may wait for an arena and the arena for the pool: then limits of time end it. Where space
suffices for all, nobody may have to give up.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from encoder_client.pool_ledger import PoolLedger, Ticket, TicketState
from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.commands import CancelCommand
from encoder_svc.runtime.events import ChunkEvent, Event, PartCancelled, PartFailed
from encoder_svc.runtime.leases import LeaseState
from encoder_svc.runtime.slots import footprint
from epd.encoder.v1.encoder_service_pb2 import ReadOutcome
from tests.runtime.recording_hands import Brain, Caller, encode_command

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
    callers: dict[int, Caller] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    failed: dict[int, ServiceError] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)
    cancelled: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    """Parts whose lease ran out before they were read."""
    ticket: Ticket | None = None

    @property
    def done(self) -> bool:
        """Every part was read, was lost, failed or was cancelled."""
        return len(self.read) + len(self.lost) + len(self.failed) + len(self.cancelled) == len(self.parts)

    def told(self, event: Event) -> None:
        """Learns sizes and failures."""
        match event:
            case ChunkEvent(chunk):
                self.sizes[chunk.part_idx] = chunk.nbytes
            case PartFailed():
                self.failed[event.part_idx] = event.error
            case PartCancelled():
                self.cancelled.add(event.part_idx)


class World:
    """Encoders, and readers with a pool each."""

    def __init__(self, readers: int, space_seconds: float = SECONDS, pool: int = POOL, engines: int = 1) -> None:
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
        for index, encoder in enumerate(self.encoders):
            parts = [part for part, (where, _) in enumerate(prompt.parts) if where == index]
            if not parts:
                continue
            command = encode_command(prompt.name, prompt_id=prompt.name, parts=parts, num_parts=len(prompt.parts))
            caller = Caller(command)
            prompt.callers[index] = caller

            def sink(event: Event, caller: Caller = caller) -> None:
                caller(event)
                prompt.told(event)

            request = encoder.scheduler.submit(command, sink, encoder.now)
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
                moved |= self.read(prompt)
                if prompt.done and prompt.ticket.offsets:
                    for offset in prompt.ticket.offsets:
                        pool.give_back(offset)
                    prompt.ticket.offsets = ()
                    moved = True
        return moved

    def read(self, prompt: PromptOfReader) -> bool:
        """Reads what is READY of a prompt that has its space."""
        moved = False
        for index, caller in prompt.callers.items():
            for part, end in caller.ends.items():
                if isinstance(end, ChunkEvent) and part not in prompt.read | prompt.lost:
                    encoder = self.encoders[index]
                    lease = end.chunk.leases[0].lease_id
                    ((_, after),) = encoder.scheduler.release([(lease, ReadOutcome.READ_OUTCOME_OK)], encoder.now)
                    (prompt.read if after is LeaseState.RELEASED else prompt.lost).add(part)
                    moved = True
        return moved

    def advance(self, seconds: float) -> None:
        """Time passes for all."""
        self.now += seconds
        for encoder in self.encoders:
            encoder.advance(seconds)

    def everything_that_can(self, chance: Random) -> None:
        """Goes on, in any order, until nobody can do anything."""
        steps: list[Callable[[], bool]] = [
            *(partial(self.children_step, index) for index in range(ENCODERS)),
            *(partial(self.reader_step, reader) for reader in range(len(self.pools))),
        ]
        moved = True
        while moved:
            chance.shuffle(steps)
            moved = sum(step() for step in steps) > 0

    def all_prompts(self) -> list[PromptOfReader]:
        """Those of all readers."""
        return [prompt for of_reader in self.prompts for prompt in of_reader]


def fits(parts: list[tuple[int, int]]) -> bool:
    """A reader has room for a prompt, and so has each encoder in the share of one prompt."""
    shares = [sum(footprint(SIZES[size][0]) for where, size in parts if where == index) for index in range(ENCODERS)]
    return sum(SIZES[size][0] for _, size in parts) <= POOL and max(shares) <= ARENA // 2


PARTS = st.tuples(st.integers(0, ENCODERS - 1), st.integers(0, len(SIZES) - 1))
PROMPTS = st.lists(st.lists(PARTS, min_size=1, max_size=4).filter(fits), min_size=1, max_size=12)


def play(prompts: list[list[tuple[int, int]]], chance: Random) -> World:
    """Two readers ask for prompts, and everybody does something now and then; then all go on as long as it takes."""
    world = World(readers=2)
    for number, parts in enumerate(prompts):
        world.submit(chance.randrange(2), PromptOfReader(f"p{number}", parts))
        for _ in range(chance.randrange(6)):
            chance.choice([world.children_step, world.reader_step])(chance.randrange(2))
    world.everything_that_can(chance)
    for _ in range(4 * 12):
        world.advance(SECONDS / 4)
        world.everything_that_can(chance)
    return world


@settings(suppress_health_check=[HealthCheck.filter_too_much], deadline=None, max_examples=150)
@given(
    prompts=PROMPTS,
    engines=st.integers(1, 2),
    chance=st.randoms(use_true_random=False),
)
def test_f38_nothing_waits_in_a_circle(prompts: list[list[tuple[int, int]]], engines: int, chance: Random) -> None:
    """No limit of time runs out here, and still all that was not cancelled is made and read."""
    world = World(2, ENDLESS, pool=1 << 30, engines=engines)
    for number, parts in enumerate(prompts):
        world.submit(chance.randrange(2), PromptOfReader(f"p{number}", parts))
        for _ in range(chance.randrange(6)):
            chance.choice([world.children_step, world.reader_step])(chance.randrange(2))
        if chance.random() < 0.2:
            world.cancel(chance.choice(world.all_prompts()))
    world.everything_that_can(chance)
    for prompt in world.all_prompts():
        assert len(prompt.read) + len(prompt.cancelled) == len(prompt.parts), "something waits in a circle"
    for encoder in world.encoders:
        encoder.assert_empty()


def test_the_last_part_of_the_oldest_prompt_is_measured_whatever_younger_ones_hold() -> None:
    brain = Brain(arena_bytes=2048, prompt_bytes=1024, input_bytes=128, space_seconds=ENDLESS)
    oldest = brain.submit(encode_command("old", prompt_id="old", parts=range(4)))
    for name in "bcde":
        brain.submit(encode_command(name, prompt_id=name))
    for _ in range(3):
        brain.measure(nbytes=192, input_bytes=128)
        brain.finish()
        brain.finish_batch()
    assert brain.engines[0].slots.reserve(300) is not None, "somebody else's embedding"
    # One of the young ones takes the input arena and waits for a slot; the next two are at the worker.
    last = brain.scheduler.requests.live()[0].parts[3].computation
    assert last is not None
    while tasks := brain.hands.tasks[0]:
        if not tasks[0].measured:
            brain.measure(nbytes=192 if tasks[0].part == last.key else 950, input_bytes=128)
        brain.finish()
    assert oldest.laid_out == {0, 1, 2, 3}


@settings(suppress_health_check=[HealthCheck.filter_too_much], deadline=None, max_examples=60)
@given(prompts=PROMPTS, chance=st.randoms(use_true_random=False))
def test_everything_ends_with_several_encoders_and_pools(prompts: list[list[tuple[int, int]]], chance: Random) -> None:
    world = play(prompts, chance)
    for prompt in world.all_prompts():
        assert all(caller.completed is not None for caller in prompt.callers.values()), "somebody waits for ever"
        assert prompt.done, "somebody waits for ever"
        assert {error.reason for error in prompt.failed.values()} <= {Reason.SPACE_TIMEOUT}
    for encoder in world.encoders:
        encoder.assert_empty()
    assert all(pool.statistics().used == 0 for pool in world.pools)


@settings(suppress_health_check=[HealthCheck.filter_too_much], deadline=None, max_examples=60)
@given(prompts=PROMPTS, chance=st.randoms(use_true_random=False))
def test_f38_nobody_gives_up_while_two_prompts_at_most_are_under_way(
    prompts: list[list[tuple[int, int]]], chance: Random
) -> None:
    """Two shares fill an arena, and each reader has room for one prompt: so each goes through, in any order."""
    for first, second in zip(prompts[::2], [*prompts[1::2], []], strict=False):
        pair = [parts for parts in (first, second) if parts]
        world = World(readers=2)
        for number, parts in enumerate(pair):
            world.submit(number, PromptOfReader(f"p{number}", parts))
        world.everything_that_can(chance)
        for prompt in world.all_prompts():
            assert prompt.done
            assert len(prompt.read) == len(prompt.parts)
