"""Whatever encoders do, as long as one works: every part ends once, with the right embedding, and no lease is left."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_client import (
    Accepted,
    ClientSettings,
    Complete,
    Embedding,
    EncoderFleet,
    HealthState,
    Layout,
    MultiModalEmbedding,
    PartCancelled,
    PartFailed,
    Ready,
    connections,
    image,
)
from encoder_client.errors import EncoderError, PartError
from epd.encoder.v1.media_pb2 import MediaItem, Modality
from tests.client.unreliable_encoder import Fate, UnreliableEncoder, payload_of
from tests.waiting import PATIENCE_SECONDS, eventually

TIMEOUT = 150.0
LONG = 10 * PATIENCE_SECONDS
# A part that two encoders failed to make is taken for the culprit: one such fate at most.
HARMLESS = [fate for fate in Fate if fate not in {Fate.FAULT, Fate.CONTRADICTION}]
Fates = list[list[Fate]]


@pytest.fixture(autouse=True, scope="module")
def errors_only() -> Iterator[None]:
    """The faults are so many; and other tests look for their own in the log."""
    log = logging.getLogger("encoder_client")
    before = log.level
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(before)


@asynccontextmanager
async def fleet_of(
    encoders: Sequence[UnreliableEncoder],
    seed: int = 0,
    poll_seconds: float = 0.1,
    read_timeout: float = PATIENCE_SECONDS,
) -> AsyncIterator[EncoderFleet]:
    targets = [await encoder.start() for encoder in encoders]
    try:
        async with EncoderFleet(
            targets,
            ClientSettings(transports=("inline",), read_timeout=read_timeout, channels=1),
            poll_seconds=poll_seconds,
            random=Random(seed),
        ) as fleet:
            await eventually(lambda: set(fleet.states.values()) == {HealthState.SERVING})
            yield fleet
    finally:
        for encoder in encoders:
            await encoder.stop()


async def answered_right(encoders: Sequence[UnreliableEncoder], prompts: Sequence[int], seed: int) -> None:
    async with fleet_of(encoders, seed) as fleet:

        async def one(number: int, parts: int) -> None:
            items = [image(b"prompt %d, part %d" % (number, part_idx)) for part_idx in range(parts)]
            if number % 3 == 2:
                await put_together(fleet, f"p{number}", items)
                return
            async with fleet.encode(items, prompt_id=f"p{number}", timeout=TIMEOUT) as call:
                events = []
                if number % 2:  # events first, embeddings then
                    events = [event async for event in call]
                embeddings = await call.embeddings()
            assert [embedding.numpy().tobytes() for embedding in embeddings] == [*map(payload_of, items)]
            if events:
                kinds = Counter(type(event) for event in events)
                assert kinds == {Accepted: 1, Layout: parts, Ready: parts, Complete: 1}
                assert (type(events[0]), type(events[-1])) == (Accepted, Complete)

        await asyncio.gather(*(one(number, parts) for number, parts in enumerate(prompts)))
        await eventually(lambda: not any(encoder.leases for encoder in encoders))
        await eventually(lambda: gc.collect() >= 0 and fleet.pool.statistics.slots == 0)
        await eventually(lambda: not fleet._dispatchers)


async def put_together(fleet: EncoderFleet, prompt_id: str, items: Sequence[MediaItem]) -> None:
    """A prompt in two calls, its parts as they come, from whichever encoders: the same as from one that never fails."""
    prompt = MultiModalEmbedding(prompt_id, len(items))
    placed = [image(item.data, part_idx=part_idx) for part_idx, item in enumerate(items)]

    async def some(parts: Sequence[MediaItem]) -> None:
        async with fleet.encode(parts, prompt_id=prompt_id, num_parts=len(items), timeout=TIMEOUT) as call:
            async for result in call.results():
                match result:
                    case Layout(chunk):
                        prompt.expect(chunk)
                    case Embedding():
                        prompt.add(result)
                    case PartError():
                        raise result

    await asyncio.gather(*(some(parts) for parts in (placed[::2], placed[1::2]) if parts))
    expected = b"".join(map(payload_of, items))
    assert prompt.numpy(Modality.MODALITY_IMAGE).tobytes() == expected
    assert prompt.grids(Modality.MODALITY_IMAGE) == [(1, 2, 2)] * len(items)


@settings(max_examples=25)
@given(
    fates=st.lists(st.lists(st.sampled_from(HARMLESS), max_size=6), min_size=1, max_size=3),
    fault=st.sampled_from([Fate.GOOD, Fate.FAULT, Fate.CONTRADICTION]),
    prompts=st.lists(st.integers(min_value=1, max_value=6), min_size=1, max_size=4),
    seed=st.integers(min_value=0, max_value=2**16),
)
def test_any_failures_that_leave_one_encoder_alive(fates: Fates, fault: Fate, prompts: list[int], seed: int) -> None:
    fates = [[fault, *fates[0]], *fates[1:], []]
    asyncio.run(answered_right([UnreliableEncoder(drawn) for drawn in fates], prompts, seed))


async def test_nothing_waits_for_a_poll() -> None:
    encoders = [UnreliableEncoder([Fate.BUSY, Fate.FAULT]), UnreliableEncoder([Fate.UNREACHABLE]), UnreliableEncoder()]
    async with fleet_of(encoders, poll_seconds=3600) as fleet:
        for size in (10, 1 << 20):  # hashed at once, and in a thread
            items = [image(b"%d" % number * size) for number in range(4)]
            async with fleet.encode(items, timeout=TIMEOUT) as call:
                embeddings = await call.embeddings()
            assert [embedding.numpy().tobytes() for embedding in embeddings] == [*map(payload_of, items)]


async def test_encoders_that_die_one_after_the_other() -> None:
    encoders = [UnreliableEncoder() for _ in range(4)]
    items = [image(b"%d" % number) for number in range(8)]
    async with fleet_of(encoders) as fleet:

        async def read() -> None:
            async with fleet.encode(items, timeout=TIMEOUT) as call:
                embeddings = await call.embeddings()
            assert [embedding.numpy().tobytes() for embedding in embeddings] == [*map(payload_of, items)]

        for number, encoder in enumerate(encoders[:-1]):
            await asyncio.gather(*(read() for _ in range(4)), encoder.stop())
            assert not any(other.leases for other in encoders[number + 1 :])


async def test_a_part_that_faults_everywhere_is_not_sent_everywhere() -> None:
    encoders = [UnreliableEncoder([Fate.FAULT] * 9) for _ in range(4)]
    async with fleet_of(encoders) as fleet, fleet.encode([image(b"poison")], timeout=TIMEOUT) as call:
        with pytest.raises(PartError, match="ENGINE_LOST"):
            await call.embeddings()
    assert sum(len(encoder.asked) for encoder in encoders) == 2
    assert max(len(encoder.asked) for encoder in encoders) == 1


async def test_a_busy_encoder_is_left_alone_as_long_as_it_says() -> None:
    busy = UnreliableEncoder([Fate.BUSY] * 3)
    async with fleet_of([busy]) as fleet, fleet.encode([image(b"a")], timeout=TIMEOUT) as call:
        [embedding] = await call.embeddings()
    assert embedding.numpy().tobytes() == payload_of(image(b"a"))
    assert len(busy.asked) == 4


async def test_busy_for_ever_ends_with_the_deadline_and_the_reason() -> None:
    busy = UnreliableEncoder([Fate.BUSY] * 100_000)
    async with fleet_of([busy]) as fleet:
        # The first limit is long enough for it to be asked twice, unless this machine is very busy.
        for seconds in (0.5, 5.0, 50.0):
            async with fleet.encode([image(b"a")], timeout=seconds) as call:
                events = [event async for event in call]
            if len(busy.asked) > 1:
                break
    [failed] = [event for event in events if isinstance(event, PartFailed)]
    assert failed.error.reason == "ADMISSION_FULL"
    assert not any(isinstance(event, PartCancelled) for event in events)


async def test_an_encoder_comes_back_by_a_probe() -> None:
    flaky = UnreliableEncoder([Fate.UNREACHABLE])
    async with fleet_of([flaky]) as fleet, fleet.encode([image(b"a")], timeout=TIMEOUT) as call:
        await eventually(lambda: fleet.states[flaky.target] is HealthState.EJECTED)
        await call.embeddings()
        assert fleet.states[flaky.target] is HealthState.SERVING
    assert len(flaky.asked) == 2


async def test_an_encoder_that_stops_answering_loses_its_calls() -> None:
    silent, other = UnreliableEncoder(), UnreliableEncoder()
    async with fleet_of([silent, other]) as fleet:
        silent.silent = True
        async with fleet.encode([image(b"%d" % n) for n in range(8)], timeout=TIMEOUT) as call:
            found = await call.embeddings()
        assert {embedding.chunk.encoder.instance_id for embedding in found} == {other.instance_id}
        assert silent.asked
        assert fleet.states[silent.target] is HealthState.EJECTED


@pytest.fixture
def endless_confirmations() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connections, "RELEASE_SECONDS", LONG)
        yield


@pytest.mark.usefixtures("endless_confirmations")
async def test_a_read_that_nobody_confirms_leaves_time_to_encode_elsewhere() -> None:
    """The encoder answers polls and calls, and no release: it is not ejected."""
    deaf, other = UnreliableEncoder(), UnreliableEncoder()
    deaf.confirms.clear()
    async with fleet_of([deaf, other], read_timeout=LONG) as fleet:
        # What is left after half of the first limit is enough, unless this machine is very busy.
        for seconds in (4.0, 16.0, 64.0):
            with suppress(PartError):
                async with fleet.encode([image(b"%d" % n) for n in range(8)], timeout=seconds) as call:
                    found = await call.embeddings()
                break
        assert {embedding.chunk.encoder.instance_id for embedding in found} == {other.instance_id}
        assert deaf.released.is_set()
        deaf.confirms.set()  # the end of a client waits for its releases


@pytest.mark.usefixtures("endless_confirmations")
async def test_an_encoder_that_falls_silent_is_not_waited_for_to_confirm() -> None:
    deaf, other = UnreliableEncoder(), UnreliableEncoder()
    deaf.confirms.clear()
    async with fleet_of([deaf, other], read_timeout=LONG) as fleet:
        async with fleet.encode([image(b"%d" % n) for n in range(8)]) as call:
            reads = asyncio.create_task(call.embeddings())
            await asyncio.wait_for(deaf.released.wait(), PATIENCE_SECONDS)
            deaf.silent = True
            found = await asyncio.wait_for(reads, PATIENCE_SECONDS)
        assert {embedding.chunk.encoder.instance_id for embedding in found} == {other.instance_id}


async def test_encoders_that_do_not_fit_together_are_named() -> None:
    one, other = UnreliableEncoder(), UnreliableEncoder()
    other.fingerprint = bytes(32)
    async with fleet_of([one, other]) as fleet, fleet.encode([image(b"a")]) as call:
        with pytest.raises(EncoderError, match="do not fit together"):
            await anext(aiter(call))
    assert not one.asked
    assert not other.asked
