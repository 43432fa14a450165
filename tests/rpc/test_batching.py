"""Requests of several callers share batches."""

from __future__ import annotations

import pytest

from epd.encoder.v1.media_pb2 import MediaItem, Modality
from tests.photograph import photo
from tests.rpc.calls import SECONDS, calls_to, encode_request, events_of, image, is_idle, ready_chunks, release
from tests.rpc.conftest import FileServer
from tests.rpc.metrics_page import batches
from tests.server_process import ServerProcess
from tests.waiting import eventually

REQUESTS = 16
FILES = [photo(56 + 28 * (i % 4), 56) for i in range(REQUESTS)]


@pytest.mark.parametrize("source", ["inline bytes", "addresses"])
async def test_f04_requests_that_wait_together_run_together(
    small_server: ServerProcess, file_server: FileServer, source: str
) -> None:
    items = [
        image(data=file)
        if source == "inline bytes"
        else MediaItem(modality=Modality.MODALITY_IMAGE, uri=file_server.serve(f"/{i}.jpg", file))
        for i, file in enumerate(FILES)
    ]
    await eventually(lambda: is_idle(small_server))
    before = await batches(small_server)
    async with calls_to(small_server) as stub:
        with small_server.held(small_server.engine()):
            calls = [stub.Encode(encode_request(item), timeout=SECONDS) for item in items]

            async def all_wait_for_the_engine() -> bool:
                parts = (await small_server.info()).load.parts
                return parts["prepared"] + parts["encoding"] == REQUESTS

            await eventually(all_wait_for_the_engine)
        chunks = [chunk for call in calls for chunk in ready_chunks(await events_of(call))]
        assert len(chunks) == REQUESTS
        count, total = (after - start for after, start in zip(await batches(small_server), before, strict=True))
        assert total == REQUESTS
        # Two batches may have been at the engine before the others had come.
        assert count <= 3
        assert max(chunk.timings.batch_items for chunk in chunks) >= REQUESTS / 3
        await release(stub, *chunks)
    await eventually(lambda: is_idle(small_server))
