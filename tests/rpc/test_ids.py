"""Ids of callers are names: they come back as they were given, and nothing else is done with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from epd.internal.v1 import engine_pb2, media_worker_pb2
from tests.rpc.calls import calls_to, encode, kinds, release
from tests.server_process import ServerProcess


@pytest.fixture
def untouched(tmp_path: Path) -> Iterator[Path]:
    """A folder in which nothing may appear."""
    yield tmp_path
    assert list(tmp_path.iterdir()) == []


async def test_f22_ids_that_look_like_paths_are_names(server: ServerProcess, untouched: Path) -> None:
    for start in ("", "../" * 32, "file://"):
        request_id, prompt_id, receiver = (f"{start}{untouched}/{name}" for name in ("request", "prompt", "receiver"))
        async with calls_to(server) as stub:
            events = await encode(
                stub, request_id=request_id, prompt_id=prompt_id, receivers=[receiver], delivery="DELIVERY_RECEIVERS"
            )
            assert kinds(events)[-2:] == ["ready", "complete"]
            chunk = events[-2].chunk
            await release(stub, chunk)
        assert (chunk.request_id, chunk.prompt_id) == (request_id, prompt_id)
        assert [lease.receiver_id for lease in chunk.leases] == [receiver]


def test_f22_processes_that_touch_files_never_see_the_ids() -> None:
    fields = {
        field.name
        for file in (engine_pb2, media_worker_pb2)
        for message in file.DESCRIPTOR.message_types_by_name.values()
        for field in message.fields
    }
    assert {"slot_offset", "part"} & fields, "the messages are others than this test knows"
    assert not fields & {"request_id", "prompt_id", "receiver", "receivers", "receiver_id", "identity"}
