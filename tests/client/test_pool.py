"""A pool's memory: who waits, who gets, and when it comes back."""

from __future__ import annotations

import asyncio
import gc
import mmap
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from encoder_client.errors import PoolError
from encoder_client.pool.embedding_pool import EmbeddingPool, Slot
from tests.waiting import PATIENCE_SECONDS


async def take(pool: EmbeddingPool, nbytes: int, prompt: str = "p") -> Slot:
    return (await pool.reserve(prompt, [nbytes])).take(0)


async def test_a_slot_comes_back_when_its_last_view_dies() -> None:
    pool = EmbeddingPool(4096)
    slot = await take(pool, 1024)
    array = np.frombuffer(slot.view, dtype=np.float32)
    tensor = torch.from_numpy(array)[3:7]
    raw = torch.frombuffer(slot.memory, dtype=torch.float32)
    del slot, array
    gc.collect()
    assert pool.statistics.slots == 1
    del tensor
    gc.collect()
    assert pool.statistics.slots == 1
    del raw
    gc.collect()
    assert pool.statistics.slots == 0


async def test_views_see_the_same_memory() -> None:
    pool = EmbeddingPool(4096)
    slot = await take(pool, 16)
    slot.view[:4] = b"\0\0\x80\x3f"
    assert np.frombuffer(slot.view, dtype="<f4")[0] == 1.0
    assert np.frombuffer(slot.view, dtype=np.uint8).ctypes.data == slot.address
    assert torch.frombuffer(slot.memory, dtype=torch.float32).data_ptr() == slot.address
    assert pool.address <= slot.address < pool.address + pool.capacity


async def test_who_waits_is_woken_by_a_view_that_dies_in_another_thread() -> None:
    pool = EmbeddingPool(1024)
    held = [np.frombuffer((await take(pool, 1024)).view, dtype=np.uint8)]
    waiting = asyncio.create_task(pool.reserve("q", [512]))
    await asyncio.sleep(0)
    assert pool.statistics.waiting == 1
    thread = threading.Thread(target=held.clear)
    thread.start()
    async with asyncio.timeout(PATIENCE_SECONDS), await waiting:
        assert pool.statistics.slots == 1
    thread.join()


async def test_a_wait_is_bounded() -> None:
    pool = EmbeddingPool(1024)
    slot = await take(pool, 1024)
    with pytest.raises(PoolError, match=r"no space for 64 bytes came free in 0\.01 s"):
        await pool.reserve("q", [64], timeout=0.01)
    assert pool.statistics.expired == 1
    assert pool.statistics.waiting == 0
    del slot


async def test_more_than_the_pool_is_refused_at_once() -> None:
    pool = EmbeddingPool(1024)
    with pytest.raises(PoolError, match="take 2048 bytes, and the pool has 1024"):
        await pool.reserve("q", [1024, 1024])


async def test_a_cancelled_wait_leaves_the_queue() -> None:
    pool = EmbeddingPool(1024)
    slot = await take(pool, 1024)
    large = asyncio.create_task(pool.reserve("large", [1024]))
    small = asyncio.create_task(pool.reserve("small", [64]))
    await asyncio.sleep(0)
    large.cancel()
    await asyncio.wait([large])
    del slot
    async with asyncio.timeout(PATIENCE_SECONDS), await small:
        assert pool.statistics.slots == 1


async def test_a_wait_that_is_cancelled_after_it_was_granted_gives_the_space_back() -> None:
    pool = EmbeddingPool(1024)
    slot = await take(pool, 1024)
    waiting = asyncio.create_task(pool.reserve("q", [1024]))
    await asyncio.sleep(0)
    del slot
    await asyncio.sleep(0)  # the loop has granted it, and the task has not run yet
    waiting.cancel()
    await asyncio.wait([waiting])
    if waiting.cancelled():
        assert pool.statistics.slots == 0
    else:
        waiting.result().close()
    gc.collect()
    assert pool.statistics.used == 0


async def test_what_is_not_taken_from_a_reservation_comes_back() -> None:
    pool = EmbeddingPool(4096)
    async with await pool.reserve("p", [64, 128, 256]) as reservation:
        slot = reservation.take(1)
    gc.collect()
    assert pool.statistics.slots == 1
    assert slot.nbytes == 128


async def test_a_part_may_turn_out_smaller_than_announced() -> None:
    pool = EmbeddingPool(4096)
    reservation = await pool.reserve("p", [256])
    with pytest.raises(KeyError):
        reservation.take(1)
    slot = reservation.take(0, 100)
    reservation.close()
    assert slot.nbytes == 100
    assert pool.statistics.slots == 1
    del slot
    gc.collect()
    assert pool.statistics.slots == 0


async def test_a_part_that_turns_out_larger_is_refused() -> None:
    pool = EmbeddingPool(4096)
    with pytest.raises(PoolError, match="64 bytes are reserved, and 65 are needed"):
        (await pool.reserve("p", [64])).take(0, 65)


async def test_f38_wishes_are_served_in_their_order() -> None:
    pool = EmbeddingPool(1024)
    slots = [await take(pool, 512, "a"), await take(pool, 512, "b")]
    order: list[str] = []

    async def use(prompt: str, nbytes: int) -> None:
        async with await pool.reserve(prompt, [nbytes]):
            order.append(prompt)

    tasks = []
    for prompt, nbytes in (("large", 1024), ("small", 64), ("smaller", 32)):
        tasks.append(asyncio.create_task(use(prompt, nbytes)))
        await asyncio.sleep(0)
    slots.pop()
    await asyncio.sleep(0)
    assert not order  # half of the pool is free, and the small ones wait behind the large one
    slots.clear()
    async with asyncio.timeout(PATIENCE_SECONDS):
        await asyncio.gather(*tasks)
    assert order == ["large", "small", "smaller"]


async def test_untouched_pages_cost_nothing() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    before = resident()
    pool = EmbeddingPool(1 << 30)
    slot = await take(pool, 512 << 20)
    assert resident() - before < 64 << 20
    del slot
