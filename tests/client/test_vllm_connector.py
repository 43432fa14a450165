"""The encoder-cache connector for vLLM, in the scheduler and in the workers. Here without vLLM; tests/vllm has one."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from encoder_client import (
    ClientSettings,
    Embedding,
    EmbeddingPool,
    EncoderClientError,
    PromptError,
    SyncEncoderClient,
    image,
)
from encoder_client.integrations.vllm import rows
from encoder_client.integrations.vllm.scheduler_side import Feature, SchedulerSide
from encoder_client.integrations.vllm.settings import ConnectorSettings
from encoder_client.integrations.vllm.transfer_params import Part, parse, transfer_params
from encoder_client.integrations.vllm.worker_side import load
from epd.encoder.v1.media_pb2 import MediaItem
from tests.photograph import photo
from tests.server_process import START_SECONDS, ServerProcess

TIMEOUT = START_SECONDS
WIDTH = 256
SIZES = [(140, 112), (252, 196), (112, 140)]
ITEMS = [image(photo(*size)) for size in SIZES]
ROWS = [20, 63, 20]
MOST_ROWS = 100
POOL_BYTES = 1 << 20


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[SyncEncoderClient]:
    pool = EmbeddingPool(POOL_BYTES)
    with SyncEncoderClient([server.target], ClientSettings(transports=("inline",)), pool=pool, max_holds=8) as client:
        yield client


@pytest.fixture(scope="module")
def encoded(client: SyncEncoderClient) -> list[Embedding]:
    """The photographs, as the service encodes them; they stay in its cache."""
    submission = client.submit(ITEMS, timeout=TIMEOUT, polled=False)
    embeddings = [submission.futures[part_idx].result(TIMEOUT) for part_idx in range(len(ITEMS))]
    assert [embedding.chunk.token_count for embedding in embeddings] == ROWS
    return embeddings


@pytest.fixture
def side(client: SyncEncoderClient) -> SchedulerSide:
    return SchedulerSide(client, POOL_BYTES, WIDTH, MOST_ROWS, TIMEOUT)


class Request:
    """What the connector sees of one of vLLM's."""

    def __init__(self, name: str, embeddings: Sequence[Embedding], media: Sequence[MediaItem] = (), rows: int = 0):
        parts = [Part(embedding.chunk.content_key) for embedding in embeddings]
        if media:
            parts = [Part(part.content_key, item) for part, item in zip(parts, media, strict=True)]
        self.name = name
        self.params: dict[str, Any] = transfer_params(parts)
        self.features: list[Feature] = []
        for embedding in embeddings:
            begin = self.features[-1].end if self.features else 5
            count = rows or embedding.chunk.token_count
            self.features.append(Feature(embedding.chunk.content_key.hex(), "image", count, begin + count))

    def available(self, side: SchedulerSide, computed: int = 0) -> bool:
        """One look of the scheduler."""
        return side.available(self.name, lambda: self.features, self.params, computed)

    def schedule(self, side: SchedulerSide) -> set[str]:
        """Passes of the scheduler, until the request can be scheduled or some have failed; tells which."""
        end = time.monotonic() + TIMEOUT
        while not self.available(side):
            if failed := side.take_failed():
                return failed
            side.step()
            assert time.monotonic() < end, "it did not come"
            time.sleep(0.002)
        return set()


def test_embeddings_reach_the_workers(side: SchedulerSide, encoded: list[Embedding]) -> None:
    request = Request("r", encoded)
    assert not request.available(side), "nothing is waited for"
    assert request.schedule(side) == set()
    for index, feature in enumerate(request.features):
        assert side.has(feature.identifier)
        side.allocated(feature.identifier)
        side.freed("r", index)
    side.finished("r")
    step, loads = side.step()
    cache: dict[str, torch.Tensor] = {}
    load(loads, cache, torch.device("cpu"), torch.bfloat16)
    side.loaded(step)
    for embedding in encoded:
        assert torch.equal(cache[embedding.chunk.content_key.hex()], embedding.torch().bfloat16())


def test_what_one_request_got_serves_the_next(side: SchedulerSide, encoded: list[Embedding]) -> None:
    Request("first", encoded).schedule(side)
    side.finished("first")
    side.step()
    assert Request("second", encoded[:2]).available(side)


