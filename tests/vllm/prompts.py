"""Prompts with media, as vLLM with its own towers takes them and as the language-only one does."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from encoder_client import SyncEncoderClient, audio, image, video
from encoder_client.integrations.vllm.transfer_params import Part, transfer_params
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.media_pb2 import MediaItem

QUESTION = "What is it?"
ENCODE_SECONDS = 60.0


@dataclass(frozen=True)
class Media:
    """A media file in a prompt."""

    kind: str
    """``image``, ``video`` or ``audio``."""
    data: bytes
    max_pixels: int = 0

    @property
    def item(self) -> MediaItem:
        """As the encoder takes it."""
        if self.kind == "image":
            return image(self.data, max_pixels=self.max_pixels)
        return video(self.data) if self.kind == "video" else audio(self.data)

    @property
    def inline(self) -> dict[str, Any]:
        """As vLLM with its own towers takes it."""
        kinds = {"image": "image/jpeg", "video": "video/mp4", "audio": "audio/wav"}
        address = f"data:{kinds[self.kind]};base64,{base64.b64encode(self.data).decode()}"
        return {"type": f"{self.kind}_url", f"{self.kind}_url": {"url": address}}


def whole(media: Sequence[Media], text: str = QUESTION) -> dict[str, Any]:
    """The arguments of :meth:`Engine.chat` with the media themselves."""
    return {"content": [*(one.inline for one in media), {"type": "text", "text": text}]}


def encoded(client: SyncEncoderClient, media: Sequence[Media]) -> list[EmbeddingChunk]:
    """Has them encoded, so that the encoder has them in its cache."""
    submission = client.submit([one.item for one in media], timeout=ENCODE_SECONDS, polled=False)
    return [submission.futures[part_idx].result(ENCODE_SECONDS).chunk for part_idx in range(len(media))]


def language_only(
    media: Sequence[Media], chunks: Sequence[EmbeddingChunk], text: str = QUESTION, *, with_media: bool = False
) -> dict[str, Any]:
    """The arguments of :meth:`Engine.chat` with keys and grids in the place of the media.

    Args:
        media: the files.
        chunks: of each.
        text: the question behind them.
        with_media: the connector is given the media too, for when no encoder has the embedding.
    """
    content: list[dict[str, Any]] = []
    for one, chunk in zip(media, chunks, strict=True):
        metadata: dict[str, Any] = {f"{one.kind}_grid_thw": list(chunk.grid_dim)}
        if one.kind == "audio":
            metadata = {"audio_num_tokens": [chunk.token_count]}
        if chunk.video.video_timestamps:
            metadata["timestamps"] = list(chunk.video.video_timestamps)
        name = f"{one.kind}_embeds"
        content.append({"type": name, name: metadata, "uuid": chunk.content_key.hex()})
    parts = [
        Part(chunk.content_key, one.item if with_media else None) for one, chunk in zip(media, chunks, strict=True)
    ]
    return {"content": [*content, {"type": "text", "text": text}], "ec_transfer_params": transfer_params(parts)}
