"""What an enemy or an accident does to an arena is noticed by whichever transport it is read.

The arena is a real one, in a process of its own; only the calls are a scripted encoder's. In band the same is in
``test_faulty_encoder``.
"""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import xxhash

from encoder_client import ClientSettings, EncoderClient, ReadError
from encoder_svc.transports import TransportUnavailableError
from encoder_svc.transports.mooncake import load_mooncake
from epd.encoder.v1 import encoder_service_pb2 as pb
from epd.encoder.v1.embedding_pb2 import DataType, EmbeddingChunk, TensorSpec
from tests.client.arena_peer import SLOT_BYTES, ArenaPeer, arena_peer
from tests.client.chunks import ready, rows
from tests.client.scripted_encoder import ScriptedEncoder
from tests.waiting import PATIENCE_SECONDS, eventually

TRANSPORTS = ("shared_memory", "mooncake", "zeromq")


def payload(index: int, generation: int = 1) -> bytes:
    return bytes([16 * index + generation]) * SLOT_BYTES


@pytest.fixture
def mooncake() -> bool:
    """It can be loaded here."""
    try:
        load_mooncake()
    except TransportUnavailableError:
        return False
    return True


@pytest.fixture
def peer(tmp_path: Path, mooncake: bool) -> Iterator[ArenaPeer]:
    with arena_peer(tmp_path, mooncake=mooncake) as peer:
        yield peer


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest, mooncake: bool) -> str:
    name: str = request.param
    if name == "mooncake" and not mooncake:
        pytest.skip("Mooncake cannot be loaded here")
    return name


def chunk_at(
    peer: ArenaPeer, transport: str, index: int, generation: int = 1, *, nbytes: int = SLOT_BYTES
) -> EmbeddingChunk:
    """READY, in one slot of an arena."""
    chunk = ready(rows(1, 1))
    chunk.generation, chunk.nbytes, chunk.slot_key = generation, nbytes, bytes([index]) * 16
    chunk.checksum.value = xxhash.xxh3_64_intdigest(payload(index, generation)[:nbytes])
    chunk.tensors[0].CopyFrom(
        TensorSpec(name="embedding", dtype=DataType.DATA_TYPE_FLOAT16, shape=[1, nbytes // 2], strides=[nbytes, 2])
    )
    chunk.encoder.engine_boot_id = peer.boot_id
    chunk.locators[0].CopyFrom(peer.locator(transport, index))
    return chunk


@asynccontextmanager
async def reading(encoder: ScriptedEncoder, transport: str) -> AsyncIterator[EncoderClient]:
    """A client that reads by one transport; whatever happens, it holds nothing afterwards."""
    async with (
        encoder.serve() as target,
        EncoderClient(target, ClientSettings(transports=(transport,), read_timeout=PATIENCE_SECONDS)) as client,
    ):
        yield client

        def nothing_is_held() -> bool:
            gc.collect()
            return client.pool.statistics.slots == 0

        await eventually(nothing_is_held)


def from_(encoder: ScriptedEncoder, chunk: EmbeddingChunk) -> EmbeddingChunk:
    chunk.encoder.grpc_target = encoder.target
    return chunk


async def bytes_of(client: EncoderClient, chunk: EmbeddingChunk) -> tuple[str, bytes]:
    """The transport that an embedding came by, and its bytes; it is let go."""
    embedding = await client.read(chunk)
    came = embedding.transport, embedding.numpy().tobytes()
    embedding.release()
    return came


async def test_f09_one_arena_gives_the_same_bytes(peer: ArenaPeer, transport: str) -> None:
    encoder = ScriptedEncoder()
    async with reading(encoder, transport) as client:
        for index in (0, 3, 1):
            came = await bytes_of(client, from_(encoder, chunk_at(peer, transport, index)))
            assert came == (transport, payload(index))
    assert encoder.outcomes == ["OK"] * 3


async def test_f12_a_read_that_outlived_its_lease_is_thrown_away(peer: ArenaPeer, transport: str) -> None:
    encoder = ScriptedEncoder()
    encoder.state = pb.LeaseState.LEASE_STATE_EXPIRED
    async with reading(encoder, transport) as client:
        with pytest.raises(ReadError, match="ended before the read did"):
            await client.read(from_(encoder, chunk_at(peer, transport, 0)))


async def test_f12_a_place_that_holds_another_embedding_by_now_is_not_taken(peer: ArenaPeer, transport: str) -> None:
    peer.tell("fill 2 5")
    encoder = ScriptedEncoder()
    async with reading(encoder, transport) as client:
        with pytest.raises(ReadError):
            await client.read(from_(encoder, chunk_at(peer, transport, 2)))
        assert await bytes_of(client, from_(encoder, chunk_at(peer, transport, 2, 5))) == (transport, payload(2, 5))
    assert encoder.outcomes[-1] == "OK"
    assert "OK" not in encoder.outcomes[:-1]


@pytest.mark.parametrize("nbytes", [SLOT_BYTES - 2, SLOT_BYTES + 2, 2])
async def test_f13_a_chunk_of_another_size_than_its_slot_is_refused(
    peer: ArenaPeer, transport: str, nbytes: int
) -> None:
    chunk = chunk_at(peer, transport, 1, nbytes=nbytes)
    chunk.checksum.value = xxhash.xxh3_64_intdigest(payload(1))
    encoder = ScriptedEncoder()
    async with reading(encoder, transport) as client:
        with pytest.raises(ReadError):
            await client.read(from_(encoder, chunk))
    assert "OK" not in encoder.outcomes


# Not of shared memory: no checksum is computed there, since the memory is the encoder's own.
@pytest.mark.parametrize("transport", ["mooncake", "zeromq"], indirect=True)
async def test_f14_damage_in_the_arena_is_reported_and_refused(peer: ArenaPeer, transport: str) -> None:
    peer.tell("damage 1")
    encoder = ScriptedEncoder()
    async with reading(encoder, transport) as client:
        with pytest.raises(ReadError, match="do not have its checksum"):
            await client.read(from_(encoder, chunk_at(peer, transport, 1)))
    assert encoder.outcomes == ["CORRUPT"]


async def test_f41_a_chunk_of_one_engine_is_not_read_from_another(
    peer: ArenaPeer, transport: str, mooncake: bool, tmp_path: Path
) -> None:
    """Both are on one address, and use the same places, generations and keys for embeddings of their own."""
    with arena_peer(tmp_path / "other", "cd" * 16, mooncake=mooncake) as other:
        peer.tell("fill 0 2")
        other.tell("fill 0 3")
        astray = chunk_at(peer, transport, 0, 2)
        astray.locators[0].CopyFrom(other.locator(transport, 0))
        encoder = ScriptedEncoder()
        async with reading(encoder, transport) as client:
            with pytest.raises(ReadError):
                await client.read(from_(encoder, astray))
            for engine, generation in ((peer, 2), (other, 3)):
                came = await bytes_of(client, from_(encoder, chunk_at(engine, transport, 0, generation)))
                assert came == (transport, payload(0, generation))
