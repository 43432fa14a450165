"""Media brought by the event loop: small ones at once, large ones in a thread, and every fault told to its part."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime import media_sources
from encoder_svc.runtime.commands import ItemCommand
from encoder_svc.runtime.media_sources import MediaSources
from encoder_svc.runtime.scheduler import Scheduler
from epd import content_key
from epd.content_key import frames_digest
from epd.encoder.v1.media_pb2 import FrameSequence, MediaItem, Modality
from tests.runtime.recording_hands import Brain, Caller, RecordingHands, encode_command
from tests.waiting import eventually

AT_ONCE = media_sources._HASHED_AT_ONCE_BYTES
URI = "https://example.com/photograph.jpeg"


class Fetcher:
    """Gives a file, or an error, when it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self.cancelled = 0

    async def fetch(self, uri: str) -> bytes:
        self.asked.append(uri)
        try:
            return await asyncio.shield(self.answer)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise


class Told(Scheduler):
    """What a scheduler is told of media, and nothing else of it."""

    def __init__(self) -> None:
        self.files: dict[int, tuple[tuple[bytes, ...], bytes]] = {}
        self.errors: dict[int, ServiceError] = {}

    def sourced(self, key: int, files: tuple[bytes, ...], digest: bytes, seconds: float, now: float) -> None:
        assert seconds >= 0
        assert now > 0
        self.files[key] = (files, digest)

    def source_failed(self, key: int, error: ServiceError, now: float) -> None:
        assert now > 0
        self.errors[key] = error


class Setting:
    """Sources with a fetcher and a scheduler to tell."""

    def __init__(self) -> None:
        self.fetcher, self.told, self.changes = Fetcher(), Told(), 0
        self.sources = MediaSources(self.fetcher, asyncio.get_running_loop().time, self.changed)

    def changed(self) -> None:
        self.changes += 1

    def bring(self, key: int, *files: bytes, item: MediaItem | None = None) -> None:
        """Asks for a part's media: its files, or what its address gives."""
        if item is None:
            item = MediaItem(modality=Modality.MODALITY_IMAGE, uri="" if files else URI)
        self.sources.bring(self.told, key, item, files)

    @property
    def idle(self) -> bool:
        """Nothing is being brought."""
        return not self.sources._tasks


@pytest.fixture
async def setting() -> AsyncIterator[Setting]:
    made = Setting()
    yield made
    made.sources.close()
    await eventually(lambda: made.idle)
    if not made.fetcher.answer.done():
        made.fetcher.answer.cancel()


async def test_a_small_file_is_hashed_before_bring_returns(setting: Setting) -> None:
    setting.bring(1, b"small")
    assert setting.told.files == {1: ((b"small",), hashlib.sha256(b"small").digest())}
    assert setting.idle
    assert setting.changes == 0, "whoever asked tells of what changed"


