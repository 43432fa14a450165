"""The transition tables: every state is reached, an end is an end, and every illegal move raises."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from enum import StrEnum
from itertools import product
from typing import Any

import pytest

from encoder_svc.runtime import leases, parts, slots
from encoder_svc.runtime.leases import LeaseState, LeaseTable
from encoder_svc.runtime.parts import PartState
from encoder_svc.runtime.slots import SlotState, SlotTable
from encoder_svc.runtime.timers import Timers
from tests.runtime.recording_hands import ComputationMaker, layout, part_of

TABLES: list[tuple[Any, Any, StrEnum]] = [
    (PartState, parts.TRANSITIONS, PartState.FETCHING),
    (SlotState, slots.TRANSITIONS, SlotState.RESERVED),
    (LeaseState, leases.TRANSITIONS, LeaseState.GRANTED),
]


@pytest.mark.parametrize(("states", "transitions", "first"), TABLES)
def test_every_state_is_in_the_table_and_is_reached(
    states: type[StrEnum], transitions: Mapping[StrEnum, frozenset[StrEnum]], first: StrEnum
) -> None:
    assert set(transitions) == set(states)
    reached, open_states = {first}, [first]
    while open_states:
        new = transitions[open_states.pop()] - reached
        reached |= new
        open_states += new
    assert reached == set(states)


def test_a_part_can_fail_or_be_cancelled_wherever_it_is() -> None:
    assert {PartState.READY, PartState.FAILED, PartState.CANCELLED} == parts.ENDS
    for state in set(PartState) - parts.ENDS:
        assert parts.TRANSITIONS[state] > {PartState.FAILED, PartState.CANCELLED}


STAGES = [PartState.QUEUED, PartState.PREPARING, PartState.PREPARED, PartState.ENCODING]


@pytest.mark.parametrize(("stage", "target"), list(product(STAGES, PartState)))
def test_a_computation_moves_only_as_the_table_says(stage: PartState, target: PartState) -> None:
    computation = ComputationMaker()(stage=stage)
    if target in parts.TRANSITIONS[stage]:
        computation.move(target)
        assert computation.stage is target
    else:
        with pytest.raises(AssertionError, match="cannot go"):
            computation.move(target)
        assert computation.stage is stage


def test_a_computation_that_has_ended_moves_no_more() -> None:
    computation = ComputationMaker()(stage=PartState.QUEUED)
    computation.ended = True
    with pytest.raises(AssertionError, match="cannot go"):
        computation.move(PartState.PREPARING)


@pytest.mark.parametrize("target", list(PartState))
@pytest.mark.parametrize("state", [PartState.FETCHING, *STAGES, *sorted(parts.ENDS)])
def test_a_part_ends_only_as_the_table_says_and_is_where_its_computation_is(
    state: PartState, target: PartState
) -> None:
    part = part_of(ComputationMaker()(stage=state) if state in STAGES else None)
    if state in parts.ENDS:
        part.finish(state)
    assert part.state is state
    if target in parts.TRANSITIONS[state] and target in parts.ENDS:
        part.finish(target)
        assert part.state is target
        assert part.ended
    else:
        with pytest.raises(AssertionError, match="cannot go"):
            part.finish(target)
        assert part.state is state
        assert part.ended == (state in parts.ENDS)


@pytest.mark.parametrize("target", [SlotState.FILLED, SlotState.FREE])
@pytest.mark.parametrize("state", list(SlotState))
def test_a_slot_moves_only_as_the_table_says(state: SlotState, target: SlotState) -> None:
    table = SlotTable(0, memoryview(bytearray(256)))
    slot = table.reserve(10)
    assert slot is not None
    if state is not SlotState.RESERVED:
        table.fill(slot, layout(), 1, None)
    if state is SlotState.FREE:
        table.free(slot)
    legal = target in slots.TRANSITIONS[state]
    with contextlib.nullcontext() if legal else pytest.raises(AssertionError, match="cannot go"):
        if target is SlotState.FILLED:
            table.fill(slot, layout(), 1, None)
        else:
            table.free(slot)
    assert slot.state is (target if legal else state)


@pytest.mark.parametrize("ended", [LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.REVOKED])
def test_a_lease_ends_once(ended: LeaseState) -> None:
    table = SlotTable(0, memoryview(bytearray(256)))
    slot = table.reserve(10)
    assert slot is not None
    table.fill(slot, layout(), 1, None)
    timers = Timers()
    lease_table = LeaseTable(timers, lambda lease, now: table.unlease(lease.slot))
    table.lease(slot)
    lease = lease_table.grant(slot, "", ttl=5.0, now=0.0)
    match ended:
        case LeaseState.RELEASED:
            lease_table.release(lease, 1.0)
        case LeaseState.EXPIRED:
            timers.run_due(5.0)
        case _:
            lease_table.revoke_slot(slot, 1.0)
    assert lease.state is ended
    with pytest.raises(AssertionError, match="cannot go"):
        lease_table.release(lease, 1.0)
    assert slot.state is SlotState.FREE
