"""The media worker as a process: what it prepares, what it refuses, in which order it answers, and how it ends."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from encoder_svc.media.image import ImageProbe
from encoder_svc.models.registry import open_adapter
from encoder_svc.shared_memory import SharedMemory
from encoder_svc.tensors import tensor_view
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from epd.internal.v1.media_worker_pb2 import DropItem, InputGrant, Measured, MediaCommand, MediaReport, Prepare
from tests.children import Child, await_death, held, media_worker

ARENA_BYTES = 32 << 20
MAX_PIXELS = 20_000_000


def picture(width: int, height: int, kind: str = "PNG") -> bytes:
    values = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(values).save(file, kind)
    return file.getvalue()


def one_colour(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height)).save(file, "PNG", compress_level=1)
    return file.getvalue()


@pytest.fixture(scope="module")
def arena() -> Iterator[SharedMemory]:
    block = SharedMemory.create("input", ARENA_BYTES)
    yield block
    block.close()


@pytest.fixture(scope="module")
def worker(tiny_checkpoint: Path, arena: SharedMemory) -> Iterator[Child[MediaReport]]:
    """One worker for all tests that leave it alive."""
    with media_worker(tiny_checkpoint, arena, max_image_pixels=MAX_PIXELS) as child:
        yield child


def prepare(worker: Child[MediaReport], part: int, *files: bytes, **fields: object) -> None:
    item = MediaItem(**{"modality": Modality.MODALITY_IMAGE, **fields})  # type: ignore[arg-type]
    worker.send(MediaCommand(prepare=Prepare(part=part, item=item)), *files)


def grant(worker: Child[MediaReport], part: int, offset: int) -> None:
    worker.send(MediaCommand(grant=InputGrant(part=part, offset=offset)))


def drop(worker: Child[MediaReport], part: int) -> None:
    worker.send(MediaCommand(drop=DropItem(part=part)))


def expect_measured(worker: Child[MediaReport], part: int) -> Measured:
    measured = worker.receive_kind("measured").measured
    assert measured.part == part
    return measured


def expect_prepared(worker: Child[MediaReport], part: int) -> None:
    prepared = worker.receive_kind("prepared").prepared
    assert prepared.part == part
    assert prepared.prepare_nanoseconds > 0


def expect_failed(worker: Child[MediaReport], part: int) -> tuple[str, str]:
    failed = worker.receive_kind("failed").failed
    assert failed.part == part
    return failed.reason, failed.message


def assert_serves(worker: Child[MediaReport]) -> None:
    """It prepares a good item, and has nothing else to say."""
    prepare(worker, 999, picture(56, 56))
    expect_measured(worker, 999)
    grant(worker, 999, 0)
    expect_prepared(worker, 999)
    assert worker.silent()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF"])
def test_input_in_shared_memory_is_the_adapters(
    worker: Child[MediaReport], arena: SharedMemory, tiny_checkpoint: Path, kind: str
) -> None:
    data = picture(120, 90, kind)
    prepare(worker, 1, data)
    measured = expect_measured(worker, 1)
    offset = 4096
    guard = arena.array(offset + measured.inputs[0].nbytes, 64)
    guard[:] = 0xA5
    grant(worker, 1, offset)
    expect_prepared(worker, 1)

    adapter = open_adapter(tiny_checkpoint, "float32")
    probe = ImageProbe(data, MAX_PIXELS)
    item = MediaItem(modality=Modality.MODALITY_IMAGE)
    layout = adapter.measure(item, probe)
    assert layout.chunk == measured.layout
    assert list(layout.inputs) == list(measured.inputs)
    (expected,) = adapter.prepare(item, probe, layout)
    assert torch.equal(tensor_view(arena, offset, measured.inputs[0].tensors[0]), expected)
    assert (guard == 0xA5).all()


BAD: dict[str, tuple[tuple[bytes, ...], dict[str, object], str]] = {
    "no file": ((), {}, "MEDIA_EMPTY"),
    "no bytes": ((b"",), {}, "MEDIA_EMPTY"),
    "text": ((b"no image at all " * 9,), {}, "MEDIA_UNRECOGNIZED"),
    "truncated": ((picture(64, 64, "JPEG")[:-400],), {}, "MEDIA_TRUNCATED"),
    "damaged": ((picture(64, 64)[:200] + b"\0" * 64 + picture(64, 64)[264:],), {}, "MEDIA_CORRUPT"),
    "too many pixels": ((one_colour(5000, 4001),), {}, "MEDIA_TOO_LARGE"),
    "too long and thin": ((picture(1, 2000),), {}, "MEDIA_UNSUPPORTED"),
    "video": ((picture(64, 64),), {"modality": Modality.MODALITY_VIDEO}, "MEDIA_UNRECOGNIZED"),
    "audio": ((picture(64, 64),), {"modality": Modality.MODALITY_AUDIO}, "MODALITY_UNSUPPORTED"),
    "no modality": ((picture(64, 64),), {"modality": 0}, "MODALITY_UNSUPPORTED"),
}


@pytest.mark.parametrize("name", BAD)
def test_f05_f06_a_bad_item_fails_alone_and_the_worker_goes_on(worker: Child[MediaReport], name: str) -> None:
    files, fields, reason = BAD[name]
    prepare(worker, 2, *files, **fields)
    report = worker.receive()
    if report.WhichOneof("report") == "measured":  # the header was good
        report = worker.receive()
    assert report.failed.part == 2
    assert report.failed.reason == reason
    assert report.failed.message
    assert_serves(worker)


def test_1x1_is_prepared(worker: Child[MediaReport]) -> None:
    prepare(worker, 4, picture(1, 1))
    assert expect_measured(worker, 4).layout.image.width == 1
    grant(worker, 4, 0)
    expect_prepared(worker, 4)


def test_items_are_answered_in_their_order(worker: Child[MediaReport]) -> None:
    with held(worker):  # so that all of them are queued
        for part in range(10, 14):
            prepare(worker, part, b"" if part == 11 else picture(56, 56 + part))
        grant(worker, 13, 3 << 20)
    expect_measured(worker, 10)
    assert worker.silent(), "an item waits for space, and the next overtakes it"
    grant(worker, 10, 0)
    expect_prepared(worker, 10)
    assert expect_failed(worker, 11)[0] == "MEDIA_EMPTY"
    expect_measured(worker, 12)
    grant(worker, 12, 1 << 20)
    expect_prepared(worker, 12)
    expect_measured(worker, 13)
    expect_prepared(worker, 13)


def test_an_item_is_dropped_while_it_waits_for_space(worker: Child[MediaReport]) -> None:
    prepare(worker, 20, picture(56, 56))
    expect_measured(worker, 20)
    drop(worker, 20)
    assert expect_failed(worker, 20) == ("DROPPED", "")
    assert_serves(worker)


def test_an_item_is_only_measured_and_then_prepared_when_it_comes_again(worker: Child[MediaReport]) -> None:
    item = MediaItem(modality=Modality.MODALITY_IMAGE)
    worker.send(MediaCommand(prepare=Prepare(part=1, item=item, measure_only=True)), picture(60, 60))
    prepare(worker, 2, picture(60, 60))
    measured = expect_measured(worker, 1)
    assert worker.receive_kind("failed").failed.reason == "DROPPED"
    grant(worker, 2, 0)
    assert expect_measured(worker, 2).inputs == measured.inputs
    assert worker.receive_kind("prepared").prepared.part == 2


def test_an_item_is_dropped_before_it_is_begun(worker: Child[MediaReport]) -> None:
    with held(worker):
        prepare(worker, 21, picture(56, 56))
        prepare(worker, 22, picture(56, 56))
        drop(worker, 22)
        drop(worker, 21)
    # ZeroMQ hands commands over one by one: the worker may have measured the first before it sees the drops.
    report = worker.receive()
    if report.WhichOneof("report") == "measured":
        report = worker.receive()
    assert (report.failed.part, report.failed.reason) == (21, "DROPPED")
    assert expect_failed(worker, 22)[0] == "DROPPED"
    assert_serves(worker)


def test_an_item_is_dropped_during_its_decode(worker: Child[MediaReport]) -> None:
    prepare(worker, 23, picture(3000, 2000))
    expect_measured(worker, 23)
    with held(worker):
        drop(worker, 23)
        grant(worker, 23, 0)
    assert expect_failed(worker, 23)[0] == "DROPPED"
    assert_serves(worker)


def test_commands_that_cross_with_an_answer_are_ignored(worker: Child[MediaReport]) -> None:
    prepare(worker, 24, b"")
    assert expect_failed(worker, 24)[0] == "MEDIA_EMPTY"
    grant(worker, 24, 0)
    drop(worker, 24)
    assert_serves(worker)


def test_f21_an_unexpected_fault_is_told_in_own_words(worker: Child[MediaReport]) -> None:
    prepare(worker, 25, picture(56, 56))
    expect_measured(worker, 25)
    grant(worker, 25, ARENA_BYTES - 8)
    reason, message = expect_failed(worker, 25)
    assert reason == "INTERNAL"
    assert str(ARENA_BYTES) not in message
    assert_serves(worker)


def test_interrupt_is_left_to_the_front(worker: Child[MediaReport]) -> None:
    worker.process.send_signal(signal.SIGINT)
    assert_serves(worker)


def test_kill_during_a_decode_leaves_nothing(tiny_checkpoint: Path, arena: SharedMemory) -> None:
    with media_worker(tiny_checkpoint, arena) as child:
        prepare(child, 1, picture(3000, 2000))
        expect_measured(child, 1)
        with held(child):
            maps = Path(f"/proc/{child.process.pid}/maps").read_text()
            child.process.kill()
        assert child.process.wait() == -signal.SIGKILL
        assert "memfd:encoder-svc:input" in maps
        assert "/dev/shm" not in maps
    with media_worker(tiny_checkpoint, arena) as next_life:
        assert_serves(next_life)


def test_it_never_imports_transformers(tiny_checkpoint: Path, arena: SharedMemory, tmp_path: Path) -> None:
    """Real imports of a real worker that has prepared an item, as the interpreter tells them."""
    told = tmp_path / "imports"
    with (
        told.open("wb") as stderr,
        media_worker(tiny_checkpoint, arena, environment={"PYTHONPROFILEIMPORTTIME": "1"}, stderr=stderr) as child,
    ):
        assert_serves(child)
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in told.read_text().splitlines() if "|" in line}
    assert {"torch", "PIL", "encoder_svc"} <= imported
    assert not imported & {"transformers", "grpc", "mooncake", "tokenizers", "scipy", "pandas"}


def test_a_checkpoint_that_cannot_be_served_is_told(tmp_path: Path, arena: SharedMemory) -> None:
    child = Child("encoder_svc.media.worker", MediaReport, [arena])
    try:
        child.receive_kind("hello")
        command = MediaCommand()
        command.configure.model = str(tmp_path / "nowhere")
        command.configure.dtype = "float32"
        command.configure.input_arena_fd = arena.descriptor
        command.configure.input_arena_bytes = arena.size
        child.send(command)
        assert "does not exist" in child.receive_kind("child_failed").child_failed.message
        assert child.process.wait() == 1
    finally:
        child.close()


def test_without_a_front_it_ends_at_once(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "encoder_svc.media.worker", f"ipc://{tmp_path}/nobody"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "front" in result.stderr
    assert "Traceback" not in result.stderr


FRONT = """
import sys
from pathlib import Path
from epd.internal.v1.media_worker_pb2 import MediaCommand
from encoder_svc.shared_memory import SharedMemory
from tests.children import media_worker
command = MediaCommand()
command.prepare.part = 1
command.prepare.item.modality = 1
arena = SharedMemory.create("input", 32 << 20)
with media_worker(Path(sys.argv[1]), arena) as child:
    child.send(command, Path(sys.argv[2]).read_bytes())
    child.receive_kind("measured")
    print(child.process.pid, flush=True)
    child.receive()
"""


def test_it_dies_with_the_front_during_a_decode(tiny_checkpoint: Path, tmp_path: Path) -> None:
    image = tmp_path / "image"
    image.write_bytes(picture(4000, 4000))
    with subprocess.Popen(
        [sys.executable, "-c", FRONT, str(tiny_checkpoint), str(image)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as front:
        assert front.stdout is not None
        worker_pid = int(front.stdout.readline())
        os.kill(worker_pid, 0)
        front.kill()
    await_death(worker_pid)


def test_f20_an_item_that_takes_too_much_memory_fails_alone(tiny_checkpoint: Path, arena: SharedMemory) -> None:
    with media_worker(tiny_checkpoint, arena, max_image_pixels=10**9, memory_bytes=512 << 20) as worker:
        # Few bytes of file, 675 MB of pixels: within the limit of pixels, beyond that of memory.
        prepare(worker, 2, one_colour(15_000, 15_000))
        expect_measured(worker, 2)
        grant(worker, 2, 0)
        report = worker.receive()
        assert (report.failed.part, report.failed.reason) == (2, "MEDIA_TOO_LARGE")
        assert_serves(worker)
