"""A server's Prometheus page, read as numbers."""

from __future__ import annotations

import asyncio
import urllib.request

from prometheus_client.parser import text_string_to_metric_families

from tests.rpc.calls import SECONDS
from tests.server_process import ServerProcess

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(server: ServerProcess) -> Samples:
    """All samples, by name (without ``encoder_svc_``) and labels."""
    with urllib.request.urlopen(server.metrics_address, timeout=SECONDS) as page:
        text = page.read().decode()
    return {
        (sample.name.removeprefix("encoder_svc_"), frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def metric(server: ServerProcess, name: str, **labels: str) -> float:
    """One sample; 0 if it is not there yet."""
    samples = await asyncio.to_thread(scrape, server)
    return samples.get((name, frozenset(labels.items())), 0.0)


async def batches(server: ServerProcess) -> tuple[float, float]:
    """How many batches the engines have run, and how many items were in them."""
    samples = await asyncio.to_thread(scrape, server)
    count, total = (samples.get((f"batch_items_{what}", frozenset()), 0.0) for what in ("count", "sum"))
    return count, total
