"""MiMo-V2 through the service: videos with sound and without, sound and images, in one prompt."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from encoder_client import EncoderClient, MultiModalEmbedding
from encoder_svc.checkpoints.writer import write_checkpoint
from encoder_svc.models.registry import open_adapter
from epd.encoder.v1.media_pb2 import MediaItem, Modality, VideoOptions
from tests.media.movies import Track, movie
from tests.media.sounds import plain, tones
from tests.models.family_cases import Medium, prepare
from tests.photograph import photo
from tests.server_process import ServerProcess

WITH_SOUND = VideoOptions(use_audio_in_video=True)
RATE = 24_000

ITEMS = {
    "an image": MediaItem(modality=Modality.MODALITY_IMAGE, data=photo(97, 131)),
    "as long": MediaItem(
        modality=Modality.MODALITY_VIDEO, video=WITH_SOUND, data=movie(4, Track(tones(4, RATE), RATE))
    ),
    "silent": MediaItem(modality=Modality.MODALITY_VIDEO, video=WITH_SOUND, data=movie(3)),
    "sound": MediaItem(modality=Modality.MODALITY_AUDIO, data=plain(tones(1.7, 44_100, 2), 44_100)),
    "shorter": MediaItem(
        modality=Modality.MODALITY_VIDEO, video=WITH_SOUND, data=movie(4, Track(tones(1, 8_000), 8_000))
    ),
    "not asked for": MediaItem(modality=Modality.MODALITY_VIDEO, data=movie(3, Track(tones(3, RATE), RATE))),
}
SOUNDING = ("as long", "shorter")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mimo") / "mimo_v2"
    write_checkpoint("mimo_v2", directory)
    return directory


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[ServerProcess]:
    server = ServerProcess(checkpoint, mooncake="on")
    try:
        yield server.wait_ready()
    finally:
        server.close()


@pytest.fixture(scope="module")
def matrices(checkpoint: Path) -> list[tuple[torch.Tensor, ...]]:
    """What the towers make of each item alone, without the service."""
    adapter = open_adapter(checkpoint, "float32")
    tower = adapter.load_tower(torch.device("cpu"), lambda _step, _fraction: None)
    prepared = [prepare(adapter, Medium(name, item, (item.data,))) for name, item in ITEMS.items()]
    return [
        tuple(tower.encode([taken])[0][0] for taken in (one.input, one.sound) if taken is not None) for one in prepared
    ]


async def test_f33_sound_of_videos_comes_by_every_transport_cached_or_not(
    server: ServerProcess, matrices: list[tuple[torch.Tensor, ...]]
) -> None:
    items = [MediaItem() for _ in ITEMS]
    for number, (copy, item) in enumerate(zip(items, ITEMS.values(), strict=True)):
        copy.CopyFrom(item)
        copy.part_idx = number
    for transport, cached in (("mooncake", False), ("inline", True), ("mooncake", True)):
        async with (
            EncoderClient(server.target, transports=(transport,)) as client,
            client.encode(items) as call,
        ):
            embeddings = await call.embeddings()
        for name, embedding, expected in zip(ITEMS, embeddings, matrices, strict=True):
            assert embedding.transport == transport
            assert embedding.chunk.from_cache == cached
            assert len(embedding.names) == len(expected) == (2 if name in SOUNDING else 1), name
            for tensor, rows in zip(embedding.names, expected, strict=True):
                torch.testing.assert_close(embedding.torch(tensor), rows, atol=1e-4, rtol=0)
            if ITEMS[name].modality == Modality.MODALITY_VIDEO:
                sound = embedding.chunk.video.audio
                assert embedding.chunk.video.HasField("audio")
                assert bool(sound.video_audio_feature_lens) == (name in SOUNDING)
                assert sum(sound.video_audio_segment_lens_flat) == (len(expected[1]) if name in SOUNDING else 0)
        # The whole prompt: the sound of its videos in one piece.
        prompt = MultiModalEmbedding(embeddings[0].chunk.prompt_id, len(items))
        prompt.add(*reversed(embeddings))
        videos = [name for name, item in ITEMS.items() if item.modality == Modality.MODALITY_VIDEO]
        told = prompt.video_audio()
        assert told is not None
        assert [units > 0 for units in told.video_audio_per_video_num_units] == [name in SOUNDING for name in videos]
        heard = [rows[1] for name, rows in zip(ITEMS, matrices, strict=True) if name in SOUNDING]
        whole = prompt.torch(Modality.MODALITY_VIDEO, "video_audio_embedding")
        torch.testing.assert_close(whole, torch.cat(heard), atol=1e-4, rtol=0)
        assert told.video_audio_segment_lens_flat.sum() == len(whole)