async def test_a_large_file_is_hashed_in_a_thread(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    real = content_key.media_digest

    def digest(file: bytes) -> bytes:
        threads.append(threading.current_thread())
        return real(file)

    monkeypatch.setattr(media_sources, "media_digest", digest)
    file = bytes(AT_ONCE + 1)
    setting.bring(1, file)
    assert setting.told.files == {}
    await eventually(lambda: 1 in setting.told.files)
    assert setting.told.files[1] == ((file,), hashlib.sha256(file).digest())
    assert threading.main_thread() not in threads
    assert setting.changes == 1
    await eventually(lambda: setting.idle)


async def test_f01_many_small_files_in_one_turn_do_not_hold_the_loop(setting: Setting) -> None:
    half = bytes(AT_ONCE // 2)
    for key in range(5):
        setting.bring(key, half)
    assert sorted(setting.told.files) == [0, 1], "what more comes in the same turn goes to threads"
    await eventually(lambda: len(setting.told.files) == 5)
    setting.bring(9, half)
    assert 9 in setting.told.files, "a new turn has its own share"


async def test_an_empty_file_is_a_file(setting: Setting) -> None:
    setting.bring(1, b"")
    assert setting.told.files[1] == ((b"",), hashlib.sha256(b"").digest())


@pytest.mark.parametrize("nbytes", [5, AT_ONCE])
async def test_frames_have_the_digest_that_is_published(setting: Setting, nbytes: int) -> None:
    item = MediaItem(modality=Modality.MODALITY_VIDEO, frames=FrameSequence(fps=2.0))
    frames = (bytes(nbytes), b"b" * nbytes)
    setting.bring(1, *frames, item=item)
    await eventually(lambda: 1 in setting.told.files)
    assert setting.told.files[1] == (frames, frames_digest(frames, 2.0))


async def test_an_address_is_fetched_and_hashed(setting: Setting) -> None:
    setting.bring(1)
    await eventually(lambda: setting.fetcher.asked == [URI])
    assert setting.told.files == {}
    setting.fetcher.answer.set_result(b"fetched")
    await eventually(lambda: 1 in setting.told.files)
    assert setting.told.files[1] == ((b"fetched",), hashlib.sha256(b"fetched").digest())
    assert setting.changes == 1


async def test_the_fetchers_error_goes_to_the_part(setting: Setting) -> None:
    fault = ServiceError(Reason.FETCH_REFUSED, "own words")
    setting.fetcher.answer.set_exception(fault)
    setting.bring(1)
    await eventually(lambda: setting.told.errors == {1: fault})
    assert setting.changes == 1


async def test_f06_f21_a_fault_that_nobody_foresaw_ends_the_part_and_tells_nothing(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    setting.fetcher.answer.set_exception(OSError(f"secret address {URI}"))
    with caplog.at_level(logging.ERROR):
        setting.bring(1)
        await eventually(lambda: 1 in setting.told.errors)
    assert setting.told.errors[1].reason is Reason.INTERNAL
    assert "secret" not in setting.told.errors[1].message
    assert caplog.records[-1].exc_info is not None
    assert setting.changes == 1


async def test_a_fetch_that_is_cancelled_from_within_ends_the_part(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    setting.fetcher.answer.cancel()
    with caplog.at_level(logging.ERROR):
        setting.bring(1)
        await eventually(lambda: 1 in setting.told.errors)
    assert setting.told.errors[1].reason is Reason.INTERNAL
    await eventually(lambda: setting.idle)


@pytest.mark.parametrize("size", [1, AT_ONCE + 1])
async def test_f06_f21_media_that_the_scheduler_stumbles_over_end_their_part(
    setting: Setting, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    def stumbles(*_: object) -> None:
        raise ZeroDivisionError("secret state")

    monkeypatch.setattr(setting.told, "sourced", stumbles)
    with caplog.at_level(logging.ERROR):
        setting.bring(1, bytes(size))
        await eventually(lambda: 1 in setting.told.errors)
    assert setting.told.errors[1].reason is Reason.INTERNAL
    assert "secret" not in setting.told.errors[1].message
    assert caplog.records[-1].exc_info is not None
    await eventually(lambda: setting.idle)


async def test_what_is_not_wanted_is_given_up(setting: Setting) -> None:
    setting.bring(1)
    setting.bring(2)
    await eventually(lambda: len(setting.fetcher.asked) == 2)
    setting.sources.stop_bringing(1)
    setting.sources.stop_bringing(1)
    setting.sources.stop_bringing(99)
    await eventually(lambda: setting.fetcher.cancelled == 1)
    setting.fetcher.answer.set_result(b"x")
    await eventually(lambda: setting.idle)
    assert sorted(setting.told.files) == [2]
    assert setting.told.errors == {}


async def test_close_gives_up_everything(setting: Setting) -> None:
    for key in range(3):
        setting.bring(key)
    await eventually(lambda: len(setting.fetcher.asked) == 3)
    setting.sources.close()
    await eventually(lambda: setting.idle)
    assert (setting.told.files, setting.told.errors, setting.fetcher.cancelled) == ({}, {}, 3)


# With a real scheduler: who stops whom.


class Hands(RecordingHands):
    """Brings media for real."""

    def __init__(self, fetcher: Fetcher) -> None:
        super().__init__()
        self.brain: Brain | None = None
        self.media = MediaSources(fetcher, lambda: self.now, lambda: None)

    @property
    def now(self) -> float:
        """The brain's clock."""
        assert self.brain is not None
        return self.brain.now

    def bring(self, part: int, item: MediaItem, files: tuple[bytes, ...]) -> None:
        assert self.brain is not None
        self.media.bring(self.brain.scheduler, part, item, files)

    def stop_bringing(self, part: int) -> None:
        self.media.stop_bringing(part)


def from_address(name: str, brain: Brain) -> Caller:
    """Submits a request for what an address gives."""
    command = encode_command(name, prompt_id=name, content=0)
    item = command.items[0]
    item.item.uri = URI
    unhashed = ItemCommand(item.item, ())
    return brain.submit(replace(command, items=(unhashed,)))


async def test_a_part_that_ends_by_what_was_fetched_does_not_cancel_its_own_bringing() -> None:
    """Its content is in the cache: it ends inside of the report that its media are here."""
    fetcher = Fetcher()
    hands = Hands(fetcher)
    brain = hands.brain = Brain(hands=hands)
    fetcher.answer.set_result(b"fetched")
    first = from_address("r1", brain)
    await eventually(lambda: bool(hands.tasks[0]))
    brain.run_all()
    second = from_address("r2", brain)
    await eventually(lambda: second.completed is not None)
    assert second.chunk().from_cache
    assert first.chunk().slot_key == second.chunk().slot_key
    await eventually(lambda: not hands.media._tasks)
    assert fetcher.cancelled == 0


async def test_f26_a_deadline_ends_a_fetch() -> None:
    fetcher = Fetcher()
    hands = Hands(fetcher)
    brain = hands.brain = Brain(hands=hands)
    command = encode_command(deadline=brain.now + 5.0)
    command.items[0].item.uri = URI
    caller = brain.submit(replace(command, items=(ItemCommand(command.items[0].item, ()),)))
    await eventually(lambda: fetcher.asked == [URI])
    brain.advance(5.0)
    assert caller.error().reason is Reason.DEADLINE_EXCEEDED
    await eventually(lambda: not hands.media._tasks)
    assert fetcher.cancelled == 1
    fetcher.answer.cancel()
    brain.assert_empty()
