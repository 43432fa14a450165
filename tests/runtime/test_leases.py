from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from encoder_svc.runtime.leases import Lease, LeaseState, LeaseTable
from encoder_svc.runtime.slots import Slot, SlotState, SlotTable
from encoder_svc.runtime.timers import Timers
from tests.runtime.recording_hands import layout


class Store:
    """One arena of a few slots, its leases, and their timers."""

    def __init__(self, memory: int = 100) -> None:
        self.timers = Timers()
        self.slots = SlotTable(0, memoryview(bytearray(1024)))
        self.freed: list[Slot] = []
        self.leases = LeaseTable(self.timers, self._ended, memory)

    def _ended(self, lease: Lease, now: float) -> None:
        self.slots.unlease(lease.slot)
        if lease.slot.state is SlotState.FREE:
            self.freed.append(lease.slot)

    def filled(self, nbytes: int = 100) -> Slot:
        """A slot that may be read."""
        slot = self.slots.reserve(nbytes)
        assert slot is not None
        self.slots.fill(slot, layout(), 1, None)
        return slot

    def grant(self, slot: Slot, receiver: str, ttl: float, now: float) -> Lease:
        """What the runtime does for a READY part."""
        self.slots.lease(slot)
        return self.leases.grant(slot, receiver, ttl, now)

    def release(self, lease_id: bytes, now: float) -> Lease | LeaseState | None:
        """What the runtime does for a ``Release``."""
        found = self.leases.find(lease_id, now)
        if isinstance(found, Lease):
            self.leases.release(found, now)
        return found


def test_a_slot_is_freed_by_the_end_of_its_last_lease() -> None:
    store = Store()
    slot = store.filled()
    first, second, third = (store.grant(slot, name, ttl=10.0, now=0.0) for name in "abc")
    assert slot.leases == len(store.leases) == 3
    store.release(second.id, 1.0)
    store.release(first.id, 1.0)
    assert store.freed == []
    store.release(third.id, 1.0)
    assert store.freed == [slot]
    assert slot.state is SlotState.FREE
    assert len(store.leases) == 0


def test_f11_a_repeated_release_gets_the_same_answer_and_frees_nothing() -> None:
    store = Store()
    slot = store.filled()
    first, second = (store.grant(slot, name, ttl=10.0, now=0.0) for name in "ab")
    assert store.release(first.id, 1.0) is first
    for _ in range(3):
        assert store.release(first.id, 1.0) is LeaseState.RELEASED
    assert slot.state is SlotState.FILLED, "the other receiver still reads"
    assert second.state is LeaseState.GRANTED


def test_f12_f25_a_late_release_never_frees_a_newer_use_of_the_memory() -> None:
    store = Store()
    old = store.grant(store.filled(900), "", ttl=10.0, now=0.0)
    store.timers.run_due(10.0)
    newer = store.filled(900)
    lease = store.grant(newer, "", ttl=10.0, now=11.0)
    assert newer.offset == old.slot.offset
    assert newer.generation != old.slot.generation
    assert store.release(old.id, 12.0) is LeaseState.EXPIRED
    assert (newer.state, newer.leases, lease.state) == (SlotState.FILLED, 1, LeaseState.GRANTED)


def test_a_lease_is_dead_at_the_very_time_of_its_end() -> None:
    store = Store()
    lease = store.grant(store.filled(), "", ttl=10.0, now=5.0)
    assert lease.expires_at == 15.0
    assert store.leases.find(lease.id, 14.999) is lease
    assert store.leases.find(lease.id, 15.0) is LeaseState.EXPIRED
    assert store.freed == [lease.slot]
    assert store.timers.run_due(15.0) == 0, "expiry happens once"


def test_expiry_and_release_at_the_same_time_have_one_winner() -> None:
    for timer_first in (False, True):
        store = Store()
        lease = store.grant(store.filled(), "", ttl=10.0, now=0.0)
        if timer_first:
            store.timers.run_due(10.0)
        assert store.release(lease.id, 10.0) is LeaseState.EXPIRED
        store.timers.run_due(10.0)
        assert store.freed == [lease.slot]
        assert lease.state is LeaseState.EXPIRED


def test_renew_extends_and_never_shortens() -> None:
    store = Store()
    lease = store.grant(store.filled(), "", ttl=10.0, now=0.0)
    store.leases.renew(lease, 3.0, now=1.0)
    assert lease.expires_at == 10.0
    store.leases.renew(lease, 30.0, now=5.0)
    assert lease.expires_at == 35.0
    assert store.timers.run_due(34.9) == 0
    assert store.timers.run_due(35.0) == 1
    assert lease.state is LeaseState.EXPIRED


