from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zmq

from encoder_svc.runtime.links import Link
from epd.internal.v1.media_worker_pb2 import MediaCommand, MediaReport, Prepare, Prepared
from tests.waiting import eventually


def names(folder: Path) -> list[Path]:
    """What links have left in a folder: the folders that they make there, and their names in them."""
    return list(folder.iterdir())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where links make their private folders."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


class Ends:
    """A link, and its far end in this process."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], receive: Callable[[bytes], None]) -> None:
        self.link = Link(context, receive)
        self.far: zmq.Socket[bytes] = context.socket(zmq.PAIR)
        self.far.linger = 0
        self.far.set_hwm(0)
        self.far.connect(self.link.address)

    def report(self, part: int) -> None:
        """Sends a report from the far end."""
        self.far.send(MediaReport(prepared=Prepared(part=part)).SerializeToString())


class Received:
    """Takes reports; fails at those that it is told to."""

    def __init__(self) -> None:
        self.parts: list[int] = []
        self.bad: set[int] = set()
        self.before_failing: Callable[[], object] = lambda: None

    def __call__(self, envelope: bytes) -> None:
        part = MediaReport.FromString(envelope).prepared.part
        self.parts.append(part)
        if part in self.bad:
            self.before_failing()
            raise ValueError(f"part {part} is bad")


@pytest.fixture
def received() -> Received:
    return Received()


@pytest.fixture
async def ends(folder: Path, received: Received) -> AsyncIterator[Ends]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    pair = Ends(context, received)
    try:
        yield pair
    finally:
        pair.link.close()
        pair.link.close()
        pair.far.close()
        context.term()


async def test_reports_come_in_order(ends: Ends, received: Received) -> None:
    for part in range(500):
        ends.report(part)
    await eventually(lambda: len(received.parts) == 500)
    assert received.parts == list(range(500))


async def test_many_reports_leave_turns_to_others(ends: Ends, received: Received) -> None:
    for part in range(1000):
        ends.report(part)
    seen = [0]
    async with asyncio.timeout(20):
        while len(received.parts) < 1000:
            seen.append(len(received.parts))
            await asyncio.sleep(0)
    assert max(later - earlier for earlier, later in pairwise(seen)) <= 64


async def test_a_report_that_comes_in_while_we_send_is_seen(ends: Ends, received: Received) -> None:
    """ZeroMQ's descriptor tells of a change once: sending may take that notice away."""
    ends.report(0)
    await eventually(lambda: received.parts == [0])
    for part in range(1, 200):
        ends.report(part)
        ends.link._socket.poll(5000)
        ends.link.send(MediaCommand(prepare=Prepare(part=part)))
        await eventually(lambda part=part: part in received.parts)


async def test_f06_a_report_that_cannot_be_taken_does_not_hide_those_behind_it(ends: Ends, received: Received) -> None:
    loop, faults = asyncio.get_running_loop(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, fault: faults.append(fault))
    received.bad = {0, 1, 5}
    # The next is there before this one fails, so no new notice of it comes.
    received.before_failing = lambda: ends.link._socket.poll(5000)
    for part in range(10):
        ends.report(part)
    with contextlib.suppress(AssertionError):
        await eventually(lambda: len(received.parts) == 10, seconds=5)
    assert received.parts == list(range(10))
    assert len(faults) == 3, "each is told"


async def test_files_are_frames_behind_the_envelope(ends: Ends, received: Received) -> None:
    ends.report(0)
    await eventually(lambda: received.parts == [0])
    files = (b"", b"x" * 10, bytes(5_000_000))
    ends.link.send(MediaCommand(prepare=Prepare(part=7)), files)
    envelope, *frames = ends.far.recv_multipart()
    assert MediaCommand.FromString(envelope).prepare.part == 7
    assert tuple(frames) == files


async def test_sending_without_a_peer_or_after_the_end_goes_nowhere(received: Received) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    link = Link(context, received)
    link.send(MediaCommand(prepare=Prepare(part=1)), [bytes(100_000)])
    link.close()
    link.send(MediaCommand(prepare=Prepare(part=1)))
    context.term()


async def test_nobody_finds_a_link_that_is_hidden_and_nothing_is_left(
    ends: Ends, received: Received, folder: Path
) -> None:
    (name,) = names(folder)
    assert ends.link.address == f"ipc://{name}/link"
    assert name.stat().st_mode & 0o777 == 0o700, "no other user can even look"
    ends.report(0)
    await eventually(lambda: received.parts == [0])
    ends.link.hide()
    assert names(folder) == []
    ends.report(1)
    await eventually(lambda: received.parts == [0, 1])
    ends.link.hide()
    ends.link.close()
    assert names(folder) == []


async def test_a_link_that_nobody_used_leaves_no_name(folder: Path, received: Received) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    Link(context, received).close()
    context.term()
    assert names(folder) == []
