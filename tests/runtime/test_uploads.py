"""Media that are sent ahead: bounded, checked, kept for a while, and nobody else's."""

from __future__ import annotations

import contextlib
import hashlib
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.runtime.commands import EncodeCommand, ItemCommand
from encoder_svc.runtime.timers import Timers
from encoder_svc.runtime.uploads import Upload, Uploads
from epd.encoder.v1.encoder_service_pb2 import CachePolicy
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from tests.runtime.recording_hands import Brain, encode_command

SECONDS = 120.0


class Server:
    """Uploads, with their clock."""

    def __init__(self) -> None:
        self.timers = Timers()
        self.uploads = Uploads(max_file_bytes=100, max_bytes=250, seconds=SECONDS, timers=self.timers)

    def whole(self, file: bytes = b"abc", identity: str = "", now: float = 0.0) -> Upload:
        """A file that is here."""
        upload = self.uploads.begin(identity, len(file), now)
        self.uploads.add(upload, file)
        self.uploads.finish(upload, b"", now)
        return upload


def held(upload: Upload) -> int:
    """Bytes that are kept of a file."""
    return len(upload.buffer.getvalue())


def reason(fault: pytest.ExceptionInfo[ServiceError]) -> Reason:
    """Why something was refused."""
    return fault.value.reason


def test_a_file_comes_in_pieces_and_is_taken_whole_as_often_as_one_likes() -> None:
    server = Server()
    upload = server.uploads.begin("me", 6, 0.0)
    for piece in (b"ab", b"", b"cde", b"f"):
        server.uploads.add(upload, piece)
    digest = hashlib.sha256(b"abcdef").digest()
    assert server.uploads.finish(upload, digest, 0.0) == digest
    for _ in range(3):
        assert server.uploads.take("me", upload.id) == (b"abcdef", digest)
    assert server.uploads.take("me", upload.id)[0] is server.uploads.take("me", upload.id)[0], "no copy for each"


def test_a_file_that_comes_in_single_bytes_costs_no_more_memory_than_another() -> None:
    server = Server()
    upload = server.uploads.begin("", 100, 0.0)
    tracemalloc.start()
    for index in range(10_000):
        server.uploads.add(upload, b"x" if index % 100 == 0 else b"")
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    server.uploads.finish(upload, b"", 0.0)
    assert server.uploads.take("", upload.id)[0] == b"x" * 100
    assert kept < 5_000


def test_an_upload_belongs_to_the_identity_that_sent_it() -> None:
    server = Server()
    upload = server.whole(identity="me")
    for identity in ("", "them"):
        with pytest.raises(ServiceError) as fault:
            server.uploads.take(identity, upload.id)
        assert reason(fault) is Reason.UPLOAD_UNKNOWN


def test_ids_are_not_to_be_guessed() -> None:
    server = Server()
    ids = {server.whole().id for _ in range(20)}
    assert len(ids) == 20
    assert all(len(name) == 32 for name in ids)


@pytest.mark.parametrize(("nbytes", "why"), [(0, Reason.MEDIA_EMPTY), (101, Reason.MEDIA_TOO_LARGE)])
def test_a_file_of_no_use_is_refused_before_it_is_sent(nbytes: int, why: Reason) -> None:
    server = Server()
    with pytest.raises(ServiceError) as fault:
        server.uploads.begin("", nbytes, 0.0)
    assert reason(fault) is why
    assert fault.value.field == "header.total_bytes"
    assert server.uploads.bytes == 0


def test_f02_all_files_together_are_bounded_by_what_was_announced() -> None:
    server = Server()
    first, second = server.uploads.begin("", 100, 0.0), server.uploads.begin("", 100, 0.0)
    with pytest.raises(ServiceError) as fault:
        server.uploads.begin("", 51, 0.0)
    assert reason(fault) is Reason.ADMISSION_FULL
    assert fault.value.retry_after is not None
    server.uploads.begin("", 50, 0.0)
    server.uploads.abandon(first)
    server.uploads.abandon(first)
    assert server.uploads.bytes == 150
    server.uploads.begin("", 100, 0.0)
    server.uploads.abandon(second)
    assert server.uploads.bytes == 150


def test_more_than_announced_is_refused() -> None:
    server = Server()
    upload = server.uploads.begin("", 3, 0.0)
    server.uploads.add(upload, b"abc")
    with pytest.raises(ServiceError) as fault:
        server.uploads.add(upload, b"d")
    assert reason(fault) is Reason.REQUEST_INVALID
    assert held(upload) == 3, "it is not even kept"


def test_less_than_announced_is_refused() -> None:
    server = Server()
    upload = server.uploads.begin("", 3, 0.0)
    server.uploads.add(upload, b"ab")
    with pytest.raises(ServiceError) as fault:
        server.uploads.finish(upload, b"", 0.0)
    assert reason(fault) is Reason.MEDIA_TRUNCATED
    with pytest.raises(ServiceError):
        server.uploads.take("", upload.id)


def test_other_bytes_than_those_that_were_named_are_refused() -> None:
    server = Server()
    upload = server.uploads.begin("", 3, 0.0)
    server.uploads.add(upload, b"abc")
    with pytest.raises(ServiceError) as fault:
        server.uploads.finish(upload, hashlib.sha256(b"abd").digest(), 0.0)
    assert reason(fault) is Reason.MEDIA_DIGEST_MISMATCH
    with pytest.raises(ServiceError):
        server.uploads.take("", upload.id)
    server.uploads.abandon(upload)
    assert server.uploads.bytes == 0


