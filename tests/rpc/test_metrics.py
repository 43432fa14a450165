"""The metrics page: every metric is there, and says what happened."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
import time
import urllib.request
from math import inf

import grpc.aio
import pytest

from encoder_svc.telemetry.metrics import Metrics
from encoder_svc.telemetry.metrics_page import CONNECTIONS, serve_metrics
from epd.encoder.v1 import encoder_service_pb2 as pb
from tests.rpc.calls import PHOTO, SECONDS, calls_to, encode, failures, image, is_idle, ready_chunks, release
from tests.rpc.metrics_page import Samples, scrape
from tests.server_process import ServerProcess
from tests.waiting import eventually


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples.get((name, frozenset(labels.items())), 0.0)


async def test_every_metric_tells_what_happened(server: ServerProcess) -> None:
    await eventually(lambda: is_idle(server))
    begun = time.monotonic()
    before = await asyncio.to_thread(scrape, server)
    fields = {"cache_policy": pb.CACHE_POLICY_USE, "cache_salt": secrets.token_bytes(16)}
    async with calls_to(server) as stub:
        chunks = ready_chunks(await encode(stub, **fields))
        chunks += ready_chunks(await encode(stub, **fields))
        events = await encode(stub, image(0), image(1, b"no image"))
        assert len(failures(events)) == 1
        chunks += ready_chunks(events)

        after: Samples = {}

        async def the_gauges_have_followed() -> bool:
            nonlocal after
            after = await asyncio.to_thread(scrape, server)
            arena = {state: value(after, "arena_bytes", engine="0", state=state) for state in ("leased", "reserved")}
            left = value(after, "live_requests"), value(after, "batches_in_flight", engine="0"), arena["reserved"]
            return value(after, "leases") == 3 and arena["leased"] >= 2 * chunks[0].nbytes and not any(left)

        await eventually(the_gauges_have_followed)
        await release(stub, *chunks)
    elapsed = time.monotonic() - begun

    def grew(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert grew("requests_total", method="Encode", code="OK") == 3
    assert grew("admitted_total") == 3
    assert grew("parts_total", state="ready", reason="") == 3
    assert grew("parts_total", state="failed", reason="MEDIA_UNRECOGNIZED") == 1
    assert grew("part_seconds_count", state="ready") == 3
    assert 0 < grew("part_seconds_sum", state="ready") < 3 * elapsed
    assert grew("cache_lookups_total", result="hit") == 1
    assert grew("cache_lookups_total", result="miss") == 1
    assert grew("batch_items_sum") == 2
    assert grew("batch_patches_sum") == 2 * 80, "140 × 112 pixels are 10 × 8 patches"
    for stage, items in {"fetch": 4, "prepare": 2, "batch_wait": 2, "forward": 2, "stage": 2}.items():
        assert grew("stage_seconds_count", stage=stage) == items, stage
        assert 0 <= grew("stage_seconds_sum", stage=stage) < items * elapsed
    assert value(after, "media_bytes") == 0
    assert 0 < value(after, "utilization") < 1, "the engine was busy a moment ago"
    assert ("loop_lag_seconds", frozenset()) in after
    for process in ("engine", "media worker"):
        assert ("restarts", frozenset({"process": process}.items())) in after
    await eventually(lambda: is_idle(server))

    async def what_was_leased_is_cached() -> bool:
        samples = await asyncio.to_thread(scrape, server)
        return value(samples, "leases") == 0 and value(samples, "arena_bytes", engine="0", state="cached") > 0

    await eventually(what_was_leased_is_cached)


async def test_refusals_and_lives_are_counted(server: ServerProcess) -> None:
    await eventually(lambda: is_idle(server))
    async with calls_to(server) as stub:
        with server.held(server.media_worker()):
            before = await asyncio.to_thread(scrape, server)
            call = stub.Encode(pb.EncodeRequest(request_id="counted", items=[image(data=PHOTO + b"\0")]))
            await call.read()
            with pytest.raises(grpc.aio.AioRpcError):
                await encode(stub, request_id="counted")

            async def the_part_is_seen() -> bool:
                samples = await asyncio.to_thread(scrape, server)
                return value(samples, "live_requests") == 1 and value(samples, "utilization") > 0

            await eventually(the_part_is_seen)
            after = await asyncio.to_thread(scrape, server)
            assert sum(number for (name, _), number in after.items() if name == "live_parts") == 1
            assert value(after, "media_bytes") == len(PHOTO) + 1
            name, labels = "refused_total", {"reason": "REQUEST_ID_LIVE"}
            assert value(after, name, **labels) == value(before, name, **labels) + 1
            call.cancel()

            async def no_request_is_live() -> bool:
                return (await server.info()).load.requests == 0

            # Else the part could be READY, and leased, before it is known that its caller has left.
            await eventually(no_request_is_live)
    await eventually(lambda: is_idle(server))


async def test_buckets_reach_from_the_smallest_to_the_largest(server: ServerProcess) -> None:
    samples = await asyncio.to_thread(scrape, server)
    bounds = {
        family: sorted(
            float(dict(labels)["le"]) for name, labels in samples if name == f"{family}_bucket" and "le" in dict(labels)
        )
        for family in ("batch_items", "batch_patches")
    }
    assert (bounds["batch_items"][0], bounds["batch_items"][-2:]) == (1, [256, inf])
    assert (bounds["batch_patches"][0], bounds["batch_patches"][-2:]) == (16, [65536, inf])


def test_readers_that_do_not_go_keep_nobody_out_and_take_few_threads() -> None:
    port, stop = serve_metrics(Metrics(), "127.0.0.1", 0)
    threads = threading.active_count()
    with contextlib.ExitStack() as held:
        held.callback(stop)
        for number in range(10 * CONNECTIONS):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", port), SECONDS))
            connection.sendall(b"GET /metrics HTTP/1.1\r\n" if number % 2 else b"\xff\r\n")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SECONDS) as page:
            assert b"encoder_svc_leases" in page.read()
        assert threading.active_count() - threads <= 2 * CONNECTIONS
