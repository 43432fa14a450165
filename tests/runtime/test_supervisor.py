"""The supervisor with real processes over real links."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from encoder_svc.runtime import supervisor
from encoder_svc.runtime.supervisor import ChildProgram, Supervisor
from epd.internal.v1.media_worker_pb2 import ConfigureMedia, MediaCommand, MediaReport, Prepare
from tests.waiting import eventually

ECHO = "tests.runtime.echo_child"
ROOT = Path(__file__).parents[2]


class Owner:
    """Greets each life with what it shall do, and keeps what it says."""

    def __init__(self, lives: list[str]) -> None:
        self.lives = lives
        self.supervisor: Supervisor | None = None
        self.pids: list[int] = []
        self.ready = 0
        self.deaths = 0
        self.answers: list[tuple[int, int]] = []

    def received(self, envelope: bytes) -> None:
        assert self.supervisor is not None
        report = MediaReport.FromString(envelope)
        match report.WhichOneof("report"):
            case "hello":
                self.pids.append(report.hello.pid)
                life = self.lives[min(len(self.pids), len(self.lives)) - 1]
                self.supervisor.greet(MediaCommand(configure=ConfigureMedia(model=life)))
            case "ready":
                self.ready += 1
                self.supervisor.succeed()
            case _:
                self.answers.append((report.prepared.part, report.prepared.prepare_nanoseconds))

    def lost(self) -> None:
        self.deaths += 1


class Child:
    """A supervised child."""

    def __init__(self, lives: list[str], **given: Any) -> None:
        self.owner = Owner(lives)
        program = ChildProgram(
            "the child",
            given.get("module", ECHO),
            given.get("descriptors", ()),
            given.get("start_seconds", 60.0),
        )
        self.supervisor = Supervisor(program, self.owner, given.get("pause_seconds", 0.01))
        self.owner.supervisor = self.supervisor
        self.task = asyncio.create_task(self.supervisor.run())

    async def stop(self) -> None:
        """Stops the child for good, and sees that nothing of it is left."""
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task
        for pid in self.owner.pids:
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)


Start = Callable[..., Child]


@pytest.fixture
async def start(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """Starts a child: ``start(lives)``; they are stopped when the test ends."""
    monkeypatch.chdir(ROOT)
    children: list[Child] = []

    def start_child(*lives: str, **given: Any) -> Child:
        children.append(Child(list(lives), **given))
        return children[-1]

    try:
        yield start_child
    finally:
        for child in children:
            await child.stop()


async def test_a_child_says_hello_is_configured_and_answers(start: Start) -> None:
    child = start("echo")
    await eventually(lambda: child.owner.ready == 1)
    child.supervisor.send(MediaCommand(prepare=Prepare(part=5)), [b"abc", b"de"])
    await eventually(lambda: child.owner.answers == [(5, 5)])
    assert child.supervisor.restarts == 0


async def test_files_of_5_mb_are_handed_over_without_waiting_for_the_child(start: Start) -> None:
    """The child stands still while they are sent, so a send that waited for it would never return."""
    child = start("echo")
    await eventually(lambda: child.owner.ready == 1)
    os.kill(child.owner.pids[0], signal.SIGSTOP)
    file = bytes(5_000_000)
    for part in range(20):
        child.supervisor.send(MediaCommand(prepare=Prepare(part=part)), [file])
    assert child.owner.answers == []
    os.kill(child.owner.pids[0], signal.SIGCONT)
    await eventually(lambda: len(child.owner.answers) == 20)
    assert child.owner.answers == [(part, 5_000_000) for part in range(20)]


async def test_f29_a_child_that_is_killed_is_started_again_and_works(start: Start) -> None:
    child = start("echo")
    await eventually(lambda: child.owner.ready == 1)
    os.kill(child.owner.pids[0], signal.SIGKILL)
    child.supervisor.send(MediaCommand(prepare=Prepare(part=1)))
    await eventually(lambda: child.owner.ready == 2)
    assert child.owner.deaths == child.supervisor.restarts == 1
    child.supervisor.send(MediaCommand(prepare=Prepare(part=2)))
    await eventually(lambda: (2, 0) in child.owner.answers)
    assert (1, 0) not in child.owner.answers, "what was for the first life does not reach the second"


async def test_a_child_is_killed_whatever_it_does(start: Start) -> None:
    child = start("echo")
    await eventually(lambda: child.owner.ready == 1)
    os.kill(child.owner.pids[0], signal.SIGSTOP)
    child.supervisor.kill()
    await eventually(lambda: child.owner.ready == 2)
    assert child.owner.deaths == 1


def pauses(caplog: pytest.LogCaptureFixture) -> list[float]:
    """The pauses before new lives, as they were logged."""
    found = []
    for record in caplog.records:
        if record.msg.endswith("starts again in %.1f s"):
            assert isinstance(record.args, tuple)
            assert isinstance(record.args[-1], float)
            found.append(record.args[-1])
    return found


async def test_the_pause_grows_while_lives_end_without_success_and_not_after_one(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    child = start("end", "end", "end", "ready-end", "end", "echo")
    with caplog.at_level(logging.WARNING):
        await eventually(lambda: child.owner.deaths == 5)
    assert pauses(caplog) == [0.01, 0.02, 0.04, 0.01, 0.02]
    assert "status 3" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGTERM, 40])
async def test_f29_a_child_that_dies_of_any_signal_is_started_again(start: Start, number: int) -> None:
    child = start(f"signal-{int(number)}", "echo")
    await eventually(lambda: child.owner.ready == 1 or child.task.done())
    assert child.owner.deaths == 1
    assert not child.task.done()


async def test_a_child_that_does_not_become_ready_in_time_is_stopped_and_started_again(start: Start) -> None:
    child = start("hang", "echo", start_seconds=5.0)
    await eventually(lambda: child.owner.ready == 1)
    assert child.owner.deaths >= 1


async def test_a_program_that_cannot_run_is_tried_again(start: Start) -> None:
    child = start("echo", module="tests.runtime.there_is_no_such_module")
    await eventually(lambda: child.owner.deaths >= 2)
    assert child.owner.pids == []


async def test_f29_a_child_that_cannot_even_be_started_is_tried_again(start: Start) -> None:
    """As when the machine is out of processes or descriptors for a moment."""
    child = start("echo", descriptors=(9999,))
    await eventually(lambda: child.owner.deaths >= 2 or child.task.done())
    assert not child.task.done()


async def test_a_child_that_starts_is_stopped_too(start: Start) -> None:
    child = start("echo")
    await eventually(lambda: len(child.owner.pids) == 1)
    await child.stop()


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")
async def test_a_child_that_the_kernel_does_not_let_die_holds_nobody_up(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    child = start("echo")
    await eventually(lambda: child.owner.ready == 1)
    (pid,) = child.owner.pids
    os.kill(pid, signal.SIGSTOP)  # so that it does not end by itself either
    with monkeypatch.context() as patches:
        # A process whose driver hangs takes SIGKILL only when it comes back.
        patches.setattr(subprocess.Popen, "kill", lambda _: None)
        patches.setattr(supervisor, "_DEATH_SECONDS", 0.01)
        child.task.cancel()
        await asyncio.wait([child.task])
    assert f"process {pid} is left to the kernel" in caplog.text
    os.kill(pid, signal.SIGKILL)
    await asyncio.to_thread(os.waitpid, pid, 0)
