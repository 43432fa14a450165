"""What is kept for nobody goes when space is needed: no more of it than must, and never anything else."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from encoder_svc.runtime import slots as slots_module
from encoder_svc.runtime.slots import ContentName, Slot, SlotState, SlotTable, footprint
from tests.runtime.recording_hands import layout

ARENA = 4096
UNIT = footprint(1)


def name_of(number: int) -> ContentName:
    """The name of a content."""
    return ContentName("", number.to_bytes(32, "big"))


class Arena:
    """A slot table whose every change is checked against a recount."""

    def __init__(self, size: int = ARENA) -> None:
        self.table = SlotTable(0, memoryview(bytearray(size)))
        self.size = size
        self.idle: list[Slot] = []
        """What is kept for nobody, least recently used first."""
        self.number = 0

    def keep(self, nbytes: int, *, leased: bool = False) -> Slot | None:
        """Makes an embedding and keeps it, leased or idle."""
        slot = self.reserve(nbytes)
        if slot is not None:
            self.number += 1
            self.table.fill(slot, layout(), self.number, name_of(self.number))
            if leased:
                self.table.lease(slot)
            else:
                self.table.settle(slot)
                self.idle.append(slot)
        return slot

    def lease(self, slot: Slot) -> None:
        """A reader takes it."""
        self.table.lease(slot)
        if slot in self.idle:
            self.idle.remove(slot)

    def unlease(self, slot: Slot) -> None:
        """A reader gives it back."""
        self.table.unlease(slot)
        if not slot.leases:
            self.idle.append(slot)

    def reserve(self, nbytes: int) -> Slot | None:
        """Takes space, and checks what had to go for it against the smallest that could have."""
        before = {slot: (slot.offset, slot.end) for slot in self.table.live}
        fits_as_it_is = self.largest_gap(before) >= footprint(nbytes)
        stays = {slot: place for slot, place in before.items() if slot not in self.idle}
        fits_at_all = self.largest_gap(stays) >= footprint(nbytes)
        slot = self.table.reserve(nbytes)
        gone = set(before) - set(self.table.live)
        assert (slot is not None) == fits_at_all, "space is found exactly when idle slots and gaps are enough"
        assert gone <= set(self.idle), "only what nobody reads is evicted"
        assert not (gone and fits_as_it_is), "nothing is evicted while there is space"
        if slot is None:
            assert not gone, "nothing is evicted in vain"
        for one in gone:
            rest = {other: place for other, place in before.items() if other not in gone - {one}}
            assert self.largest_gap(rest) < footprint(nbytes), "each of those that went was needed"
            assert (one.state, one.name) == (SlotState.FREE, None)
        if gone:
            self.is_a_run(gone, before)
        self.idle = [one for one in self.idle if one not in gone]
        return slot

    def largest_gap(self, taken: dict[Slot, tuple[int, int]]) -> int:
        """The largest run of bytes between what is taken."""
        places = [(0, 0), *sorted(taken.values()), (self.size, self.size)]
        return max(after[0] - before[1] for before, after in pairwise(places))

    @staticmethod
    def is_a_run(gone: set[Slot], before: dict[Slot, tuple[int, int]]) -> None:
        """Nothing that stays lies between what went."""
        first, last = min(before[one][0] for one in gone), max(before[one][1] for one in gone)
        assert {slot for slot, (start, end) in before.items() if first <= start and end <= last} == gone

    def recount(self) -> None:
        """The counters are what a recount gives."""
        table, sizes = self.table, Counter[str]()
        for slot in table.live:
            assert slot.state is not SlotState.FREE
            kind = "reserved" if slot.state is SlotState.RESERVED else "leased" if slot.leases else "cached"
            sizes[kind] += slot.nbytes
            if slot.name is not None:
                assert table.find(slot.name) is slot
        assert (table.reserved_bytes, table.leased_bytes, table.cached_bytes) == (
            sizes["reserved"],
            sizes["leased"],
            sizes["cached"],
        )
        assert list(table._idle.values()) == self.idle
        assert set(table._idle_ends.values()) == set(self.idle)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["keep", "keep", "hold", "reserve", "reserve", "drop", "lease", "unlease", "touch", "forget"]),
        st.integers(0, 1500),
    ),
    max_size=60,
)


@given(STEPS)
def test_eviction_frees_exactly_what_is_needed(  # noqa: C901 # one arm for each thing that can happen
    steps: list[tuple[str, int]],
) -> None:
    arena = Arena()
    table = arena.table
    for what, number in steps:
        reserved = [slot for slot in table.live if slot.state is SlotState.RESERVED]
        leased = [slot for slot in table.live if slot.leases]
        match what:
            case "keep":
                arena.keep(number)
            case "hold":
                arena.keep(number, leased=True)
            case "reserve":
                arena.reserve(number)
            case "drop" if reserved:
                table.free(reserved[number % len(reserved)])
            case "lease" if arena.idle:
                arena.lease(arena.idle[number % len(arena.idle)])
            case "unlease" if leased:
                arena.unlease(leased[number % len(leased)])
            case "touch" if arena.idle:
                slot = arena.idle.pop(number % len(arena.idle))
                table.settle(slot)
                arena.idle.append(slot)
            case "forget" if arena.idle:
                table.forget(arena.idle.pop(number % len(arena.idle)))
        arena.recount()
    table.forget_all()
    for slot in table.live:
        while slot.leases:
            table.unlease(slot)
        if slot.state is SlotState.RESERVED:
            table.free(slot)
    assert table.live == ()
    assert (table.reserved_bytes, table.leased_bytes, table.cached_bytes) == (0, 0, 0)
    assert table.reserve(table.capacity - 64) is not None, "all gaps have merged"


def test_what_was_used_least_recently_goes_first() -> None:
    arena = Arena(6 * UNIT)
    kept = [arena.keep(1) for _ in range(6)]
    assert all(kept)
    first, second, third = arena.idle[0], arena.idle[1], arena.idle[2]
    arena.table.settle(first)
    arena.idle.append(arena.idle.pop(0))
    arena.reserve(1)
    assert second.state is SlotState.FREE
    arena.lease(third)
    arena.unlease(third)
    arena.reserve(1)
    assert [slot.state for slot in (first, third)] == [SlotState.FILLED] * 2


def test_a_large_embedding_costs_neighbours_and_not_small_ones_far_apart() -> None:
    arena = Arena(9 * UNIT)
    kept = [slot for _ in range(9) if (slot := arena.keep(1)) is not None]
    for slot in (kept[1], kept[3], kept[5]):
        arena.lease(slot)
    assert arena.reserve(3 * UNIT - 64) is not None
    assert [slot.state for slot in kept[6:]] == [SlotState.FREE] * 3
    assert all(slot.state is SlotState.FILLED for slot in kept[:6])


def test_a_gap_beside_a_slot_is_made_use_of() -> None:
    arena = Arena(4 * UNIT)
    kept = [slot for _ in range(4) if (slot := arena.keep(1)) is not None]
    arena.table.forget(kept[1])
    arena.idle.remove(kept[1])
    arena.lease(kept[3])
    assert arena.reserve(2 * UNIT - 64) is not None
    assert [slot.state for slot in kept].count(SlotState.FILLED) == 2


def test_what_was_looked_for_in_vain_is_found_when_a_reader_has_gone() -> None:
    arena = Arena(4 * UNIT)
    kept = [slot for _ in range(4) if (slot := arena.keep(1, leased=True)) is not None]
    assert arena.reserve(2 * UNIT - 64) is None
    for slot in kept[:2]:
        arena.unlease(slot)
    assert arena.reserve(2 * UNIT - 64) is not None


class Counted(dict[int, Slot]):
    """Counts how often it is asked."""

    looks = 0

    def get(self, key: int, default: Slot | None = None) -> Slot | None:  # type: ignore[override] # of a dict
        self.looks += 1
        return super().get(key, default)


def counted(table: SlotTable) -> Counted:
    """Counts from now on how many slots the search for a run looks at."""
    found = table._idle_ends = Counted(table._idle_ends)
    return found


def test_the_search_for_a_run_looks_at_no_more_than_it_needs() -> None:
    for count in (100, 400):
        arena = Arena((count + 1) * UNIT)
        for number in range(count + 1):
            arena.keep(1, leased=number == count // 2)
        looks = counted(arena.table)
        assert arena.table.reserve((count // 2 + 1) * UNIT) is None
        assert looks.looks == 0, "that there is no room is known without a search"
        assert arena.table.reserve((count // 2) * UNIT - 64) is not None
        assert looks.looks <= slots_module._EVICTION_CANDIDATES * count // 2


def test_a_run_is_found_at_once_among_many_slots_that_lie_apart() -> None:
    arena = Arena(206 * UNIT)
    for number in range(200):
        arena.keep(1, leased=number % 2 == 0)
    for _ in range(6):
        arena.keep(1)
    looks = counted(arena.table)
    assert arena.reserve(4 * UNIT - 64) is not None
    assert looks.looks <= 8
