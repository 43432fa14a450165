"""The content key: library, published code and published vectors agree."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from encoder_client.content_key import canonical_options, content_key, frames_digest, item_content_key, media_digest
from encoder_client.media import image, video
from epd.encoder.v1.media_pb2 import AudioOptions, ImageOptions, MediaItem, Modality, VideoOptions

DOCS = Path(__file__).parents[2] / "docs"
PAGE = next(
    text for page in sorted(DOCS.glob("contract*.md")) if "epd.content-key.v1" in (text := page.read_text())
)  # fmt: skip
VECTORS: list[dict[str, Any]] = next(
    json.loads(code) for code in re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL) if '"content_key"' in code
)  # fmt: skip
OPTIONS = {1: ImageOptions, 2: VideoOptions, 3: AudioOptions}
NAMESPACE = bytes(32)


def published_code() -> dict[str, Any]:
    code = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "def content_key" in block)
    scope: dict[str, Any] = {}
    exec(compile(code, "docs/contract.md", "exec"), scope)
    return scope


def test_there_are_vectors() -> None:
    assert len(VECTORS) >= 6
    assert len({vector["content_key"] for vector in VECTORS}) == len(VECTORS)


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_the_library_agrees_with_the_published_vectors(vector: dict[str, Any]) -> None:
    options = OPTIONS[vector["modality"]](**vector["options"])
    if "frames" in vector:
        digest = frames_digest([bytes.fromhex(frame) for frame in vector["frames"]], vector["fps"])
    else:
        digest = media_digest(bytes.fromhex(vector["media"]))
    assert digest.hex() == vector["media_digest"]
    assert canonical_options(options) == vector["options_text"]
    key = content_key(
        bytes.fromhex(vector["cache_namespace"]), bytes.fromhex(vector["salt"]), vector["modality"], digest, options
    )
    assert key.hex() == vector["content_key"]


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: vector["name"])
def test_the_published_code_agrees_with_the_published_vectors(vector: dict[str, Any]) -> None:
    code = published_code()
    if "frames" in vector:
        digest = code["frames_digest"]([bytes.fromhex(frame) for frame in vector["frames"]], vector["fps"])
    else:
        digest = code["media_digest"](bytes.fromhex(vector["media"]))
    key = code["content_key"](
        bytes.fromhex(vector["cache_namespace"]), bytes.fromhex(vector["salt"]), vector["modality"], digest,
        list(vector["options"].items()),
    )  # fmt: skip
    assert key.hex() == vector["content_key"]


@given(salt=st.binary(max_size=64), cut=st.integers(min_value=0, max_value=64))
def test_a_byte_cannot_wander_between_fields(salt: bytes, cut: int) -> None:
    digest = media_digest(b"file")
    text = str(int(Modality.MODALITY_IMAGE)).encode()
    key = content_key(NAMESPACE, salt + text, Modality.MODALITY_IMAGE, digest)
    assert key != content_key(NAMESPACE, salt, Modality.MODALITY_IMAGE, digest)
    assert content_key(NAMESPACE, salt[:cut], Modality.MODALITY_IMAGE, digest) != key


def test_an_item_and_its_parts_have_the_same_key() -> None:
    item = image(b"file", min_pixels=56 * 56)
    digest = media_digest(b"file")
    assert item_content_key(NAMESPACE, b"", item) == content_key(
        NAMESPACE, b"", Modality.MODALITY_IMAGE, digest, ImageOptions(min_pixels=56 * 56)
    )
    frames = video([b"a", b"b"], frames_per_second=4.0)
    assert item_content_key(NAMESPACE, b"", frames) == content_key(
        NAMESPACE, b"", Modality.MODALITY_VIDEO, frames_digest([b"a", b"b"], 4.0)
    )


def test_the_place_of_an_item_and_its_media_type_do_not_matter() -> None:
    plain = image(b"file", part_idx=0)
    moved = MediaItem()
    moved.CopyFrom(plain)
    moved.part_idx, moved.mime_type = 7, "image/png"
    assert item_content_key(NAMESPACE, b"", plain) == item_content_key(NAMESPACE, b"", moved)


def test_an_item_without_its_bytes_has_no_key() -> None:
    with pytest.raises(ValueError, match="data"):
        item_content_key(NAMESPACE, b"", image("https://example.com/cat.jpg"))


def test_frames_are_not_their_concatenation() -> None:
    assert frames_digest([b"ab", b"c"], 1.0) != frames_digest([b"a", b"bc"], 1.0)
    assert frames_digest([b"ab"], 0.0) == frames_digest([b"ab"], -0.0)


@pytest.mark.parametrize(("namespace", "digest"), [(b"", bytes(32)), (bytes(32), b"")])
def test_lengths_are_checked(namespace: bytes, digest: bytes) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        content_key(namespace, b"", Modality.MODALITY_IMAGE, digest)
