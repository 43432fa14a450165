"""What the front knows of its engines and of the batches that they hold. Pure; the time is passed in."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from encoder_svc.runtime.batcher import Batcher
from encoder_svc.runtime.busy_share import BusyShare
from encoder_svc.runtime.computations import Computation
from encoder_svc.runtime.forwards import Forward, ForwardState
from encoder_svc.runtime.slots import Slot, SlotTable
from encoder_svc.runtime.timers import Timer
from epd.encoder.v1.encoder_service_pb2 import EngineState
from epd.internal.v1.engine_pb2 import EngineReady
from epd.internal.v1.media_worker_pb2 import Tower

_SPEED_WEIGHT = 0.3
"""Of the last batch in an engine's speed."""


@dataclass(eq=False)
class Batch:
    """Forwards of one tower that an engine runs together."""

    id: int
    tower: Tower
    items: list[Forward]
    patches: int
    """What it cost as it was sent."""
    started: bool = False
    forward_seconds: float = 0.0
    """How long the engine took for it, once it has come back."""
    stage_seconds: float = 0.0
    """How long it then took to write the slots."""
    first_at: float = 0.0
    """When it became the first of its engine's."""
    clocks: list[Timer] = field(default_factory=list)
    """What is set for the time that it takes, once it is the first."""
    given_up: list[Slot] = field(default_factory=list)
    """Slots of items that went to another engine: this one may still write them."""

    def stop_clocks(self) -> None:
        """It has come back, or never will."""
        for clock in self.clocks:
            clock.cancel()


@dataclass(eq=False)
class Engine:
    """One engine, over all its lives."""

    index: int
    device: str
    slots: SlotTable
    batcher: Batcher
    ready: EngineReady | None = None
    """What it said of itself in this life. None: it is starting or dead."""
    starting: bool = True
    """Its process runs, or is about to run for the first time, and is not ready yet."""
    failing: bool = False
    """Its canary failed, and it has encoded nothing well since."""
    late: bool = False
    """Its running batch takes far longer than usual."""
    batches: dict[int, Batch] = field(default_factory=dict)
    """What was sent to it and has not come back, in order."""
    patches: Counter[Tower] = field(default_factory=Counter)
    """The cost of what it has been given and has not done, for each tower."""
    last_good: float = 0.0
    """When it became ready or last encoded something well."""
    speeds: dict[Tower, float] = field(default_factory=dict)
    """Seconds per patch, as measured on its last batches, mostly on the last ones. Empty: it has run none in this
    life."""
    busy: BusyShare = field(default_factory=BusyShare)
    alarm: Timer | None = None
    """When its next batch is due."""

    @property
    def state(self) -> EngineState:
        """As ``GetServerInfo`` tells it."""
        if self.ready is None:
            return EngineState.ENGINE_STATE_STARTING if self.starting else EngineState.ENGINE_STATE_DOWN
        return EngineState.ENGINE_STATE_FAILING if self.failing else EngineState.ENGINE_STATE_READY

    @property
    def load(self) -> float:
        """What it has been given and has not done, in full batches."""
        return sum(patches / self.batcher.budget(tower) for tower, patches in self.patches.items())

    def take(self, computation: Computation, slot: Slot) -> None:
        """Gets an item that has a slot here: all its forwards wait."""
        computation.slot, computation.engine = slot, self.index
        for forward in computation.forwards:
            forward.state, forward.batch = ForwardState.WAITING, None
            self.patches[forward.tower] += forward.patches
            self.batcher.push(forward)

    def let_go(self, forward: Forward, state: ForwardState) -> None:
        """Has a forward no more that waits or was sent."""
        self.batcher.discard(forward)
        self.patches[forward.tower] -= forward.patches
        forward.state = state

    def leave_slot(self, computation: Computation) -> None:
        """Has an item no more, and the item's slot is free."""
        for forward in computation.forwards:
            if forward.state in (ForwardState.WAITING, ForwardState.SENT):
                self.let_go(forward, ForwardState.IDLE)
            forward.state = ForwardState.IDLE
        if computation.slot is not None:
            self.slots.free(computation.slot)
            computation.slot = None

    def running_until(self) -> float | None:
        """When it is expected to have done all its batches; None: it is idle. Unknown speeds are taken for infinite."""
        if not self.batches:
            return None
        first = next(iter(self.batches.values()))
        return first.first_at + sum(
            self.speeds.get(batch.tower, 0.0) * batch.patches for batch in self.batches.values()
        )

    def learn(self, batch: Batch, now: float) -> None:
        """Takes the time of a batch that has come back."""
        measured = (now - batch.first_at) / max(batch.patches, 1)
        known = self.speeds.get(batch.tower, measured)
        self.speeds[batch.tower] = known + _SPEED_WEIGHT * (measured - known)
