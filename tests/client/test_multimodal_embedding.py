"""A prompt put together: any encoders, any order, duplicates; and what does not fit is refused."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from encoder_client import (
    ChunkError,
    ClientSettings,
    Embedding,
    EmbeddingPool,
    EncoderClient,
    Layout,
    MultiModalEmbedding,
    PromptError,
    Ready,
    image,
)
from encoder_client.pool.embedding_pool import Slot
from epd.encoder.v1.embedding_pb2 import (
    DataType,
    DoubleList,
    EmbeddingChunk,
    Int64List,
    PlaceholderValue,
    StringList,
    TensorSpec,
    VideoAudioMetadata,
)
from epd.encoder.v1.media_pb2 import Modality
from tests.client.chunks import layout, ready, rows
from tests.client.scripted_encoder import ScriptedEncoder
from tests.photograph import photo
from tests.server_process import ServerProcess

WIDTH = 8
IMAGE, VIDEO, AUDIO = Modality.MODALITY_IMAGE, Modality.MODALITY_VIDEO, Modality.MODALITY_AUDIO


@dataclass(frozen=True)
class Medium:
    """One item, and what an encoder makes of it."""

    modality: Modality
    rows: int
    units: tuple[int, ...] = ()
    """The rows of sound of each unit of a video. None: silent."""
    seed: int = 0

    @property
    def matrix(self) -> npt.NDArray[np.float32]:
        """The rows of the item; an image has a deepstack level beside each."""
        return rows(self.rows, WIDTH * (2 if self.modality == IMAGE else 1), self.seed)

    @property
    def sound(self) -> npt.NDArray[np.float32]:
        """The rows of its sound."""
        return rows(sum(self.units), WIDTH, self.seed + 10_000)


def embedding(medium: Medium, part: int, num_parts: int, encoder: int = 0) -> Embedding:
    """What a client has read from an encoder."""
    matrix = medium.matrix
    chunk = ready(matrix, part, num_parts)
    chunk.modality = medium.modality
    chunk.content_key = bytes([part + 1] * 32)
    chunk.encoder.instance_id = f"{encoder:032x}"
    data = matrix.tobytes()
    if medium.modality == IMAGE:
        del chunk.tensors[:]
        chunk.tensors.extend(
            column(name, index, medium.rows) for index, name in enumerate(("embedding", "deepstack_0"))
        )
        grid = Int64List(values=[1, 2 * medium.rows, 2])
        chunk.placeholder_metadata.append(PlaceholderValue(name="image_grid_thw", ints=grid, shape=[1, 3]))
    elif medium.modality == VIDEO:
        seconds = DoubleList(values=[medium.seed / 2])
        chunk.placeholder_metadata.append(PlaceholderValue(name="second_per_grid_ts", doubles=seconds))
        chunk.video.audio.CopyFrom(
            VideoAudioMetadata(
                video_audio_feature_lens=sum(medium.units) + 1 if medium.units else 0,
                video_audio_segment_lens_flat=medium.units,
                video_audio_per_video_num_units=len(medium.units),
            )
        )
        if sum(medium.units):
            spec = column("video_audio_embedding", 0, sum(medium.units), WIDTH)
            spec.byte_offset = len(data)
            chunk.tensors.append(spec)
            data += medium.sound.tobytes()
            chunk.nbytes = len(data)
    slot = Slot.outside(len(data))
    slot.view[:] = data
    return Embedding(chunk, slot, "inline", 0.0)


def column(name: str, index: int, count: int, width: int = 2 * WIDTH) -> TensorSpec:
    return TensorSpec(
        name=name,
        dtype=DataType.DATA_TYPE_FLOAT32,
        shape=[count, WIDTH],
        strides=[4 * width, 4],
        byte_offset=4 * WIDTH * index,
    )


def joined(matrices: list[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    return np.concatenate([np.empty((0, WIDTH), np.float32), *matrices])


MEDIA = st.builds(
    Medium,
    st.sampled_from([IMAGE, VIDEO, AUDIO]),
    rows=st.integers(1, 5),
    units=st.lists(st.integers(0, 3), max_size=4).map(tuple),
    seed=st.integers(0, 1000),
)


@given(media=st.lists(MEDIA, min_size=1, max_size=8), layouts=st.booleans(), chance=st.randoms(use_true_random=False))
def test_any_encoders_in_any_order_with_duplicates_give_the_same(
    media: list[Medium], layouts: bool, chance: Random
) -> None:
    arrivals = [*range(len(media)), *(chance.randrange(len(media)) for _ in range(chance.randrange(5)))]
    chance.shuffle(arrivals)
    prompt = MultiModalEmbedding("p", len(media))
    if layouts:
        for part in chance.sample(range(len(media)), len(media)):
            prompt.expect(embedding(media[part], part, len(media), chance.randrange(3)).chunk)
    for count, part in enumerate(arrivals):
        new = part not in arrivals[:count]
        assert (part in prompt.missing) == new
        assert prompt.add(embedding(media[part], part, len(media), chance.randrange(3))) == new
    assert prompt.complete
    assert [part.chunk.part_idx for part in prompt.parts()] == list(range(len(media)))
    by_kind = {kind: [medium for medium in media if medium.modality == kind] for kind in (IMAGE, VIDEO, AUDIO)}
    for kind, items in by_kind.items():
        if items:
            expected = joined([medium.matrix[:, :WIDTH] for medium in items])
            np.testing.assert_array_equal(prompt.numpy(kind), expected)
            np.testing.assert_array_equal(prompt.torch(kind).numpy(), expected)
            assert prompt.grids(kind) == [(1, 2 * medium.rows, 2) for medium in items]
        else:
            with pytest.raises(PromptError, match="has no item of"):
                prompt.numpy(kind)
    if images := by_kind[IMAGE]:
        grids = prompt.metadata(IMAGE)["image_grid_thw"]
        np.testing.assert_array_equal(grids, [[1, 2 * medium.rows, 2] for medium in images])
        expected = joined([medium.matrix[:, WIDTH:] for medium in images])
        np.testing.assert_array_equal(prompt.numpy(IMAGE, "deepstack_0"), expected)
    if videos := by_kind[VIDEO]:
        seconds = prompt.metadata(VIDEO)["second_per_grid_ts"]
        np.testing.assert_array_equal(seconds, [medium.seed / 2 for medium in videos])
        expected = joined([medium.sound for medium in videos])
        np.testing.assert_array_equal(prompt.numpy(VIDEO, "video_audio_embedding"), expected)
        np.testing.assert_array_equal(prompt.torch(VIDEO, "video_audio_embedding").numpy(), expected)
        sound = prompt.video_audio()
        assert sound is not None
        assert sound.video_audio_feature_lens.tolist() == [sum(v.units) + 1 for v in videos if v.units]
        assert sound.video_audio_segment_lens_flat.tolist() == [length for v in videos for length in v.units]
        assert sound.video_audio_per_video_num_units.tolist() == [len(v.units) for v in videos]
    else:
        assert prompt.video_audio() is None


def test_one_item_is_a_view_and_more_are_a_copy() -> None:
    part = embedding(Medium(AUDIO, 3), 0, 1)
    prompt = MultiModalEmbedding("p", 1)
    prompt.add(part)
    assert np.shares_memory(prompt.numpy(AUDIO), part.numpy())
    assert prompt.torch(AUDIO).data_ptr() == part.torch().data_ptr()
    assert torch.equal(prompt.torch(AUDIO), torch.from_numpy(prompt.numpy(AUDIO)))


def test_f31_a_silent_video_keeps_its_place_among_sounding_ones() -> None:
    prompt = MultiModalEmbedding("p", 3)
    media = [Medium(VIDEO, 2, (2, 1)), Medium(VIDEO, 2), Medium(VIDEO, 2, (0, 4), seed=1)]
    for part in (2, 0, 1):
        prompt.add(embedding(media[part], part, 3))
    sound = prompt.video_audio()
    assert sound is not None
    assert sound.video_audio_per_video_num_units.tolist() == [2, 0, 2]
    assert sound.video_audio_segment_lens_flat.tolist() == [2, 1, 0, 4]
    np.testing.assert_array_equal(
        prompt.numpy(VIDEO, "video_audio_embedding"), joined([media[0].sound, media[2].sound])
    )


async def test_memory_of_a_duplicate_and_of_a_released_prompt_comes_back() -> None:
    pool = EmbeddingPool(1 << 16)
    data = rows()

    async def read() -> Embedding:
        slot = (await pool.reserve("p", [data.nbytes])).take(0)
        return Embedding(ready(data), slot, "inline", 0.0)

    prompt = MultiModalEmbedding("p", 1)
    first = await read()
    assert prompt.add(first)
    assert prompt.add(first)  # the very same
    assert not prompt.add(await read())
    gc.collect()
    assert pool.statistics.slots == 1
    del first
    prompt.release()
    gc.collect()
    assert pool.statistics.slots == 0


async def test_leases_of_duplicates_and_of_what_does_not_fit_go_back_unread() -> None:
    data = rows(40, 8)
    encoder = ScriptedEncoder(payload=data.tobytes)
    async with encoder.serve() as target, EncoderClient(target, ClientSettings(transports=("inline",))) as client:
        chunk = ready(data)
        chunk.encoder.grpc_target = target
        prompt = MultiModalEmbedding("p", 1)
        assert await prompt.read(client, chunk)
        assert not await prompt.read(client, chunk)
        other = EmbeddingChunk()
        other.CopyFrom(chunk)
        other.prompt_id = "another"
        with pytest.raises(PromptError, match="another prompt"):
            await prompt.read(client, other)
    assert encoder.outcomes == ["OK", "ABANDONED", "ABANDONED"]
    assert encoder.fetches == 1


def test_gaps_are_told() -> None:
    prompt = MultiModalEmbedding("p", 3)
    prompt.add(embedding(Medium(IMAGE, 2), 1, 3))
    assert (prompt.missing, prompt.complete) == ([0, 2], False)
    with pytest.raises(PromptError, match=r"parts \[0, 2\] of 3 are missing; wait"):
        prompt.numpy(IMAGE)


def change(make: Callable[[EmbeddingChunk], object]) -> Embedding:
    changed = embedding(Medium(IMAGE, 4, seed=5), 1, 2)
    make(changed.chunk)
    return changed


def narrower(chunk: EmbeddingChunk) -> None:
    for tensor in chunk.tensors:
        tensor.shape[1] = WIDTH // 2


def half(chunk: EmbeddingChunk) -> None:
    for tensor in chunk.tensors:
        tensor.dtype = DataType.DATA_TYPE_FLOAT16


FOREIGN: dict[str, tuple[Callable[[EmbeddingChunk], object], str]] = {
    "another prompt": (lambda chunk: setattr(chunk, "prompt_id", "q"), "of another prompt"),
    "another number of parts": (lambda chunk: setattr(chunk, "num_parts", 3), "say the same num_parts"),
    "another model": (lambda chunk: setattr(chunk, "compatibility_fingerprint", bytes(32)), "do not fit together"),
    "another width": (narrower, "width 4, and part 0 float32 of width 8"),
    "another dtype": (half, "float16 of width 8, and part 0 float32"),
    "no deepstack": (lambda chunk: chunk.tensors.pop(), "the tensors of parts 1 and 0, both IMAGE, differ"),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_part_that_does_not_fit_beside_the_others_is_refused(kind: str) -> None:
    make, told = FOREIGN[kind]
    prompt = MultiModalEmbedding("p", 2)
    prompt.add(embedding(Medium(IMAGE, 3), 0, 2))
    with pytest.raises(PromptError, match=told):
        prompt.add(change(make))
    assert prompt.missing == [1], "what is refused leaves nothing"
    assert prompt.add(change(lambda chunk: None))


def shorter(chunk: EmbeddingChunk) -> None:
    chunk.token_count = 3
    for tensor in chunk.tensors:
        tensor.shape[0] = 3


CONFLICTS: dict[str, tuple[Callable[[EmbeddingChunk], object], str]] = {
    "content": (lambda chunk: setattr(chunk, "content_key", bytes(32)), "two contents; send one media item"),
    "rows": (shorter, "token_count than was told of it: 3, and 4 before"),
    "grid": (lambda chunk: chunk.grid_dim.append(1), "grid_dim"),
    "modality": (lambda chunk: setattr(chunk, "modality", AUDIO), "is AUDIO, and was IMAGE before"),
    "metadata": (lambda chunk: chunk.placeholder_metadata.pop(), "placeholder_metadata"),
}


@pytest.mark.parametrize("kind", CONFLICTS)
@pytest.mark.parametrize("known", ["embedding", "layout"])
def test_f13_a_part_that_contradicts_what_is_known_of_it_is_refused(kind: str, known: str) -> None:
    make, told = CONFLICTS[kind]
    prompt = MultiModalEmbedding("p", 2)
    first = change(lambda chunk: None)
    if known == "layout":
        prompt.expect(first.chunk)
    else:
        prompt.add(first)
    with pytest.raises(PromptError, match=told):
        prompt.add(change(make))


def test_the_checksum_decides_where_no_content_key_does() -> None:
    prompt = MultiModalEmbedding("p", 1)
    prompt.add(Embedding(ready(rows()), Slot.outside(192), "inline", 0.0))
    assert not prompt.add(Embedding(ready(rows()), Slot.outside(192), "inline", 0.0))
    with pytest.raises(PromptError, match="two contents"):
        prompt.add(Embedding(ready(rows(seed=1)), Slot.outside(192), "inline", 0.0))


def test_rows_may_be_fewer_than_an_upper_bound_and_not_more() -> None:
    bound = layout(8, 8)
    bound.token_count_is_upper_bound = True
    for count, fits in ((8, True), (5, True), (9, False)):
        prompt = MultiModalEmbedding("p", 1)
        prompt.expect(bound)
        read = Embedding(ready(rows(count, 8)), Slot.outside(count * 32), "inline", 0.0)
        if fits:
            assert prompt.add(read)
        else:
            with pytest.raises(PromptError, match="has 9 rows, and LAYOUT told of 8 at most"):
                prompt.add(read)


def test_sound_that_contradicts_itself_is_refused() -> None:
    prompt = MultiModalEmbedding("p", 1)
    faulty = embedding(Medium(VIDEO, 2, (1, 2)), 0, 1)
    faulty.chunk.video.audio.video_audio_segment_lens_flat[0] = 2
    with pytest.raises(PromptError, match="3 rows of sound, and tells of 4"):
        prompt.add(faulty)


def test_f31_metadata_that_one_part_lacks_are_not_joined() -> None:
    prompt = MultiModalEmbedding("p", 2)
    full, bare = (embedding(Medium(VIDEO, 2, (1,), seed), seed, 2) for seed in range(2))
    del bare.chunk.placeholder_metadata[:]
    bare.chunk.video.ClearField("audio")
    del bare.chunk.tensors[1:]
    prompt.add(full, bare)
    with pytest.raises(PromptError, match="part 1 comes without second_per_grid_ts"):
        prompt.metadata(VIDEO)
    with pytest.raises(PromptError, match="part 1 does not tell whether it has sound"):
        prompt.video_audio()


def test_values_of_every_kind_and_shape_are_joined() -> None:
    prompt = MultiModalEmbedding("p", 2)
    for part in range(2):
        read = Embedding(ready(rows(), part, 2), Slot.outside(192), "inline", 0.0)
        read.chunk.content_key = bytes([part + 1] * 32)
        for value in (
            PlaceholderValue(name="vector", ints=Int64List(values=[part, 2]), shape=[2]),
            PlaceholderValue(name="scalar", ints=Int64List(values=[part])),
            PlaceholderValue(name="batched", doubles=DoubleList(values=[part / 2]), shape=[1]),
            PlaceholderValue(name="tiles", ints=Int64List(values=range(2 * part + 2)), shape=[part + 1, 2]),
            PlaceholderValue(name="words", strings=StringList(values=["a"]), shape=[1]),
            PlaceholderValue(name="ragged", ints=Int64List(values=range(part + 1)), shape=[1, part + 1]),
        )[: 6 - part]:
            read.chunk.placeholder_metadata.append(value)
        if part:
            read.chunk.placeholder_metadata.add(name="ragged", ints=Int64List(values=[1, 2]), shape=[1, 2])
        prompt.add(read)
    with pytest.raises(PromptError, match=r"ragged cannot be joined, its shapes are \(1, 1\), \(1, 2\)"):
        prompt.metadata(IMAGE)
    for read in prompt.parts():
        read.chunk.placeholder_metadata.pop()
    values = {name: value.tolist() for name, value in prompt.metadata(IMAGE).items()}
    assert values == {
        "vector": [[0, 2], [1, 2]],
        "scalar": [0, 1],
        "batched": [0.0, 0.5],
        "tiles": [[0, 1], [0, 1], [2, 3]],
        "words": ["a", "a"],
    }


def test_the_receivers_own_fingerprint_decides() -> None:
    with pytest.raises(ChunkError, match="compatibility_fingerprint"):
        MultiModalEmbedding("p", 1, expected_fingerprint=bytes(32)).add(embedding(Medium(IMAGE, 1), 0, 1))
    with pytest.raises(ValueError, match="no parts"):
        MultiModalEmbedding("p", 0)


async def test_two_real_encoders_make_one_prompt(server: ServerProcess, mooncake_server: ServerProcess) -> None:
    items = [image(photo(width, 112), part_idx=part) for part, width in enumerate((112, 140, 168))]
    async with EncoderClient(server.target) as near, EncoderClient(mooncake_server.target) as far:
        async with near.encode(items) as call:
            alone = await call.embeddings()
        prompt = MultiModalEmbedding("p", 3)
        async with far.encode([items[1], items[2]], prompt_id="p", num_parts=3) as call:
            async for event in call:
                match event:
                    case Layout(chunk):
                        prompt.expect(chunk)
                    case Ready(chunk):
                        assert await prompt.read(far, chunk)
        assert prompt.missing == [0]
        async with near.encode([items[2], items[0]], prompt_id="p", num_parts=3) as call:
            assert not prompt.add(*await call.embeddings()), "part 2 is there"
        for client in (near, far):
            assert (await client.server_info()).load.leases == 0
    expected = np.concatenate([embedding.numpy() for embedding in alone])
    np.testing.assert_allclose(prompt.numpy(IMAGE), expected, atol=1e-4)
    assert prompt.metadata(IMAGE)["image_grid_thw"].tolist() == [list(embedding.grid) for embedding in alone]
    assert len({part.chunk.encoder.instance_id for part in prompt.parts()}) == 2