def test_two_requests_share_what_is_under_way(side: SchedulerSide, encoded: list[Embedding]) -> None:
    first, second = Request("first", encoded), Request("second", encoded)
    assert not first.available(side)
    assert not second.available(side)
    side.finished("first")  # who asked leaves, and the other still gets it
    assert second.schedule(side) == set()


def test_tokens_that_are_computed_need_no_embedding(side: SchedulerSide, encoded: list[Embedding]) -> None:
    request = Request("r", encoded)
    request.params = transfer_params([Part(bytes(32))] * 2 + [Part(encoded[2].chunk.content_key)])
    request.features[0] = request.features[0]._replace(identifier=bytes(32).hex())
    request.features[1] = request.features[1]._replace(identifier=bytes(32).hex())
    assert request.available(side, computed=request.features[2].end)
    assert not request.available(side, computed=request.features[1].end)
    while not request.available(side, computed=request.features[1].end):
        assert side.take_failed() == set()
        side.step()
        time.sleep(0.002)


def test_an_unknown_content_fails_its_request_alone(side: SchedulerSide, encoded: list[Embedding]) -> None:
    lost = Request("lost", encoded[:1])
    lost.params = transfer_params([Part(bytes(32))])
    lost.features = [Feature(bytes(32).hex(), "image", 20, 25)]
    well = Request("well", encoded)
    assert not lost.available(side)
    failed = well.schedule(side)  # which of the two ends first is not said
    failed |= well.schedule(side) if failed else lost.schedule(side)
    assert failed == {"lost"}
    assert well.available(side)
    assert not lost.available(side)


def test_media_are_encoded_if_nobody_has_the_embedding(side: SchedulerSide, client: SyncEncoderClient) -> None:
    item = image(photo(84, 224))
    [embedding] = [future.result(TIMEOUT) for future in client.submit([item], timeout=TIMEOUT).futures.values()]
    client.poll()
    assert Request("r", [embedding], [item]).schedule(side) == set()


