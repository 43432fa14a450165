"""An embedding that another process of the host opens: the same memory, held as long as that process looks at it."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import socket
import stat
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from encoder_client import ChunkError, Embedding, EmbeddingHandle, EmbeddingPool, HandleError, PoolSharing
from encoder_client.pool.embedding_handle import HEADER
from encoder_client.pool.embedding_pool import Slot
from tests.client.chunks import ready, rows
from tests.waiting import PATIENCE_SECONDS, eventually

DATA = rows(40, 8)


async def embedded(pool: EmbeddingPool, prompt: str = "p") -> Embedding:
    slot = (await pool.reserve(prompt, [DATA.nbytes])).take(0)
    slot.view[:] = DATA.tobytes()
    return Embedding(ready(DATA), slot, "inline", 0.0)


async def opened(handle: EmbeddingHandle) -> Embedding:
    return await asyncio.to_thread(handle.open)


def rights(path: str) -> list[int]:
    """Of a file and its folder."""
    return [stat.S_IMODE(place.stat().st_mode) for place in (Path(path), Path(path).parent)]


@asynccontextmanager
async def holder() -> AsyncIterator[asyncio.subprocess.Process]:
    """A process that holds what it is told to open."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.client.handle_holder",
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def ask(process: asyncio.subprocess.Process, handle: EmbeddingHandle) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(handle.to_bytes().hex().encode() + b"\n")
    async with asyncio.timeout(PATIENCE_SECONDS):
        return float(await process.stdout.readline())


async def test_f10_another_process_holds_the_memory_until_it_dies() -> None:
    pool = EmbeddingPool(DATA.nbytes)
    async with PoolSharing(pool) as sharing, holder() as process:
        embedding = await embedded(pool)
        assert await ask(process, sharing.share(embedding)) == pytest.approx(float(DATA.sum()), rel=1e-5)
        assert (embedding.numpy() == DATA).all()
        del embedding
        gc.collect()
        assert (sharing.holds, pool.statistics.slots) == (1, 1)
        waiting = asyncio.create_task(pool.reserve("next", [64]))
        await asyncio.sleep(0)
        assert not waiting.done()
        process.kill()
        async with asyncio.timeout(PATIENCE_SECONDS):
            (await waiting).close()
        assert sharing.holds == 0


async def test_it_is_the_same_memory_and_what_is_written_is_ones_own() -> None:
    pool = EmbeddingPool(1 << 16)
    other = await embedded(pool, "another, so that this one does not begin at the start of a page")
    embedding = await embedded(pool)
    async with PoolSharing(pool) as sharing:
        mapped = await opened(EmbeddingHandle.from_bytes(sharing.share(embedding).to_bytes()))
        np.testing.assert_array_equal(mapped.numpy(), DATA)
        np.testing.assert_array_equal(mapped.torch().numpy(), DATA)
        embedding.numpy()[0, 0] = 7.0
        assert mapped.numpy()[0, 0] == 7.0, "a copy was made"
        mapped.numpy()[0, 1] = 8.0
        assert embedding.numpy()[0, 1] == DATA[0, 1]
        assert (mapped.transport, other.nbytes) == ("handle", DATA.nbytes)


async def test_a_hold_ends_with_its_last_view() -> None:
    pool = EmbeddingPool(1 << 16)
    async with PoolSharing(pool) as sharing:
        embedding = await embedded(pool)
        mapped = await opened(sharing.share(embedding))
        view = mapped.numpy()[3:]
        del mapped, embedding
        gc.collect()
        assert (sharing.holds, pool.statistics.slots) == (1, 1)
        np.testing.assert_array_equal(view, DATA[3:])
        del view
        gc.collect()
        await eventually(lambda: (sharing.holds, pool.statistics.slots) == (0, 0))


async def test_a_handle_keeps_nothing() -> None:
    pool = EmbeddingPool(1 << 16)
    async with PoolSharing(pool) as sharing:
        handle = sharing.share(await embedded(pool))
        gc.collect()
        assert pool.statistics.slots == 0
        with pytest.raises(HandleError, match="is gone"):
            await opened(handle)
        newer = await embedded(pool)  # in the same place
        with pytest.raises(HandleError, match="is gone"):
            await opened(handle)
        assert (await opened(sharing.share(newer))).numpy().shape == DATA.shape


async def test_holds_are_bounded() -> None:
    pool = EmbeddingPool(1 << 16)
    embedding = await embedded(pool)
    async with PoolSharing(pool, max_holds=1) as sharing:
        first = await opened(sharing.share(embedding))
        with pytest.raises(HandleError, match="too many"):
            await opened(sharing.share(embedding))
        first.release()
        gc.collect()
        await eventually(lambda: sharing.holds == 0)
        await opened(sharing.share(embedding))


