"""The books of a pool, without bytes and clocks."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from encoder_client.pool.pool_ledger import ALIGNMENT, ALLOWED, PoolLedger, Ticket, TicketState

FOREVER = float("inf")


def granted(ledger: PoolLedger, prompt: str, *sizes: int) -> Ticket:
    ticket = ledger.ask(prompt, sizes, FOREVER)
    assert ticket in ledger.settle(0.0)
    assert ticket.state is TicketState.GRANTED
    return ticket


def test_space_is_all_or_nothing() -> None:
    ledger = PoolLedger(1024)
    first = granted(ledger, "a", 512)
    second = ledger.ask("b", [256, 512], FOREVER)
    assert not ledger.settle(0.0)
    assert ledger.statistics().used == 512  # nothing is held for b while it waits
    ledger.give_back(first.offsets[0])
    assert ledger.settle(0.0) == [second]
    assert ledger.statistics().used == 768


def test_f38_nobody_overtakes_a_large_wish() -> None:
    ledger = PoolLedger(1024)
    held = granted(ledger, "a", 512)
    large = ledger.ask("large", [1024], FOREVER)
    small = [ledger.ask(f"small-{i}", [64], FOREVER) for i in range(3)]
    assert not ledger.settle(0.0)  # 512 bytes are free, and small wishes would fit
    ledger.give_back(held.offsets[0])
    assert ledger.settle(0.0) == [large]
    ledger.give_back(large.offsets[0])
    assert ledger.settle(0.0) == small


def test_a_later_wish_of_an_older_prompt_goes_first() -> None:
    ledger = PoolLedger(1024)
    mine = granted(ledger, "old", 1024)
    young = ledger.ask("young", [64], FOREVER)
    again = ledger.ask("old", [64], FOREVER)
    ledger.give_back(mine.offsets[0])
    assert ledger.settle(0.0) == [again, young]


def test_a_prompt_that_holds_nothing_is_young_again() -> None:
    ledger = PoolLedger(1024)
    ledger.give_back(granted(ledger, "a", 64).offsets[0])
    blocker = granted(ledger, "blocker", 1024)
    b, a = ledger.ask("b", [64], FOREVER), ledger.ask("a", [64], FOREVER)
    ledger.give_back(blocker.offsets[0])
    assert ledger.settle(0.0) == [b, a]


def test_every_wait_ends() -> None:
    ledger = PoolLedger(1024)
    granted(ledger, "a", 1024)
    late = ledger.ask("late", [64], 10.0)
    patient = ledger.ask("patient", [64], 20.0)
    assert ledger.next_deadline() == 10.0
    assert not ledger.settle(9.9)
    assert ledger.settle(10.0) == [late]
    assert late.state is TicketState.EXPIRED
    assert patient.state is TicketState.WAITING
    assert ledger.statistics().expired == 1


def test_an_expired_head_lets_the_next_through() -> None:
    ledger = PoolLedger(1024)
    granted(ledger, "a", 512)
    late, small = ledger.ask("large", [1024], 10.0), ledger.ask("small", [64], FOREVER)
    assert ledger.settle(10.0) == [late, small]
    assert small.state is TicketState.GRANTED


def test_a_wish_can_be_withdrawn_once() -> None:
    ledger = PoolLedger(64)
    held = granted(ledger, "a", 64)
    wish = ledger.ask("b", [64], FOREVER)
    ledger.withdraw(wish)
    ledger.withdraw(wish)
    assert wish.state is TicketState.WITHDRAWN
    ledger.give_back(held.offsets[0])
    assert not ledger.settle(0.0)


def test_the_best_fit_is_taken_at_the_lowest_address() -> None:
    ledger = PoolLedger(64 * 10)
    slots = [granted(ledger, f"p{i}", size).offsets[0] for i, size in enumerate([192, 64, 64, 64, 64, 64])]
    ledger.give_back(slots[0])  # a run of 192
    ledger.give_back(slots[2])  # runs of 64
    ledger.give_back(slots[4])
    assert granted(ledger, "x", 64).offsets == (slots[2],)


def test_free_runs_are_merged() -> None:
    ledger = PoolLedger(64 * 4)
    slots = [granted(ledger, f"p{i}", 64).offsets[0] for i in range(4)]
    for offset in (slots[1], slots[3], slots[2], slots[0]):
        ledger.give_back(offset)
    assert ledger.statistics().largest_free == 256


def test_slots_are_aligned_and_do_not_overlap() -> None:
    ledger = PoolLedger(1024)
    ticket = granted(ledger, "a", 1, 65, 64)
    assert all(offset % ALIGNMENT == 0 for offset in ticket.offsets)
    assert ledger.statistics().used == 64 + 128 + 64


def test_what_never_fits_is_known() -> None:
    ledger = PoolLedger(128)
    assert ledger.fits_ever([64, 64])
    assert not ledger.fits_ever([64, 65])


@pytest.mark.parametrize("state", [state for state in TicketState if state is not TicketState.WAITING])
def test_an_ended_ticket_stays_as_it_is(state: TicketState) -> None:
    assert not ALLOWED[state]
    ticket = Ticket("p", (64,), FOREVER, (1, 1), state)
    with pytest.raises(AssertionError, match="cannot become"):
        ticket.move(TicketState.GRANTED)


@given(
    wishes=st.lists(
        st.tuples(st.sampled_from("abcdef"), st.lists(st.integers(1, 1024), min_size=1, max_size=3)),
        min_size=1,
        max_size=30,
    ),
    chance=st.randoms(use_true_random=False),
)
def test_f38_every_wish_is_granted_in_its_turn_whatever_its_size(
    wishes: list[tuple[str, list[int]]], chance: Random
) -> None:
    """No limit of time: it is enough that what was granted is given back, in any order, slot by slot."""
    ledger = PoolLedger(1024)
    waiting: list[Ticket] = []
    held: list[int] = []
    comings = [wish for wish in wishes if ledger.fits_ever(wish[1])]
    while comings or waiting or held:
        if comings and (chance.random() < 0.5 or not held):
            waiting.append(ledger.ask(*comings.pop(0), FOREVER))
        elif held:
            ledger.give_back(held.pop(chance.randrange(len(held))))
        for ticket in ledger.settle(0.0):
            assert ticket is min(waiting, key=lambda ticket: ticket.age), "somebody was passed"
            waiting.remove(ticket)
            held += ticket.offsets
        assert held or not waiting, "somebody waits for nobody"
    assert ledger.statistics().largest_free == ledger.capacity


class LedgerMachine(RuleBasedStateMachine):
    """Whatever is asked, granted, given back and withdrawn: slots never overlap, and no byte is lost."""

    tickets = Bundle("tickets")
    slots = Bundle("slots")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.ledger = PoolLedger(4096)
        self.held: dict[int, int] = {}

    @rule(
        target=tickets,
        prompt=st.sampled_from("abcd"),
        sizes=st.lists(st.integers(1, 1500), min_size=1, max_size=3),
        patience=st.floats(0.5, 5.0),
    )
    def ask(self, prompt: str, sizes: list[int], patience: float) -> Ticket:
        if not self.ledger.fits_ever(sizes):
            sizes = sizes[:1]
        return self.ledger.ask(prompt, sizes, self.now + patience)

    @rule(target=slots, seconds=st.floats(0.0, 1.0))
    def settle(self, seconds: float) -> object:
        self.now += seconds
        new = []
        for ticket in self.ledger.settle(self.now):
            for offset, size in zip(ticket.offsets, ticket.sizes, strict=False):
                assert offset not in self.held
                self.held[offset] = size
                new.append(offset)
        return multiple(*new)

    @rule(ticket=tickets)
    def withdraw(self, ticket: Ticket) -> None:
        self.ledger.withdraw(ticket)

    @rule(offset=consumes(slots))
    def give_back(self, offset: int) -> None:
        del self.held[offset]
        self.ledger.give_back(offset)

    @invariant()
    def slots_lie_apart_inside_the_arena(self) -> None:
        end = 0
        for offset, size in sorted(self.held.items()):
            assert offset >= end
            end = offset + size
        assert end <= self.ledger.capacity

    @invariant()
    def the_books_agree(self) -> None:
        statistics = self.ledger.statistics()
        assert statistics.slots == len(self.held)
        assert sum(self.held.values()) <= statistics.used <= statistics.peak <= statistics.capacity
        if not self.held:
            assert statistics.largest_free == statistics.capacity


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
