"""The client for threads that may not wait, against real servers and in real processes."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from encoder_client import (
    ClientSettings,
    Embedding,
    EmbeddingPool,
    EncoderError,
    EncoderFleet,
    HandleError,
    Layout,
    PartError,
    SyncEncoderClient,
    image,
)
from encoder_client.threads.sync_client import Outcome
from epd.encoder.v1.encoder_service_pb2 import CachePolicy
from tests.conftest import StartServer, servers
from tests.photograph import photo
from tests.server_process import START_SECONDS, ServerProcess

PHOTOS = [photo(*size) for size in [(140, 112), (252, 196), (112, 140), (84, 224)]]
ITEMS = [image(data) for data in PHOTOS]
ROWS = [20, 63, 20, 24]
TIMEOUT = START_SECONDS
BYPASS = CachePolicy.CACHE_POLICY_BYPASS


@pytest.fixture(scope="module")
def pair(tiny_checkpoint: Path) -> Iterator[list[ServerProcess]]:
    with servers(tiny_checkpoint) as start:
        started = [start(wait=False), start(wait=False)]
        yield [server.wait_ready() for server in started]


@pytest.fixture
def client(pair: list[ServerProcess]) -> Iterator[SyncEncoderClient]:
    with client_of(*pair) as client:
        yield client


def client_of(*servers: ServerProcess, most_parts: int = 64, pool: EmbeddingPool | None = None) -> SyncEncoderClient:
    targets = [server.target for server in servers]
    return SyncEncoderClient(targets, ClientSettings(transports=("inline",)), most_parts=most_parts, pool=pool)


def until(condition: Callable[[], bool]) -> None:
    """What a scheduler's loop is to these tests: it turns until it has seen what it waits for."""
    end = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)


def polled(client: SyncEncoderClient, ends: int) -> list[Outcome]:
    """Polls until so many parts have ended."""
    found: list[Outcome] = []

    def enough() -> bool:
        found.extend(client.poll())
        return sum(not isinstance(outcome, Layout) for outcome in found) >= ends

    until(enough)
    return found


def test_futures_end_with_the_embeddings(client: SyncEncoderClient) -> None:
    submission = client.submit(ITEMS, prompt_id="p", timeout=TIMEOUT)
    embeddings = [submission.futures[part_idx].result(TIMEOUT) for part_idx in range(len(ITEMS))]
    assert [embedding.numpy().shape[0] for embedding in embeddings] == ROWS
    assert {embedding.chunk.prompt_id for embedding in embeddings} == {"p"}
    assert submission.done()


def test_poll_tells_layouts_embeddings_and_failures(client: SyncEncoderClient) -> None:
    assert client.poll() == []
    client.submit([*ITEMS, image(b"not an image")], prompt_id="p", timeout=TIMEOUT)
    outcomes = polled(client, len(ITEMS) + 1)
    layouts = [outcome.chunk for outcome in outcomes if isinstance(outcome, Layout)]
    assert {chunk.part_idx: chunk.token_count for chunk in layouts} == dict(enumerate(ROWS))
    embeddings = [outcome for outcome in outcomes if isinstance(outcome, Embedding)]
    assert {e.chunk.part_idx: e.numpy().shape[0] for e in embeddings} == dict(enumerate(ROWS))
    [failure] = [outcome for outcome in outcomes if isinstance(outcome, PartError)]
    assert (failure.prompt_id, failure.part_idx, failure.reason) == ("p", len(ITEMS), "MEDIA_UNRECOGNIZED")
    assert client.poll() == []


def test_poll_takes_no_more_than_it_is_asked_for(client: SyncEncoderClient) -> None:
    client.submit(ITEMS, timeout=TIMEOUT)
    found: list[Outcome] = []

    def all_came() -> bool:
        some = client.poll(1)
        assert len(some) <= 1
        found.extend(some)
        return len(found) == 2 * len(ITEMS)

    until(all_came)


