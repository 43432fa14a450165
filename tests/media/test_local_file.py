"""``file:`` addresses: regular files below the roots, and nothing else, by whatever way."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import pytest

from encoder_svc.errors import Reason, ServiceError
from encoder_svc.media.fetch import Fetcher
from encoder_svc.media.fetch_policy import FetchPolicy
from tests.waiting import PATIENCE_SECONDS


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "media"
    (folder / "sub").mkdir(parents=True)
    (folder / "cat 1.jpg").write_bytes(b"cat")
    (folder / "sub" / "dog.jpg").write_bytes(b"dog")
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "media-old").mkdir()
    (tmp_path / "media-old" / "old.jpg").write_bytes(b"old")
    return folder


async def fetch(uri: str, *roots: Path, limit: int | None = None) -> bytes:
    async with Fetcher(FetchPolicy(schemes=frozenset({"file"}), roots=roots)) as fetcher:
        return await fetcher.fetch(uri, limit)


async def refused(uri: str, *roots: Path, limit: int | None = None) -> Reason:
    """The reason of a fetch that must fail, whose message names no path."""
    with pytest.raises(ServiceError) as failed:
        # What blocks is not opened.
        await asyncio.wait_for(fetch(uri, *roots, limit=limit), PATIENCE_SECONDS)
    assert not any(str(root) in failed.value.message for root in roots)
    return failed.value.reason


async def test_files_below_a_root_are_read(root: Path) -> None:
    assert await fetch(f"file://{root}/cat%201.jpg", root) == b"cat"
    assert await fetch(f"file://localhost{root}/sub/dog.jpg", root) == b"dog"
    assert await fetch(f"FILE:{root}/sub/dog.jpg#top", root) == b"dog"
    assert await fetch(f"file://{root}/sub/../sub/dog.jpg", root) == b"dog"
    assert await fetch(f"file://{root}/sub/dog.jpg", root.parent / "media-old", root) == b"dog"


async def test_f19_nothing_outside_is_read_whatever_the_path_says(root: Path) -> None:
    for path in (
        f"{root}/../secret", f"{root}/%2e%2e/secret", f"{root}/sub/..%2f..%2fsecret", f"{root.parent}/secret",
        "/etc/passwd", f"{root}-old/old.jpg", f"{root}", "/", "/proc/self/environ",
        f"{root}/../../../../../../../../etc/passwd",
        "/proc/self/root/etc/passwd", f"/proc/self/root{root.parent}/secret", "/dev/stdin",
        f"{root.parent}/no/such/file", f"/{root}/cat%201.jpg",
    ):  # fmt: skip
        assert await refused(f"file://{path}", root) is Reason.URI_FORBIDDEN, path


async def test_f19_links_are_followed_only_to_what_lies_below_a_root(root: Path) -> None:
    (root / "inside").symlink_to(root / "sub" / "dog.jpg")
    (root / "relative").symlink_to("sub/dog.jpg")
    (root / "outside").symlink_to(root.parent / "secret")
    (root / "up").symlink_to("../secret")
    (root / "folder").symlink_to(root.parent)
    (root / "process").symlink_to("/proc/self")
    (root / "loop").symlink_to("loop")
    (root / "chain").symlink_to("outside")
    assert await fetch(f"file://{root}/inside", root) == b"dog"
    assert await fetch(f"file://{root}/relative", root) == b"dog"
    assert await fetch(f"file://{root}/folder/media/sub/dog.jpg", root) == b"dog"
    for name in ("outside", "up", "folder/secret", "chain", "process/environ", "process/exe", "sub/../folder/secret"):
        assert await refused(f"file://{root}/{name}", root) is Reason.URI_FORBIDDEN, name
    assert await refused(f"file://{root}/loop", root) is Reason.FETCH_REFUSED
    assert await fetch(f"file://{root}/outside", root, root.parent / "media-old", root.parent) == b"secret"


async def test_a_root_may_itself_be_reached_by_a_link(root: Path, tmp_path: Path) -> None:
    alias = tmp_path / "alias"
    alias.symlink_to(root)
    assert await fetch(f"file://{alias}/sub/dog.jpg", alias) == b"dog"
    assert await fetch(f"file://{root}/sub/dog.jpg", alias) == b"dog"
    assert await refused(f"file://{alias}/../secret", alias) is Reason.URI_FORBIDDEN


async def test_f19_what_is_no_regular_file_is_not_opened(root: Path) -> None:
    os.mkfifo(root / "fifo")  # a plain open would wait for a writer
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "sock"))
        for name in ("fifo", "sock", "sub"):
            assert await refused(f"file://{root}/{name}", root) is Reason.FETCH_REFUSED, name
    (root / "zero").symlink_to("/dev/zero")
    assert await refused(f"file://{root}/zero", root) is Reason.URI_FORBIDDEN
    assert await refused("file:///dev/null", Path("/dev")) is Reason.FETCH_REFUSED


async def test_a_missing_file_is_told(root: Path) -> None:
    for name in ("none.jpg", "sub/dog.jpg/more", "a" * 300):
        assert await refused(f"file://{root}/{name}", root) is Reason.FETCH_REFUSED


@pytest.mark.parametrize(
    "uri",
    [
        "file:",
        "file://",
        "file:cat.jpg",
        "file:./cat.jpg",
        "file:../cat.jpg",
        "file://media",
        "file:///a?b",
        "file:///a%00b",
    ],
)
async def test_what_names_no_absolute_path_is_refused(uri: str, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    assert await refused(uri, root) is Reason.REQUEST_INVALID


async def test_f19_other_hosts_are_refused(root: Path) -> None:
    for host in ("server", "127.0.0.1", "localhost:80", "user@localhost"):
        assert await refused(f"file://{host}{root}/sub/dog.jpg", root) is Reason.REQUEST_INVALID


async def test_f20_size_is_bounded(root: Path) -> None:
    (root / "large").write_bytes(bytes(3 << 20))
    assert len(await fetch(f"file://{root}/large", root, limit=3 << 20)) == 3 << 20
    assert await refused(f"file://{root}/large", root, limit=(3 << 20) - 1) is Reason.FETCH_TOO_LARGE
    os.truncate(root / "large", 1 << 40)  # sparse: it costs nothing here, and would there
    assert await refused(f"file://{root}/large", root) is Reason.FETCH_TOO_LARGE


def open_below(folder: Path) -> list[str]:
    """What this process has open there."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # others come and go
            found.append(str(descriptor.readlink()))
    return sorted(path for path in found if path.startswith(str(folder)))


async def test_no_descriptor_is_left_open(root: Path) -> None:
    (root / "outside").symlink_to(root.parent / "secret")
    policy = FetchPolicy(schemes=frozenset({"file"}), roots=(root,), max_bytes=1)
    with (root / "sub" / "dog.jpg").open("rb"):
        assert open_below(root.parent) == [str(root / "sub" / "dog.jpg")]
    async with Fetcher(policy) as fetcher:
        for name in ("sub/dog.jpg", "outside", "sub", "none"):
            with pytest.raises(ServiceError):
                await fetcher.fetch(f"file://{root}/{name}")
            assert open_below(root.parent) == []
