from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from encoder_svc.child import FrontLink
from encoder_svc.link_messages import ENVELOPE_LIMIT, header
from encoder_svc.runtime.links import Link
from epd.internal.v1.media_worker_pb2 import MediaCommand, MediaReport, Prepare, Prepared
from tests.waiting import eventually


class Received:
    """Takes reports; fails at those that it is told to."""

    def __init__(self) -> None:
        self.parts: list[int] = []
        self.bad: set[int] = set()

    def __call__(self, envelope: bytes) -> None:
        part = MediaReport.FromString(envelope).prepared.part
        self.parts.append(part)
        if part in self.bad:
            raise ValueError(f"part {part} is bad")


class Ends:
    """A link, and its far end in this process."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.descriptor = os.dup(link.far)
        self.far = FrontLink(os.dup(link.far))
        link.handed_over()

    def report(self, part: int) -> None:
        """Sends a report from the far end."""
        self.far.send(MediaReport(prepared=Prepared(part=part)))

    def write(self, data: bytes) -> None:
        """Writes what need not be a report."""
        with socket.socket(fileno=os.dup(self.descriptor)) as end:
            end.sendall(data)

    def close(self) -> None:
        """Closes all ends."""
        self.link.close()
        self.link.close()
        os.close(self.descriptor)
        self.far.close()

    async def receive(self) -> tuple[MediaCommand, list[bytes]] | None:
        """The next command at the far end. None: the process there would end."""

        def receive() -> tuple[MediaCommand, list[bytes]] | None:
            try:
                return self.far.receive(MediaCommand)
            except SystemExit:
                return None

        return await asyncio.to_thread(receive)


@pytest.fixture
def received() -> Received:
    return Received()


@pytest.fixture
async def ends(received: Received) -> AsyncIterator[Ends]:
    pair = Ends(await Link.open(received))
    try:
        yield pair
    finally:
        pair.close()


@pytest.fixture
async def faults() -> list[dict[str, Any]]:
    """What the loop was told."""
    found: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, fault: found.append(fault))
    return found


async def test_reports_come_in_order(ends: Ends, received: Received) -> None:
    for part in range(500):
        ends.report(part)
    await eventually(lambda: len(received.parts) == 500)
    assert received.parts == list(range(500))


async def test_a_report_may_come_in_any_pieces(ends: Ends, received: Received) -> None:
    envelope = MediaReport(prepared=Prepared(part=7)).SerializeToString()
    data = 3 * (header(envelope, ()) + envelope)
    for at in range(len(data)):
        ends.write(data[at : at + 1])
        await asyncio.sleep(0)
    await eventually(lambda: received.parts == [7, 7, 7])


async def test_f06_a_report_that_cannot_be_taken_does_not_hide_those_behind_it(
    ends: Ends, received: Received, faults: list[dict[str, Any]]
) -> None:
    received.bad = {0, 1, 5}
    for part in range(10):
        ends.report(part)
    await eventually(lambda: len(received.parts) == 10)
    assert received.parts == list(range(10))
    assert [str(fault["exception"]) for fault in faults] == [f"part {part} is bad" for part in (0, 1, 5)]


@pytest.mark.parametrize(
    "data",
    [(ENVELOPE_LIMIT + 1).to_bytes(4, "little") + bytes(4), header(b"", [b"a file"]) + b"a file"],
    ids=["an envelope without measure", "a report with a file"],
)
async def test_what_is_no_report_ends_the_link(
    ends: Ends, received: Received, faults: list[dict[str, Any]], data: bytes
) -> None:
    """A child whose codec was taken over cannot make the front hold what it likes."""
    ends.report(0)
    await eventually(lambda: received.parts == [0])
    ends.write(data)
    await eventually(lambda: bool(faults))
    assert await ends.receive() is None


async def test_files_follow_the_envelope(ends: Ends) -> None:
    files = [b"", b"x" * 10, os.urandom(5_000_000), b""]
    ends.link.send(MediaCommand(prepare=Prepare(part=7)), files)
    ends.link.send(MediaCommand(prepare=Prepare(part=8)))
    for part, expected in ((7, files), (8, [])):
        assert await ends.receive() == (MediaCommand(prepare=Prepare(part=part)), expected)


async def test_a_child_that_does_not_read_holds_nobody(ends: Ends, received: Received) -> None:
    """The rest of a file waits for the child; the loop does not."""
    files = [bytes(5_000_000)]
    for part in range(3):
        ends.link.send(MediaCommand(prepare=Prepare(part=part)), files)
    ends.report(1)
    await eventually(lambda: received.parts == [1])
    assert ends.far.pending()
    for part in range(3):
        assert await ends.receive() == (MediaCommand(prepare=Prepare(part=part)), files)
    assert not ends.far.pending()


async def test_the_last_words_of_a_child_are_received(received: Received) -> None:
    link = await Link.open(received)
    ends = Ends(link)
    for part in range(5):
        ends.report(part)
    os.close(ends.descriptor)
    ends.far.close()
    await link.drain(60)
    assert received.parts == list(range(5))
    link.close()


async def test_a_child_whose_link_is_closed_ends(ends: Ends) -> None:
    ends.link.close()
    assert await ends.receive() is None
    with pytest.raises(SystemExit):
        ends.report(1)


async def test_the_receiving_thread_ends_when_another_ends_the_link_and_reports_arrive(
    ends: Ends, received: Received
) -> None:
    receiving = asyncio.create_task(ends.receive())
    ends.report(3)
    ends.far.end()
    assert await receiving is None
    await eventually(lambda: received.parts == [3])


async def test_sending_after_the_end_goes_nowhere(received: Received) -> None:
    link = await Link.open(received)
    link.close()
    link.send(MediaCommand(prepare=Prepare(part=1)), [bytes(100_000)])