async def test_a_wrong_token_or_pool_opens_nothing() -> None:
    pool = EmbeddingPool(1 << 16)
    embedding = await embedded(pool)
    async with PoolSharing(pool) as sharing:
        handle = sharing.share(embedding)
        assert sharing.share(embedding) == handle
        for wrong in ({"token": bytes(16)}, {"pool_id": bytes(16)}, {"offset": handle.offset + 64}):
            with pytest.raises(HandleError, match="is gone"):
                await opened(replace(handle, **wrong))
        assert handle.token.hex() not in repr(handle)


async def test_only_the_same_user_gets_to_the_socket() -> None:
    pool = EmbeddingPool(1 << 16)
    embedding = await embedded(pool)
    async with PoolSharing(pool) as sharing:
        path = sharing.share(embedding).socket_path
        assert rights(path) == [0o600, 0o700]
    with pytest.raises(FileNotFoundError):
        rights(path)


async def test_whoever_has_the_descriptor_cannot_harm_the_pool() -> None:
    pool = EmbeddingPool(1 << 16)
    for harm in (
        lambda fd: os.pwrite(fd, b"x", 0),
        lambda fd: os.ftruncate(fd, 0),
        lambda fd: os.ftruncate(fd, 1 << 20),
    ):
        with pytest.raises(PermissionError):
            harm(pool.arena.descriptor)


async def test_who_connects_and_says_nothing_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("encoder_client.pool.pool_sharing.HELLO_SECONDS", 0.01)
    pool = EmbeddingPool(1 << 16)
    embedding = await embedded(pool)
    async with PoolSharing(pool) as sharing:
        with socket.socket(socket.AF_UNIX) as silent:
            silent.connect(sharing.share(embedding).socket_path)
            silent.settimeout(10)
            assert await asyncio.to_thread(silent.recv, 1) == b""


async def test_secrets_of_the_encoder_do_not_travel() -> None:
    pool = EmbeddingPool(1 << 16)
    async with PoolSharing(pool) as sharing:
        handle = sharing.share(await embedded(pool))
    assert (list(handle.chunk.leases), list(handle.chunk.locators), handle.chunk.slot_key) == ([], [], b"")
    with pytest.raises(HandleError, match="does not answer"):
        await opened(handle)


async def test_what_cannot_be_shared_is_told() -> None:
    pool, other = EmbeddingPool(1 << 16), EmbeddingPool(1 << 16)
    sharing = PoolSharing(pool)
    with pytest.raises(HandleError, match="inside `async with`"):
        sharing.share(await embedded(pool))
    async with sharing:
        with pytest.raises(HandleError, match="does not lie in this pool"):
            sharing.share(await embedded(other))
        outside = Embedding(ready(DATA), Slot.outside(DATA.nbytes), "inline", 0.0)
        with pytest.raises(HandleError, match="does not lie in this pool"):
            sharing.share(outside)


async def test_bytes_that_are_no_handle_are_told() -> None:
    pool = EmbeddingPool(1 << 16)
    async with PoolSharing(pool) as sharing:
        embedding = await embedded(pool)
        handle = sharing.share(embedding)
        good = handle.to_bytes()
        for bad in (b"", b"x" * 100, good[:-1], good + b"x", good[: HEADER.size - 1]):
            with pytest.raises(HandleError):
                EmbeddingHandle.from_bytes(bad)
        with pytest.raises(HandleError, match="its chunk"):
            replace(handle, nbytes=handle.nbytes + 64).open()
        handle.chunk.tensors[0].strides[0] *= 2
        with pytest.raises(ChunkError, match="ends at byte"):
            handle.open()


def test_the_form_is_the_documented_one() -> None:
    handle = EmbeddingHandle(bytes(range(16)), bytes(range(16, 32)), 64, 1280, "/s", ready(DATA))
    data = handle.to_bytes()
    assert data[:8] == b"EPDHAND1"
    assert data[8:40] == bytes(range(32))
    assert int.from_bytes(data[40:48], "little") == 64
    assert int.from_bytes(data[48:56], "little") == 1280
    assert int.from_bytes(data[56:58], "little") == 2
    assert data[62:64] == b"/s"
    assert EmbeddingHandle.from_bytes(data) == handle
    assert ctypes.sizeof(ctypes.c_char * len(data[64:])) == int.from_bytes(data[58:62], "little")