def test_nothing_waits_while_an_encoder_hangs(pair: list[ServerProcess], client: SyncEncoderClient) -> None:
    engines = [server.engine() for server in pair]
    with pair[0].held(engines[0]), pair[1].held(engines[1]):
        submission = client.submit(ITEMS, prompt_id="late", timeout=TIMEOUT, cache_policy=BYPASS)
        layouts: list[Outcome] = []

        def all_laid_out() -> bool:
            layouts.extend(client.poll())
            return len(layouts) == len(ITEMS)

        until(all_laid_out)
        assert not submission.done()
        submission.cancel()
        failures = polled(client, len(ITEMS))
    assert {failure.code.name for failure in failures if isinstance(failure, PartError)} == {"CANCELLED"}
    with pytest.raises(PartError):
        submission.futures[0].result(TIMEOUT)


def test_a_deadline_of_one_part(pair: list[ServerProcess], client: SyncEncoderClient) -> None:
    engines = [server.engine() for server in pair]
    with pair[0].held(engines[0]), pair[1].held(engines[1]):
        submission = client.submit(ITEMS[:2], timeout=TIMEOUT, part_timeouts={0: 0.3}, cache_policy=BYPASS)
        with pytest.raises(PartError, match="DEADLINE_EXCEEDED"):
            submission.futures[0].result(TIMEOUT)
        assert not submission.futures[1].done()
    assert submission.futures[1].result(TIMEOUT).numpy().shape[0] == ROWS[1]


def test_embeddings_are_shared_from_any_thread(pair: list[ServerProcess], client: SyncEncoderClient) -> None:
    targets = [server.target for server in pair]
    with SyncEncoderClient(targets, ClientSettings(transports=("inline",)), max_holds=1) as sharing:
        [future] = sharing.submit(ITEMS[:1], timeout=TIMEOUT, polled=False).futures.values()
        embedding = future.result(TIMEOUT)
        opened = sharing.share(embedding).open()
        assert np.array_equal(opened.numpy(), embedding.numpy())
        with pytest.raises(HandleError, match="too many"):
            sharing.share(embedding).open()
    with pytest.raises(HandleError, match="max_holds"):
        client.share(embedding)


def test_cancelled_futures_give_their_parts_up(pair: list[ServerProcess], client: SyncEncoderClient) -> None:
    engines = [server.engine() for server in pair]
    with pair[0].held(engines[0]), pair[1].held(engines[1]):
        some = client.submit(ITEMS[:2], timeout=TIMEOUT, cache_policy=BYPASS)
        both = client.submit(ITEMS[:2], timeout=TIMEOUT, cache_policy=BYPASS)
        assert some.futures[0].cancel()
        assert all(future.cancel() for future in both.futures.values())
    assert some.futures[1].result(TIMEOUT).numpy().shape[0] == ROWS[1]
    until(lambda: client._prompts._tasks == {})
    outcomes = [outcome for outcome in client.poll() if not isinstance(outcome, Layout)]
    assert len(outcomes) == 1


def test_it_is_bounded(pair: list[ServerProcess]) -> None:
    with client_of(*pair, most_parts=4) as client:
        submission = client.submit(ITEMS, timeout=TIMEOUT)
        with pytest.raises(EncoderError, match="most_parts") as refused:
            client.submit(ITEMS[:1], timeout=TIMEOUT)
        assert refused.value.code.name == "RESOURCE_EXHAUSTED"
        until(submission.done)
        with pytest.raises(EncoderError):
            client.submit(ITEMS[:1], timeout=TIMEOUT)  # their outcomes still wait
        polled(client, 4)
        unpolled = client.submit(ITEMS, timeout=TIMEOUT, polled=False)
        until(unpolled.done)
        client.submit(ITEMS, timeout=TIMEOUT, polled=False)
        assert client.poll() == []


def test_many_threads_and_views_that_die_in_others(pair: list[ServerProcess]) -> None:
    with client_of(*pair, pool=EmbeddingPool(2 << 20)) as client:

        def use(number: int) -> float:
            futures = client.submit(ITEMS, prompt_id=f"{number}", timeout=TIMEOUT, polled=False).futures
            views = [futures[part_idx].result(TIMEOUT).numpy() for part_idx in range(len(ITEMS))]
            return float(sum(np.abs(view).max() for view in views))

        with ThreadPoolExecutor(8) as threads:
            found = list(threads.map(use, range(40)))
        # Both servers may make an embedding, in different company: then its last bits differ.
        assert found == pytest.approx([found[0]] * len(found), rel=1e-4)
        gc.collect()
        until(lambda: client.pool_statistics(TIMEOUT).slots == 0)


