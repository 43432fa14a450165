"""Files on a file system that hangs: they wait in bounded number and time, and hold up nobody else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.fetch import Fetcher
from encoder_svc.media.fetch_policy import FetchPolicy
from encoder_svc.media.file_reads import FileReads
from tests.waiting import PATIENCE_SECONDS, eventually

THREADS = 2
LONG = 10 * PATIENCE_SECONDS


class HangingDisk:
    """Reads that begin, and come back when the test says so."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.goes_on = threading.Event()

    def read(self) -> bytes:
        self.begun.release()
        assert self.goes_on.wait(LONG)
        return b"late"


@pytest.fixture
def disk() -> Iterator[HangingDisk]:
    hanging = HangingDisk()
    yield hanging
    hanging.goes_on.set()


async def hanging_reads(reads: FileReads, disk: HangingDisk, number: int) -> list[asyncio.Task[bytes]]:
    """Some that have begun."""
    tasks = [asyncio.create_task(reads.read(disk.read)) for _ in range(number)]
    for _ in tasks:
        assert await asyncio.to_thread(disk.begun.acquire, timeout=PATIENCE_SECONDS)
    return tasks


async def test_reads_that_are_given_up_leave_nothing_waiting(disk: HangingDisk) -> None:
    """Only those that a thread is at still cost something, and these come back."""
    reads = FileReads(THREADS, LONG)
    hanging = await hanging_reads(reads, disk, THREADS)
    waiting = [asyncio.create_task(reads.read(lambda: b"never read")) for _ in range(100)]
    await asyncio.sleep(0)
    for task in (*hanging, *waiting):
        task.cancel()
    await asyncio.gather(*hanging, *waiting, return_exceptions=True)
    assert reads._threads._work_queue.qsize() == 0
    disk.goes_on.set()
    assert await asyncio.wait_for(reads.read(lambda: b"file"), PATIENCE_SECONDS) == b"file"
    reads.close()


async def test_files_are_refused_at_once_while_all_threads_hang(disk: HangingDisk) -> None:
    reads = FileReads(THREADS, 0.1)
    hanging = await hanging_reads(reads, disk, THREADS)
    waiting = asyncio.create_task(reads.read(lambda: b"file"))

    async def is_refused() -> bool:
        with pytest.raises((ServiceError, TimeoutError)) as failed:
            await asyncio.wait_for(reads.read(lambda: b"file"), 0.01)
        return isinstance(failed.value, ServiceError) and failed.value.reason is Reason.FETCH_FAILED

    await eventually(is_refused)
    disk.goes_on.set()
    assert await asyncio.gather(*hanging, waiting) == [b"late"] * THREADS + [b"file"]
    assert await reads.read(lambda: b"file") == b"file"
    reads.close()


async def test_other_addresses_are_fetched_while_files_hang(tmp_path: Path, disk: HangingDisk) -> None:
    (tmp_path / "cat.jpg").write_bytes(b"cat")
    policy = FetchPolicy(schemes=frozenset({"file", "data"}), roots=(tmp_path,), max_seconds=1.0)
    async with Fetcher(policy) as fetcher:
        hanging = await hanging_reads(fetcher._files, disk, 4)
        with pytest.raises(ServiceError) as failed:
            await fetcher.fetch(f"file://{tmp_path}/cat.jpg")
        assert failed.value.reason in {Reason.FETCH_TIMEOUT, Reason.FETCH_FAILED}
        large = "data:," + "x" * 100_000
        assert len(await fetcher.fetch(large)) == 100_000
        disk.goes_on.set()
        await asyncio.gather(*hanging)
        assert await fetcher.fetch(f"file://{tmp_path}/cat.jpg") == b"cat"
