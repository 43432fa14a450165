"""Videos with sound through the service: each sound stays with its video, whatever the way and the company."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch

from encoder_client import ClientSettings, Embedding, EncoderClient, MultiModalEmbedding
from encoder_client.language import LanguageOnlyModel
from encoder_client.transports import TRANSPORTS
from encoder_svc.checkpoints.writer import write_checkpoint
from encoder_svc.models.registry import FAMILIES, open_adapter
from epd.encoder.v1.encoder_service_pb2 import CachePolicy
from epd.encoder.v1.media_pb2 import MediaItem, Modality, VideoOptions
from tests.client.test_modalities import TOLERANCE, wait_for_the_engine
from tests.conftest import servers
from tests.media.movies import Track, movie
from tests.media.sounds import plain, tones
from tests.models.family_cases import Medium, Prepared, prepare
from tests.photograph import photo
from tests.server_process import ServerProcess
from tests.waiting import eventually

IMAGE, VIDEO, AUDIO = Modality.MODALITY_IMAGE, Modality.MODALITY_VIDEO, Modality.MODALITY_AUDIO
KINDS = {IMAGE: "image", VIDEO: "video", AUDIO: "audio"}
RATE = 24_000
SMALL = VideoOptions(num_frames=4, min_pixels=4096, max_pixels=16_384)
SOUND_FAMILIES = [name for name, family in FAMILIES.items() if "video_audio_embedding" in family.tensors]


def film(data: bytes) -> MediaItem:
    item = MediaItem(modality=VIDEO, video=SMALL, data=data)
    item.video.use_audio_in_video = True
    return item


@cache
def items() -> Mapping[str, MediaItem]:
    """One of every kind; those named after a track have one."""
    two = (Track(tones(2, RATE), RATE), Track(tones(2, 48_000, 2), 48_000, "stereo"))
    return {
        "an image": MediaItem(modality=IMAGE, data=photo(97, 131)),
        "a track as long": film(movie(3, Track(tones(3, RATE), RATE))),
        "silent": film(movie(2)),
        "a sound": MediaItem(modality=AUDIO, data=plain(tones(1.7, 44_100, 2), 44_100)),
        "a track that is shorter, at 8 kHz": film(movie(3, Track(tones(1, 8_000), 8_000))),
        "a track that is longer, of six channels": film(
            movie(1, Track(tones(3, 48_000, 6), 48_000, "5.1"), container="matroska")
        ),
        "not asked for": MediaItem(modality=VIDEO, video=SMALL, data=movie(2, Track(tones(2, RATE), RATE))),
        "a track that begins late": film(movie(3, Track(tones(1, RATE), RATE, begins=1.5))),
        "a track of two": film(movie(2, *two)),
    }


@dataclass
class Service:
    """Two encoders of one checkpoint, and what its towers make of each item alone, without them."""

    family: str
    checkpoint: Path
    encoders: tuple[ServerProcess, ServerProcess]
    prepared: Mapping[str, Prepared]
    matrices: Mapping[str, tuple[torch.Tensor, ...]]

    def rows(self, name: str) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """As the language side takes them."""
        seen, *heard = self.matrices[name]
        return (seen, heard[0]) if heard else seen

    def check(self, name: str, embedding: Embedding) -> None:
        """What was read is what the towers make of the item."""
        expected, chunk = self.matrices[name], embedding.chunk
        assert sounds(name) == ("video_audio_embedding" in embedding.names) == (len(expected) == 2), name
        whole = torch.cat([embedding.torch(tensor) for tensor in embedding.names if "video_audio" not in tensor], 1)
        torch.testing.assert_close(whole, expected[0], atol=TOLERANCE, rtol=0)
        if sounds(name):
            heard = embedding.torch("video_audio_embedding")
            torch.testing.assert_close(heard, expected[1], atol=TOLERANCE, rtol=0)
        if items()[name].modality == VIDEO:
            told = chunk.video.audio
            assert chunk.video.HasField("audio"), "every video tells of its sound"
            assert bool(told.video_audio_feature_lens) == sounds(name)
            assert told.video_audio_per_video_num_units == (chunk.grid_dim[0] if sounds(name) else 0)
            assert sum(told.video_audio_segment_lens_flat) == (len(expected[1]) if sounds(name) else 0)


def sounds(name: str) -> bool:
    return name.startswith("a track")


@pytest.fixture(scope="module", params=SOUND_FAMILIES)
def service(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    checkpoint = tmp_path_factory.mktemp("sound") / request.param
    write_checkpoint(request.param, checkpoint)
    adapter = open_adapter(checkpoint, "float32")
    tower = adapter.load_tower(torch.device("cpu"), lambda _step, _fraction: None)
    prepared = {name: prepare(adapter, Medium(name, item, (item.data,))) for name, item in items().items()}
    matrices = {
        name: tuple(tower.encode([taken])[0][0] for taken in (one.input, one.sound) if taken is not None)
        for name, one in prepared.items()
    }
    with servers(checkpoint) as start:
        yield Service(request.param, checkpoint, (start(mooncake="on"), start(mooncake="on")), prepared, matrices)


def parts(names: Sequence[str]) -> list[MediaItem]:
    made = []
    for number, name in enumerate(names):
        copy = MediaItem()
        copy.CopyFrom(items()[name])
        copy.part_idx = number
        made.append(copy)
    return made


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_f33_sound_comes_by_every_transport_alone_or_in_batches(service: Service, transport: str) -> None:
    names = list(items())
    async with EncoderClient(service.encoders[0].target, ClientSettings(transports=(transport,))) as client:
        for name in names:
            async with client.encode(parts([name]), cache_policy=CachePolicy.CACHE_POLICY_BYPASS) as call:
                (embedding,) = await call.embeddings()
            assert embedding.transport == transport
            service.check(name, embedding)
            embedding.release()
        async with client.encode(parts(names * 2), cache_policy=CachePolicy.CACHE_POLICY_BYPASS) as call:
            encoder = service.encoders[0]
            with encoder.held(encoder.engine()):
                reading = asyncio.create_task(call.embeddings())
                await eventually(lambda: wait_for_the_engine(encoder, 2 * len(names)))
            embeddings = await reading
        for name, embedding in zip(names * 2, embeddings, strict=True):
            service.check(name, embedding)
        assert max(embedding.chunk.timings.batch_items for embedding in embeddings) > 1, "nothing was batched"


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_f33_sound_comes_from_the_cache(service: Service, transport: str) -> None:
    names = list(items())
    async with EncoderClient(service.encoders[0].target, ClientSettings(transports=(transport,))) as client:
        for _ in range(2):
            async with client.encode(parts(names)) as call:
                embeddings = await call.embeddings()
        for name, embedding in zip(names, embeddings, strict=True):
            assert embedding.chunk.from_cache
            service.check(name, embedding)


async def test_f31_each_sound_stays_with_its_video_across_two_encoders(service: Service) -> None:
    """One prompt, whose parts go to two encoders by turns, so that silent videos stand among others' sounding ones."""
    names = list(items())
    chosen = parts(names)
    targets = [encoder.target for encoder in service.encoders]
    async with AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(EncoderClient(target)) for target in targets]
        calls = [
            await stack.enter_async_context(client.encode(chosen[number::2], prompt_id="both", num_parts=len(chosen)))
            for number, client in enumerate(clients)
        ]
        found = {embedding.chunk.part_idx: embedding for call in calls for embedding in await call.embeddings()}
        embeddings = [found[number] for number in range(len(chosen))]
        assert len({embedding.chunk.encoder.instance_id for embedding in embeddings}) == 2
        for name, embedding in zip(names, embeddings, strict=True):
            service.check(name, embedding)
        # The whole prompt: the sound of its videos in one piece.
        whole = MultiModalEmbedding(embeddings[0].chunk.prompt_id, len(names))
        whole.add(*reversed(embeddings))
        told = whole.video_audio()
        assert told is not None
        videos = [name for name in names if items()[name].modality == VIDEO]
        assert [units > 0 for units in told.video_audio_per_video_num_units] == [sounds(name) for name in videos]
        heard = torch.cat([service.matrices[name][1] for name in videos if sounds(name)])
        together = whole.torch(VIDEO, "video_audio_embedding")
        torch.testing.assert_close(together, heard, atol=TOLERANCE, rtol=0)
        assert told.video_audio_segment_lens_flat.sum() == len(heard)
        if service.family != "mimo_v2":
            frames = whole.metadata(VIDEO)["audio_feature_lengths"]
            assert [bool(count) for count in frames.flatten()] == [sounds(name) for name in videos]
        language = LanguageOnlyModel.load(service.checkpoint)
        messages = [{"role": "user", "content": [{"type": KINDS[item.modality]} for item in chosen]}]
        prompt = language.expand(messages, [embedding.chunk for embedding in embeddings])
        answer = language.generate(prompt, embeddings, max_new_tokens=4, first_logits=True)
        alone = [service.rows(name) for name in names]
        expected = language.generate(prompt, alone, max_new_tokens=4, first_logits=True)
    assert answer.token_ids == expected.token_ids
    assert answer.first_logits is not None
    assert expected.first_logits is not None
    torch.testing.assert_close(answer.first_logits, expected.first_logits, atol=1e-3, rtol=0)


def test_tracks_are_as_long_as_they_are(service: Service) -> None:
    """Rows of sound follow the track, and those of MiMo-V2 end with the video."""
    rows = {name: len(matrices[1]) for name, matrices in service.matrices.items() if sounds(name)}
    a_second = {"mimo_v2": 6.25, "qwen2_5_omni": 25, "qwen3_omni_moe": 13}[service.family]
    seconds = {
        "a track as long": 3.0,
        "a track that is shorter, at 8 kHz": 1.1,
        "a track that is longer, of six channels": 1.3 if service.family == "mimo_v2" else 3.0,
        "a track that begins late": 2.5,
        "a track of two": 2.0,
    }
    for name, length in seconds.items():
        assert rows[name] == pytest.approx(length * a_second, abs=0.2 * a_second + 1), name