def test_a_prompt_that_cannot_be_is_refused_at_once(client: SyncEncoderClient) -> None:
    with pytest.raises(ValueError, match="part_idx"):
        client.submit([])


def test_close_ends_everything(pair: list[ServerProcess]) -> None:
    threads = set(threading.enumerate())
    client = client_of(*pair)
    with pair[0].held(pair[0].engine()), pair[1].held(pair[1].engine()):
        submission = client.submit(ITEMS, timeout=TIMEOUT, cache_policy=BYPASS)
        client.close()
        assert submission.done()
    client.close()
    assert not [thread for thread in set(threading.enumerate()) - threads if thread.name == "encoder-client"]
    with pytest.raises(RuntimeError, match="closed"):
        client.submit(ITEMS)
    submission.cancel()


def test_whatever_keeps_a_client_from_opening_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_: EncoderFleet) -> EncoderFleet:
        raise ValueError("not today")

    monkeypatch.setattr(EncoderFleet, "__aenter__", refuse)
    with pytest.raises(ValueError, match="not today"):
        SyncEncoderClient(["127.0.0.1:1"])


def test_a_callback_cannot_close(client: SyncEncoderClient) -> None:
    caught: Future[BaseException] = Future()

    def close(future: Future[Embedding]) -> None:
        try:
            client.close()
        except RuntimeError as error:
            caught.set_result(error)

    client.submit(ITEMS[:1], timeout=TIMEOUT).futures[0].add_done_callback(close)
    assert "its own thread" in str(caught.result(TIMEOUT))


def test_the_last_reference_ends_the_thread(pair: list[ServerProcess]) -> None:
    client = client_of(*pair)
    thread = client._thread._thread
    submission = client.submit(ITEMS, timeout=TIMEOUT)
    del client
    gc.collect()
    until(submission.done)
    thread.join(TIMEOUT)
    assert not thread.is_alive()


def test_an_encoder_that_is_killed_costs_no_prompt(pair: list[ServerProcess], start_server: StartServer) -> None:
    victim, survivor = start_server(), pair[0]
    with client_of(victim, survivor, most_parts=400) as client:
        for number in range(12):
            client.submit(ITEMS, prompt_id=f"{number}", timeout=TIMEOUT, cache_policy=BYPASS)
        victim.process.kill()
        outcomes = polled(client, 12 * len(ITEMS))
    embeddings = [outcome for outcome in outcomes if isinstance(outcome, Embedding)]
    found = sorted((int(e.chunk.prompt_id), e.chunk.part_idx, e.numpy().shape[0]) for e in embeddings)
    assert found == [(number, part_idx, ROWS[part_idx]) for number in range(12) for part_idx in range(len(ITEMS))]


EXITS = {
    "without close": f"submission.futures[0].result({TIMEOUT})",
    "while it works": "",
    "by an error": "raise SystemExit(0)",
    "of a forked child": f"""
submission.futures[0].result({TIMEOUT})
child = os.fork()
if not child:
    try:
        client.submit(items)
    except RuntimeError as error:
        assert "after the fork" in str(error)
        sys.exit(7)
    sys.exit(8)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7
client.submit(items, timeout={TIMEOUT}).futures[0].result({TIMEOUT})
""",
}


@pytest.mark.parametrize("how", EXITS)
def test_the_program_ends(how: str, pair: list[ServerProcess], tmp_path: Path) -> None:
    file = tmp_path / "photo.jpg"
    file.write_bytes(PHOTOS[0])
    program = f"""
import os, sys
from pathlib import Path
from encoder_client import ClientSettings, SyncEncoderClient, image
client = SyncEncoderClient([{pair[0].target!r}], ClientSettings(transports=("inline",)))
items = [image(Path({str(file)!r}))]
submission = client.submit(items, timeout={TIMEOUT})
{EXITS[how]}
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert ended.returncode == 0, ended.stderr
    # gRPC and asyncio complain in a fork; nothing else may.
    assert how == "of a forked child" or not ended.stderr
