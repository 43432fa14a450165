"""The point of it all: service and language-only worker say what the whole model says.

The reference is transformers alone, from the file to the tokens: its PIL image processor, its tower, its language
model. That processor resizes otherwise than the one that the service equals to the bit, so the photographs' sides are
multiples of 28: nothing is resized, and both see the same pixels.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2VLImageProcessorPil

from encoder_client import ClientSettings, Embedding, EncodeCall, EncoderClient, Ready, image
from encoder_client.language import Generation, LanguageOnlyModel
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk
from epd.encoder.v1.media_pb2 import MediaItem
from tests.photograph import photo
from tests.server_process import ServerProcess

NEW_TOKENS = 16
PHOTOS = (photo(252, 196), photo(112, 280), photo(140, 140))


@dataclass(frozen=True)
class Reference:
    """What the whole model says to some photographs."""

    token_ids: list[int]
    first_logits: torch.Tensor
    rows: tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Models:
    """The two halves and the whole."""

    language: LanguageOnlyModel
    whole: Any
    processor: Any

    def messages(self, count: int) -> list[dict[str, Any]]:
        images = [{"type": "image"} for _ in range(count)]
        return [{"role": "user", "content": [*images, {"type": "text", "text": "what is this?"}]}]

    def reference(self, photos: Sequence[bytes], layouts: Sequence[EmbeddingChunk]) -> Reference:
        pictures = [Image.open(io.BytesIO(file)).convert("RGB") for file in photos]
        pixels = self.processor(images=pictures, return_tensors="pt")
        prompt = self.language.expand(self.messages(len(photos)), layouts)
        assert torch.equal(prompt.values["image_grid_thw"], pixels["image_grid_thw"])
        with torch.inference_mode():
            rows = self.whole.get_image_features(**pixels).pooler_output
            answer = self.whole.generate(
                input_ids=prompt.input_ids,
                attention_mask=torch.ones_like(prompt.input_ids),
                mm_token_type_ids=prompt.mm_token_type_ids,
                **pixels,
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                return_dict_in_generate=True,
                output_logits=True,
            )
        tokens = answer.sequences[0, prompt.input_ids.shape[1] :].tolist()
        return Reference(tokens, answer.logits[0][0], tuple(rows))

    def answer(self, layouts: Sequence[EmbeddingChunk], embeddings: Sequence[Embedding | torch.Tensor]) -> Generation:
        prompt = self.language.expand(self.messages(len(layouts)), layouts)
        return self.language.generate(prompt, embeddings, max_new_tokens=NEW_TOKENS, first_logits=True)


@pytest.fixture(scope="module")
def models(tiny_checkpoint: Path) -> Models:
    return Models(
        LanguageOnlyModel.load(tiny_checkpoint),
        Qwen2_5_VLForConditionalGeneration.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval(),
        Qwen2VLImageProcessorPil.from_pretrained(tiny_checkpoint),
    )


def assert_equal(answer: Generation, reference: Reference) -> None:
    assert answer.token_ids == reference.token_ids
    assert answer.first_logits is not None
    torch.testing.assert_close(answer.first_logits, reference.first_logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize("transport", ["mooncake", "inline"])
async def test_one_photo(mooncake_server: ServerProcess, models: Models, transport: str) -> None:
    async with (
        EncoderClient(mooncake_server.target, ClientSettings(transports=(transport,))) as client,
        client.encode([image(PHOTOS[0])]) as call,
    ):
        [embedding] = await call.embeddings()
    assert embedding.transport == transport
    layouts = list(call.layouts.values())
    reference = models.reference(PHOTOS[:1], layouts)
    torch.testing.assert_close(embedding.torch(), reference.rows[0], atol=1e-4, rtol=0)
    answer = models.answer(layouts, [embedding])
    assert_equal(answer, reference)

    zeroed = models.answer(layouts, [torch.zeros_like(embedding.torch())])
    with pytest.raises(AssertionError):
        assert_equal(zeroed, reference)


async def test_three_photos_in_two_concurrent_calls_of_one_prompt(
    mooncake_server: ServerProcess, models: Models
) -> None:
    async def ready(call: EncodeCall) -> list[EmbeddingChunk]:
        return [event.chunk async for event in call if isinstance(event, Ready)]

    def items(*parts: int) -> list[MediaItem]:
        return [image(PHOTOS[part], part_idx=part) for part in parts]

    # The first call has the last and the first part, the second the one between them: parts arrive out of order.
    async with (
        EncoderClient(mooncake_server.target) as client,
        client.encode(items(2, 0), prompt_id="three", num_parts=3) as ends,
        client.encode(items(1), prompt_id="three", num_parts=3) as middle,
    ):
        of_ends, of_middle = await asyncio.gather(ready(ends), ready(middle))
        assert {chunk.request_id for chunk in of_ends} != {chunk.request_id for chunk in of_middle}
        arrived = [*sorted(of_ends, key=lambda chunk: -chunk.part_idx), *of_middle]
        embeddings = [await client.read(chunk) for chunk in arrived]
    assert [embedding.chunk.part_idx for embedding in embeddings] == [2, 0, 1]
    layouts = [*ends.layouts.values(), *middle.layouts.values()]
    reference = models.reference(PHOTOS, layouts)
    assert_equal(models.answer(layouts, embeddings), reference)

    for part in range(3):
        spoilt = [
            torch.zeros_like(embedding.torch()) if embedding.chunk.part_idx == part else embedding.torch()
            for embedding in sorted(embeddings, key=lambda embedding: embedding.chunk.part_idx)
        ]
        with pytest.raises(AssertionError):
            assert_equal(models.answer(layouts, spoilt), reference)