def test_a_file_is_kept_for_a_while_from_its_last_byte() -> None:
    server = Server()
    upload = server.uploads.begin("", 3, 0.0)
    server.uploads.add(upload, b"abc")
    server.uploads.finish(upload, b"", 100.0)
    server.timers.run_due(100.0 + SECONDS - 0.1)
    assert server.uploads.take("", upload.id)[0] == b"abc"
    server.timers.run_due(100.0 + SECONDS)
    with pytest.raises(ServiceError) as fault:
        server.uploads.take("", upload.id)
    assert reason(fault) is Reason.UPLOAD_UNKNOWN
    assert (server.uploads.bytes, held(upload)) == (0, 0)
    assert server.timers.next_due() is None


def test_a_file_that_does_not_come_is_given_up() -> None:
    server = Server()
    upload = server.uploads.begin("", 3, 0.0)
    server.uploads.add(upload, b"ab")
    server.timers.run_due(SECONDS)
    assert (server.uploads.bytes, held(upload)) == (0, 0)
    for step in (lambda: server.uploads.add(upload, b"c"), lambda: server.uploads.finish(upload, b"", SECONDS)):
        with pytest.raises(ServiceError) as fault:
            step()
        assert reason(fault) is Reason.UPLOAD_UNKNOWN
    server.uploads.abandon(upload)
    assert server.uploads.bytes == 0


def test_the_end_of_its_sender_does_not_take_a_file_that_is_whole() -> None:
    server = Server()
    upload = server.whole()
    server.uploads.abandon(upload)
    assert server.uploads.take("", upload.id)[0] == b"abc"


@given(
    st.lists(st.tuples(st.sampled_from(["begin", "add", "finish", "abandon", "pass"]), st.integers(0, 99)), max_size=60)
)
def test_the_bytes_are_always_those_of_what_is_there(steps: list[tuple[str, int]]) -> None:
    server, now = Server(), 0.0
    alive: list[Upload] = []
    for what, number in steps:
        upload = alive[number % len(alive)] if alive else None
        with contextlib.suppress(ServiceError):
            match what:
                case "begin":
                    alive.append(server.uploads.begin("", number, now))
                case "add" if upload is not None:
                    server.uploads.add(upload, bytes(number))
                case "finish" if upload is not None:
                    server.uploads.finish(upload, b"", now)
                case "abandon" if upload is not None:
                    server.uploads.abandon(upload)
                case "pass":
                    now += number
                    server.timers.run_due(now)
        there = [*server.uploads._open.values(), *server.uploads._whole.values()]
        assert server.uploads.bytes == sum(upload.total_bytes for upload in there) <= 250
        assert sum(map(held, alive)) <= server.uploads.bytes
    server.timers.run_due(now + SECONDS)
    assert server.uploads.bytes == 0


# As a source of requests.


def names_upload(number: int, upload_id: str, **wishes: object) -> EncodeCommand:
    """A request for what was uploaded."""
    given = {"policy": CachePolicy.CACHE_POLICY_USE, "prompt_id": f"p{number}", **wishes}
    command = encode_command(f"r{number}", content=0, **given)  # type: ignore[arg-type] # as named
    media = MediaItem(modality=Modality.MODALITY_IMAGE, upload_id=upload_id)
    return replace(command, items=(ItemCommand(media, ()),))


def upload_to(brain: Brain, file: bytes, identity: str = "") -> Upload:
    """A file that a server has."""
    uploads = brain.scheduler.uploads
    upload = uploads.begin(identity, len(file), brain.now)
    uploads.add(upload, file)
    uploads.finish(upload, b"", brain.now)
    return upload


def test_several_requests_may_name_one_upload_and_share_the_work() -> None:
    brain = Brain()
    upload = upload_to(brain, b"photograph")
    callers = [brain.submit(names_upload(number, upload.id)) for number in range(3)]
    (task,) = brain.hands.tasks[0]
    assert task.files == (b"photograph",)
    brain.run_all()
    assert [caller.chunk().nbytes for caller in callers] == [128] * 3
    assert brain.submit(names_upload(9, upload.id)).chunk().from_cache
    assert brain.hands.sources == {}


def test_an_upload_that_is_forgotten_while_it_is_encoded_stays_until_then() -> None:
    brain = Brain(upload_seconds=5.0)
    upload = upload_to(brain, b"photograph")
    caller = brain.submit(names_upload(1, upload.id))
    brain.advance(6.0)
    assert brain.hands.tasks[0][0].files == (b"photograph",)
    late = brain.submit(names_upload(2, upload.id))
    assert late.error().reason is Reason.UPLOAD_UNKNOWN
    brain.run_all()
    assert caller.chunk().nbytes == 128


def test_another_identity_does_not_find_it() -> None:
    brain = Brain()
    upload = upload_to(brain, b"photograph", "me")
    assert brain.submit(names_upload(1, upload.id, identity="them")).error().reason is Reason.UPLOAD_UNKNOWN
    assert brain.submit(names_upload(2, upload.id, identity="me")).ends == {}
    brain.run_all()


def test_a_part_whose_upload_is_unknown_fails_alone() -> None:
    brain = Brain()
    command = encode_command(parts=(0, 1))
    media = MediaItem(part_idx=0, modality=Modality.MODALITY_IMAGE, upload_id="no such")
    caller = brain.submit(replace(command, items=(ItemCommand(media, ()), command.items[1])))
    assert caller.error(0).reason is Reason.UPLOAD_UNKNOWN
    brain.run_all()
    assert caller.chunk(1).nbytes == 128
