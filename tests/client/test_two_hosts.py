"""Two hosts, as network namespaces with a link between them that is slowed, cut and restored."""

from __future__ import annotations

import asyncio
import gc
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import IPv4Address
from pathlib import Path

import numpy as np
import pytest

from encoder_client import ClientSettings, EmbeddingPool, EncoderClient, EncoderClientError, Ready, image
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from tests.photograph import photo
from tests.server_process import ServerProcess
from tests.waiting import PATIENCE_SECONDS, eventually

PHOTO = photo(252, 196)


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, check=False)


class Link:
    """A namespace that stands for the encoder's host, and a pair of interfaces between it and this one.

    Raises:
        OSError: this process may not make them.
    """

    def __init__(self) -> None:
        number = os.getpid() % 16_384
        self.namespace, self._near, self._far = f"epd{number}", f"epdn{number}", f"epdf{number}"
        # A /30 of 198.18.0.0/15, which is for tests of networks (RFC 2544).
        base = (198 << 24) + (18 << 16) + 4 * number
        self.here, self.there = (str(IPv4Address(base + host)) for host in (1, 2))
        inside = ("ip", "netns", "exec", self.namespace)
        try:
            for words in (
                ("ip", "netns", "add", self.namespace),
                ("ip", "link", "add", self._near, "type", "veth", "peer", "name", self._far),
                ("ip", "link", "set", self._far, "netns", self.namespace),
                ("ip", "address", "add", f"{self.here}/30", "dev", self._near),
                (*inside, "ip", "address", "add", f"{self.there}/30", "dev", self._far),
                ("ip", "link", "set", self._near, "up"),
                (*inside, "ip", "link", "set", self._far, "up"),
                (*inside, "ip", "link", "set", "lo", "up"),
            ):
                made = run(*words)
                if made.returncode:
                    raise OSError(made.stderr.strip())
        except OSError:
            self.close()
            raise

    def cut(self) -> None:
        assert run("ip", "link", "set", self._near, "down").returncode == 0

    def restore(self) -> None:
        assert run("ip", "link", "set", self._near, "up").returncode == 0

    def slow(self) -> bool:
        """30 ms more for each packet; False: this kernel cannot."""
        return run("tc", "qdisc", "add", "dev", self._near, "root", "netem", "delay", "30ms").returncode == 0

    def hasten(self) -> None:
        run("tc", "qdisc", "del", "dev", self._near, "root")

    def close(self) -> None:
        run("ip", "link", "del", self._near)
        run("ip", "netns", "del", self.namespace)


@pytest.fixture(scope="module")
def link() -> Iterator[Link]:
    try:
        made = Link()
    except OSError as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(link: Link, tiny_checkpoint: Path) -> Iterator[ServerProcess]:
    """A server on the other host. Its leases end soon: those of readers that are cut off cannot be given back."""
    server = ServerProcess(
        tiny_checkpoint,
        ("ip", "netns", "exec", link.namespace),
        listen=f"{link.there}:0",
        metrics_listen="",
        allow_insecure=True,
        mooncake="on",
        zeromq="on",
        lease_seconds=15,
    )
    try:
        yield server.wait_ready()
    finally:
        print(server.stderr)
        server.close()


async def ready(client: EncoderClient, timeout: float = PATIENCE_SECONDS) -> EmbeddingChunk:
    async with client.encode([image(PHOTO)], timeout=timeout) as call:
        async for event in call:
            if isinstance(event, Ready):
                return event.chunk
    # On a busy machine the encoder can be the first to see that the deadline has passed: then the part is cancelled.
    raise EncoderClientError("the call ended without the embedding")


@pytest.mark.parametrize("transport", ["mooncake", "zeromq"])
async def test_a_link_that_is_slowed_cut_and_restored(link: Link, server: ServerProcess, transport: str) -> None:
    pool = EmbeddingPool(8 << 20)
    client = EncoderClient(server.target, ClientSettings(transports=(transport,), mooncake_host=link.here), pool=pool)
    async with client:
        # The first read by Mooncake sets its engine up, which takes seconds on a busy machine.
        expected = (await client.read(await ready(client))).numpy().copy()

        if link.slow():
            embedding = await client.read(await ready(client))
            link.hasten()
            np.testing.assert_array_equal(embedding.numpy(), expected)
            del embedding
        chunks = [await ready(client) for _ in range(3)]
        client.settings = replace(client.settings, read_timeout=6.0)
        link.cut()
        try:
            # Reads that begin while nothing comes, and a prompt of which nothing is known yet: each with its error.
            ends = await asyncio.gather(*map(client.read, chunks), ready(client, 5.0), return_exceptions=True)
        finally:
            link.restore()
        assert all(isinstance(end, EncoderClientError) for end in ends), ends
        del ends

        async def reads_resume() -> bool:
            try:
                embedding = await client.read(await ready(client, 5.0))
            except EncoderClientError:
                return False
            np.testing.assert_array_equal(embedding.numpy(), expected)
            return embedding.transport == transport

        await eventually(reads_resume, 90)

        async def nothing_is_held() -> bool:
            gc.collect()
            load = (await client.server_info()).load
            held = {
                "leases": load.leases,
                "requests": load.requests,
                "parts": load.parts,
                "slots": pool.statistics.slots,
            }
            print(held)
            return not any(held.values())

        await eventually(nothing_is_held)
