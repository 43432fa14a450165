from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_svc.runtime.slots import SlotState, SlotTable, footprint
from epd import slot_header
from tests.runtime.recording_hands import layout


def header(arena: bytearray, offset: int) -> tuple[bytes, int, int, int, bytes]:
    """The header's fields, unpacked by the published layout."""
    unpacked: tuple[bytes, int, int, int, bytes] = struct.unpack_from("<8sQQQ16s16x", arena, offset)
    return unpacked


def test_a_slot_goes_from_reserved_to_filled_to_free() -> None:
    arena = bytearray(1024)
    table = SlotTable(0, memoryview(arena))
    slot = table.reserve(100)
    assert slot is not None
    assert (slot.state, slot.generation, slot.payload_offset) == (SlotState.RESERVED, 1, slot.offset + 64)
    assert (table.reserved_bytes, table.leased_bytes) == (100, 0)
    table.fill(slot, layout(), 77, None)
    assert (table.reserved_bytes, table.leased_bytes) == (0, 0)
    table.lease(slot)
    assert (table.reserved_bytes, table.leased_bytes) == (0, 100)
    assert table.live == (slot,)
    table.unlease(slot)
    assert slot.state is SlotState.FREE
    assert (table.reserved_bytes, table.leased_bytes, len(table.live)) == (0, 0, 0)


def test_the_header_says_what_the_contract_publishes() -> None:
    arena = bytearray(1024)
    table = SlotTable(0, memoryview(arena))
    slot = table.reserve(100)
    assert slot is not None
    table.fill(slot, layout(), 0xFFFF_FFFF_FFFF_FFFF, None)
    assert header(arena, slot.offset) == (b"EPDSLOT1", 1, 100, 0xFFFF_FFFF_FFFF_FFFF, slot.key)
    assert len(slot.key) == 16
    assert slot_header.SIZE == 64
    assert arena[slot.offset + 48 : slot.offset + 64] == bytes(16)


def test_the_generation_word_is_zero_whenever_a_slot_may_not_be_read() -> None:
    arena = bytearray(b"\xff" * 1024)
    table = SlotTable(0, memoryview(arena))
    slot = table.reserve(100)
    assert slot is not None
    assert slot_header.read_generation(memoryview(arena), slot.offset) == 0
    table.fill(slot, layout(), 1, None)
    assert slot_header.read_generation(memoryview(arena), slot.offset) == slot.generation
    table.free(slot)
    assert slot_header.read_generation(memoryview(arena), slot.offset) == 0


def test_the_generation_is_written_last(monkeypatch: pytest.MonkeyPatch) -> None:
    arena = bytearray(256)
    seen: list[tuple[bytes, int, int, int, bytes]] = []

    class Watched:
        def pack_into(self, block: memoryview, offset: int, generation: int) -> None:
            seen.append(header(arena, 0))
            struct.pack_into("<Q", block, offset, generation)

    monkeypatch.setattr(slot_header, "_GENERATION", Watched())
    slot_header.open_slot(memoryview(arena), 0, 9, 100, 5, b"k" * 16)
    assert seen == [(b"EPDSLOT1", 0, 100, 5, b"k" * 16)]
    assert header(arena, 0)[1] == 9


def test_a_reserved_slot_is_freed_without_having_been_filled() -> None:
    table = SlotTable(0, memoryview(bytearray(256)))
    slot = table.reserve(10)
    assert slot is not None
    table.free(slot)
    assert (table.reserved_bytes, table.leased_bytes) == (0, 0)


def test_the_largest_payload_is_the_capacity() -> None:
    table = SlotTable(0, memoryview(bytearray(1000)))
    largest = table.capacity - slot_header.SIZE
    assert footprint(largest) == table.capacity
    assert table.reserve(largest + 1) is None
    assert table.reserve(largest) is not None
    assert table.reserve(0) is None


def test_f12_every_use_of_a_place_has_another_generation_and_key() -> None:
    table = SlotTable(0, memoryview(bytearray(256)))
    seen = set()
    for _ in range(20):
        slot = table.reserve(100)
        assert slot is not None
        assert slot.offset == 0
        seen.add((slot.generation, slot.key))
        table.free(slot)
    assert {generation for generation, _ in seen} == set(range(1, 21))
    assert len({key for _, key in seen}) == 20


def test_a_slot_with_a_live_lease_is_not_freed() -> None:
    table = SlotTable(0, memoryview(bytearray(256)))
    slot = table.reserve(10)
    assert slot is not None
    table.fill(slot, layout(), 1, None)
    table.lease(slot)
    with pytest.raises(AssertionError, match="live lease"):
        table.free(slot)
    assert slot_header.read_generation(memoryview(table._arena), slot.offset) == slot.generation


def test_f25_a_slot_is_freed_once_even_when_its_memory_is_used_again() -> None:
    table = SlotTable(0, memoryview(bytearray(256)))
    old = table.reserve(10)
    assert old is not None
    table.free(old)
    new = table.reserve(10)
    assert new is not None
    assert new.offset == old.offset
    table.fill(new, layout(), 1, None)
    with pytest.raises(AssertionError):
        table.free(old)
    assert table.live == (new,)
    assert slot_header.read_generation(table._arena, new.offset) == new.generation


@given(st.lists(st.one_of(st.integers(0, 400), st.integers(-8, -1)), max_size=40))
def test_live_slots_never_overlap_and_generations_grow(steps: list[int]) -> None:
    arena = bytearray(4096)
    table = SlotTable(0, memoryview(arena))
    last = 0
    for step in steps:
        if step >= 0:
            slot = table.reserve(step)
            if slot is None:
                continue
            assert slot.generation > last
            last = slot.generation
            if step % 2:
                table.fill(slot, layout(), step, None)
        elif table.live:
            table.free(table.live[step % len(table.live)])
        ends = [0]
        for slot in sorted(table.live, key=lambda slot: slot.offset):
            assert slot.offset >= ends[-1]
            ends.append(slot.payload_offset + slot.nbytes)
            filled = slot.state is SlotState.FILLED
            assert slot_header.read_generation(table._arena, slot.offset) == (slot.generation if filled else 0)
        assert ends[-1] <= len(arena)
