"""Every modality over every transport, cached or not, alone or in a batch: always the same rows and metadata."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch

from encoder_client import ClientSettings, EncoderClient, Ready
from encoder_client.transports import TRANSPORTS
from encoder_svc.checkpoints.writer import write_checkpoint
from encoder_svc.models.registry import open_adapter
from epd.encoder.v1.encoder_service_pb2 import CachePolicy
from epd.encoder.v1.media_pb2 import FrameSequence, MediaItem, Modality
from tests.conftest import servers
from tests.media.sounds import plain, tones
from tests.media.videos import Clip, png
from tests.models.family_cases import Medium, prepare
from tests.photograph import photo
from tests.rpc.metrics_page import batches
from tests.server_process import ServerProcess
from tests.waiting import eventually

TOLERANCE = 1e-4


@cache
def media() -> Mapping[str, Medium]:
    frames = tuple(png(number, 56, 84) for number in range(6))
    return {
        "image": Medium("image", MediaItem(modality=Modality.MODALITY_IMAGE), (photo(168, 112),)),
        "video": Medium("video", MediaItem(modality=Modality.MODALITY_VIDEO), (Clip(frames=12).make(),)),
        "frames": Medium("frames", MediaItem(modality=Modality.MODALITY_VIDEO), frames),
        "audio": Medium("audio", MediaItem(modality=Modality.MODALITY_AUDIO), (plain(tones(1.3, 22_050), 22_050),)),
    }


def item(medium: Medium, part_idx: int) -> MediaItem:
    """The medium with its bytes."""
    made = MediaItem()
    made.CopyFrom(medium.item)
    made.part_idx = part_idx
    if medium.name == "frames":
        made.frames.CopyFrom(FrameSequence(frames=medium.files, fps=2.0))
    else:
        made.data = medium.files[0]
    return made


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("omni") / "tiny"
    write_checkpoint("qwen2_5_omni", folder)
    return folder


@pytest.fixture(scope="module")
def omni(checkpoint: Path) -> Iterator[ServerProcess]:
    with servers(checkpoint) as start:
        yield start(mooncake="on")


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> Mapping[str, tuple[torch.Tensor, tuple[int, ...]]]:
    """Rows and grid of each medium, encoded alone in this process."""
    adapter = open_adapter(checkpoint, "float32")
    tower = adapter.load_tower(torch.device("cpu"), lambda _step, _fraction: None)
    made = {}
    with torch.inference_mode():
        for name, medium in media().items():
            shown = item(medium, 0)
            prepared = prepare(adapter, Medium(name, shown, medium.files))
            made[name] = tower.encode([prepared.input])[0][0].clone(), tuple(prepared.layout.chunk.grid_dim)
    return made


@pytest.mark.parametrize(("transport", "cached"), list(product(TRANSPORTS, (False, True))))
async def test_f33_alone(
    omni: ServerProcess, expected: Mapping[str, tuple[torch.Tensor, tuple[int, ...]]], transport: str, cached: bool
) -> None:
    policy = CachePolicy.CACHE_POLICY_USE if cached else CachePolicy.CACHE_POLICY_BYPASS
    async with EncoderClient(omni.target, ClientSettings(transports=(transport,))) as client:
        for name, medium in media().items():
            for again in (False, True):
                async with client.encode([item(medium, 0)], cache_policy=policy) as call:
                    chunks = [event.chunk async for event in call if isinstance(event, Ready)]
                    (embedding,) = [await client.read(chunk) for chunk in chunks]
                if again:
                    assert chunks[0].from_cache == cached
                rows, grid = expected[name]
                assert embedding.transport == transport
                assert tuple(chunks[0].grid_dim) == grid
                torch.testing.assert_close(embedding.torch(), rows, atol=TOLERANCE, rtol=0)
                assert chunks[0].WhichOneof("media") == ("video" if name == "frames" else name)
                embedding.release()


async def wait_for_the_engine(server: ServerProcess, parts: int) -> bool:
    """So many parts are prepared."""
    waiting = (await server.info()).load.parts
    return waiting["prepared"] + waiting["encoding"] == parts


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_f33_in_batches_with_each_other(
    omni: ServerProcess, expected: Mapping[str, tuple[torch.Tensor, tuple[int, ...]]], transport: str
) -> None:
    names = [*media(), *reversed(list(media()))]
    before = await batches(omni)

    async def prompt(client: EncoderClient) -> None:
        items = [item(media()[name], place) for place, name in enumerate(names)]
        async with client.encode(items, cache_policy=CachePolicy.CACHE_POLICY_BYPASS) as call:
            embeddings = {embedding.chunk.part_idx: embedding for embedding in await call.embeddings()}
        for place, name in enumerate(names):
            torch.testing.assert_close(embeddings[place].torch(), expected[name][0], atol=TOLERANCE, rtol=0)
            embeddings[place].release()

    async with EncoderClient(omni.target, ClientSettings(transports=(transport,))) as client:
        with omni.held(omni.engine()):
            prompts = [asyncio.create_task(prompt(client)) for _ in range(3)]
            await eventually(lambda: wait_for_the_engine(omni, 3 * len(names)))
        await asyncio.gather(*prompts)
    count, total = (after - earlier for after, earlier in zip(await batches(omni), before, strict=True))
    assert total == 3 * len(names)
    assert count < total, "nothing was batched"
