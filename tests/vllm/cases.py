"""The prompts that both models answer."""

from __future__ import annotations

from fractions import Fraction

from tests.media.videos import Clip
from tests.photograph import photo
from tests.vllm.prompts import Media

CLIP = Media("video", Clip(frames=8, rate=Fraction(2)).make())
"""Sampled at two frames a second, which is what vLLM takes embeddings of any video to be."""
PHOTO = Media("image", photo(256, 192))

CASES: dict[str, list[Media]] = {
    "one image": [PHOTO],
    "another image of its size": [Media("image", photo(256, 192, quality=5))],
    "two images": [Media("image", photo(140, 112)), Media("image", photo(252, 196))],
    "an image twice": [PHOTO, PHOTO],
    "a video": [CLIP],
    "a video and an image": [CLIP, Media("image", photo(84, 224))],
}