def test_a_slot_is_taken_from_all_its_readers_and_from_no_others() -> None:
    store = Store()
    damaged, whole = store.filled(), store.filled()
    victims = [store.grant(damaged, name, ttl=10.0, now=0.0) for name in "ab"]
    other = store.grant(whole, "a", ttl=10.0, now=0.0)
    assert store.leases.revoke_slot(damaged, 1.0) == victims
    assert store.freed == [damaged]
    assert {lease.state for lease in victims} == {LeaseState.REVOKED}
    assert other.state is LeaseState.GRANTED
    assert store.release(victims[0].id, 1.0) is LeaseState.REVOKED


def test_an_engine_that_dies_takes_only_its_own_leases() -> None:
    timers = Timers()
    ended: list[Lease] = []
    tables = [SlotTable(index, memoryview(bytearray(1024))) for index in range(2)]
    leases = LeaseTable(timers, lambda lease, now: ended.append(lease))
    slots = [table.reserve(100) for table in tables]
    for table, slot in zip(tables, slots, strict=True):
        assert slot is not None
        table.fill(slot, layout(), 1, None)
    first, second = (leases.grant(slot, "", ttl=10.0, now=0.0) for slot in slots if slot is not None)
    assert leases.revoke_engine(0, 1.0) == ended == [first]
    assert second.state is LeaseState.GRANTED
    assert leases.revoke_engine(0, 2.0) == []


def test_ended_leases_are_remembered_in_bounded_number() -> None:
    store = Store(memory=5)
    ids = []
    for _ in range(8):
        lease = store.grant(store.filled(), "", ttl=10.0, now=0.0)
        ids.append(lease.id)
        store.release(lease.id, 1.0)
    assert [store.leases.find(lease_id, 2.0) for lease_id in ids] == [None] * 3 + [LeaseState.RELEASED] * 5
    assert len(store.leases._ended) == len(store.leases._order) == 5


def test_lease_ids_are_secrets_of_128_bits_and_are_not_shown() -> None:
    store = Store()
    leases = [store.grant(store.filled(10), "", ttl=10.0, now=0.0) for _ in range(3)]
    assert len({lease.id for lease in leases}) == 3
    for lease in leases:
        assert len(lease.id) == 16
        assert repr(lease.id) not in repr(lease)
        assert repr(lease.slot.key) not in repr(lease)
    assert store.leases.find(bytes(16), 0.0) is None


STEPS = st.lists(
    st.tuples(st.sampled_from(["grant", "share", "release", "renew", "revoke", "pass", "late"]), st.integers(0, 20)),
    max_size=60,
)


@given(STEPS)
def test_a_slot_lives_exactly_as_long_as_a_lease_on_it(  # noqa: C901 # one arm for each thing that can happen
    steps: list[tuple[str, int]],
) -> None:
    store, now = Store(), 0.0
    leases: list[Lease] = []
    for what, number in steps:
        alive = [lease for lease in leases if lease.state is LeaseState.GRANTED and lease.expires_at > now]
        match what:
            case "grant":
                slot = store.slots.reserve(number * 10)
                if slot is not None:
                    store.slots.fill(slot, layout(), 1, None)
                    leases.append(store.grant(slot, "", ttl=float(number + 1), now=now))
            case "share" if alive:
                slot = alive[number % len(alive)].slot
                leases.append(store.grant(slot, "", ttl=float(number + 1), now=now))
            case "release" | "late" if leases:
                some = alive if what == "release" and alive else leases
                lease = some[number % len(some)]
                was, ended = lease.state, lease.state is not LeaseState.GRANTED
                found = store.release(lease.id, now)
                if ended:
                    assert found is was
                else:
                    assert found is (lease if lease.expires_at > now else LeaseState.EXPIRED)
            case "renew" if alive:
                lease = alive[number % len(alive)]
                end = lease.expires_at
                store.leases.renew(lease, float(number), now)
                assert lease.expires_at == max(end, now + number)
            case "revoke" if alive:
                store.leases.revoke_slot(alive[number % len(alive)].slot, now)
            case "pass":
                now += number / 4
                if number % 2:
                    store.timers.run_due(now)
        granted = [lease for lease in leases if lease.state is LeaseState.GRANTED]
        assert len(store.leases) == len(granted)
        assert {lease.slot for lease in granted} == set(store.slots.live)
        assert len(store.freed) == len(set(store.freed))
        for slot in store.slots.live:
            assert slot.leases == sum(lease.slot is slot for lease in granted)
    store.timers.run_due(now + 1000)
    assert store.slots.live == ()
    assert len(store.leases) == 0