@pytest.mark.parametrize("fault", ["key", "rows", "room", "width", "params", "uuid"])
def test_what_does_not_fit_fails_the_request(
    client: SyncEncoderClient, encoded: list[Embedding], fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    side = SchedulerSide(client, POOL_BYTES, 3 * WIDTH if fault == "width" else WIDTH, MOST_ROWS, TIMEOUT)
    request = Request("r", encoded[:1], rows={"rows": 21, "room": 101}.get(fault, 0))
    if fault == "key":  # the media are not those that the key names
        request.params = transfer_params([Part(encoded[0].chunk.content_key, ITEMS[1])])
    elif fault == "params":
        request.params = {}
    elif fault == "uuid":
        request.features = [request.features[0]._replace(identifier="1")]
    assert request.schedule(side) == {"r"}
    message = {
        "key": "the media have the key",
        "rows": "21 places",
        "room": "room for 100",
        "width": "768",
        "params": "1 media items",
        "uuid": "as the item's uuid",
    }
    assert message[fault] in caplog.text


def test_memory_is_asked_for_in_the_scheduler_s_order(client: SyncEncoderClient, encoded: list[Embedding]) -> None:
    side = SchedulerSide(
        client, 64 << 10, WIDTH, MOST_ROWS, TIMEOUT
    )  # holds any two but not the largest beside another
    small, large, late = Request("small", encoded[:1]), Request("large", encoded[1:2]), Request("late", encoded[2:])
    side._stock.budget = (ROWS[1] + 5) * WIDTH * 4
    assert small.schedule(side) == set()
    side.step()
    assert not large.available(side)
    assert not late.available(side)
    assert set(side._fetches) == set(), "a request that came later does not pass one that waits"
    side.finished("small")
    side.step()
    assert large.schedule(side) == set()
    assert not side.has(small.features[0].identifier), "what nobody needs gives way"


def test_requests_that_wait_for_memory_hold_none(client: SyncEncoderClient, encoded: list[Embedding]) -> None:
    """Or each of two could wait for what the other has."""
    side = SchedulerSide(client, POOL_BYTES, WIDTH, MOST_ROWS, TIMEOUT)
    item = image(photo(84, 224))
    [running] = [future.result(TIMEOUT) for future in client.submit([item], timeout=TIMEOUT).futures.values()]
    client.poll()
    for index, request in enumerate([Request("r", [running]), Request("0", encoded[:1]), Request("1", encoded[2:])]):
        assert request.schedule(side) == set()
        if index:
            side.finished(request.name)
    side._stock.budget = (ROWS[0] + ROWS[1] + 10) * WIDTH * 4
    one, other = Request("one", encoded[:2]), Request("other", encoded[1:])
    assert not one.available(side)
    assert not other.available(side)
    side.finished("r")
    side.step()
    assert one.schedule(side) == set()
    side.finished("one")
    side.step()
    assert other.schedule(side) == set()


def test_a_prompt_larger_than_the_pool_fails(client: SyncEncoderClient, encoded: list[Embedding]) -> None:
    side = SchedulerSide(client, 64 << 10, WIDTH, MOST_ROWS, TIMEOUT)
    assert Request("r", encoded).schedule(side) == {"r"}


def test_a_request_that_leaves_takes_nothing_with_it(side: SchedulerSide, encoded: list[Embedding]) -> None:
    request = Request("r", encoded)
    assert not request.available(side)
    side.finished("r")
    assert (side._prompts, side._fetches, side._stock.used) == ({}, {}, 0)


def test_a_matrix_has_deepstack_beside_each_row(encoded: list[Embedding]) -> None:
    chunk = encoded[0].chunk
    assert rows.width(chunk) == WIDTH
    split = type(chunk)()
    split.CopyFrom(chunk)
    del split.tensors[:]
    for name, columns, offset in [("embedding", 64, 0), ("deepstack_0", 192, 256)]:
        split.tensors.add(
            name=name, dtype=chunk.tensors[0].dtype, shape=[20, columns], strides=[1024, 4], byte_offset=offset
        )
    whole = Embedding(split, encoded[0].slot, "inline", 0.0)
    assert torch.equal(rows.matrix(whole), encoded[0].torch())
    split.tensors[1].byte_offset = 512
    with pytest.raises(EncoderClientError, match="deepstack_0"):
        rows.width(split)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (None, "1 media items"),
        ({"parts": []}, "1 media items"),
        ({"parts": ["x"]}, "no object"),
        ({"parts": [{"content_key": "xyz"}]}, "hexadecimal"),
        ({"parts": [{"content_key": "00"}]}, "64 hexadecimal digits"),
        ({"parts": [{"content_key": "00" * 32, "encoder": ["a"]}]}, "instance_id"),
        ({"parts": [{"content_key": "00" * 32, "encoder": "a" * 257}]}, "instance_id"),
        ({"parts": [{"content_key": "00" * 32, "media": "%"}]}, "base64"),
        ({"parts": [{"content_key": "00" * 32, "media": base64.b64encode(b"\xff").decode()}]}, "MediaItem"),
        ({"parts": [{"content_key": "00" * 32, "media": "", "cache_salt": "x"}]}, "cache_salt"),
    ],
)
def test_parameters_that_say_nothing(params: Any, message: str) -> None:
    with pytest.raises(PromptError, match=message):
        parse(params, ["00" * 32])


def test_parameters_survive_their_way() -> None:
    parts = [
        Part(bytes(32)),
        Part(bytes([1] * 32), ITEMS[0], b"salt"),
        Part(bytes([2] * 32), encoder="one"),
        Part(bytes([3] * 32), ITEMS[1], b"", "another"),
    ]
    assert parse(transfer_params(parts), [part.content_key.hex() for part in parts]) == parts


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "needs the gRPC targets"),
        ({"encoders": "a:1", "pool": 1}, "has pool, and may have"),
        ({"encoders": {"a": 1}}, "no list"),
        ({"encoders": ["a:1"], "pool_bytes": 10}, "pool_bytes must be"),
        ({"encoders": ["a:1"], "timeout_seconds": "1"}, "timeout_seconds must be"),
    ],
)
def test_settings_that_cannot_be(config: dict[str, Any], message: str) -> None:
    with pytest.raises(EncoderClientError, match=message):
        ConnectorSettings.from_config(config)


def test_settings_take_lists_and_texts() -> None:
    settings = ConnectorSettings.from_config({"encoders": "a:1, b:1", "transports": ["inline"]})
    assert (settings.encoders, settings.transports) == (("a:1", "b:1"), ("inline",))
