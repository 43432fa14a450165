"""``ec_transfer_params`` of a vLLM request: where the embedding of each media item comes from.

::

    {"parts": [{"content_key": "3104a8c5…", "encoder": "5c1f…"},
               {"content_key": "7951472b…", "media": "…", "cache_salt": "74656e"}]}

One entry for each media item of the prompt, in the order in which they stand in it.

``content_key``
    The 32 bytes that name the embedding (docs/contract.md), as 64 hexadecimal digits. It is also the item's ``uuid`` in
    the request: vLLM finds embeddings and prefix blocks in its caches by that, so it must differ wherever media,
    options or models do.
``encoder``
    The ``instance_id`` of an encoder that has the embedding: it is asked first. It names nothing that the connector's
    own fleet does not have, and gives no right to anything.
``media``
    A serialised ``MediaItem`` in base64: what to encode if no encoder has the embedding. Without it the request fails
    then.
``cache_salt``
    Only beside ``media``: the salt that the key was computed with, in hexadecimal digits.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.message import DecodeError

from encoder_client.errors import PromptError
from epd.encoder.v1.media_pb2 import MediaItem, Modality

MODALITIES = {
    "image": Modality.MODALITY_IMAGE,
    "video": Modality.MODALITY_VIDEO,
    "audio": Modality.MODALITY_AUDIO,
}
"""vLLM's names."""
MOST_ID_CHARACTERS = 256


@dataclass(frozen=True)
class Part:
    """One media item of a request."""

    content_key: bytes
    """32 bytes."""
    media: MediaItem | None = field(default=None, repr=False)
    """What to encode if no encoder has the embedding."""
    cache_salt: bytes = b""
    """What the key was computed with."""
    encoder: str = ""
    """The instance that has the embedding, if that is known."""

    def source(self, modality: str) -> MediaItem:
        """What to ask the encoders for: the media if they are there, else the embedding by its key.

        Args:
            modality: as vLLM names it.

        Raises:
            PromptError: there is no such modality here.
        """
        if self.media is not None:
            item = MediaItem()
            item.CopyFrom(self.media)
            return item
        if modality not in MODALITIES:
            raise PromptError(f"embeddings of the modality {modality} do not come from encoders")
        return MediaItem(modality=MODALITIES[modality], content_key=self.content_key)

    def to_json(self) -> dict[str, str]:
        """The entry of ``parts``."""
        entry = {"content_key": self.content_key.hex()}
        if self.encoder:
            entry["encoder"] = self.encoder
        if self.media is not None:
            entry["media"] = base64.b64encode(self.media.SerializeToString()).decode()
            entry["cache_salt"] = self.cache_salt.hex()
        return entry


def transfer_params(parts: Sequence[Part]) -> dict[str, Any]:
    """Writes ``ec_transfer_params``.

    Args:
        parts: in the order in which they stand in the prompt.
    """
    return {"parts": [part.to_json() for part in parts]}


def parse(params: Mapping[str, Any] | None, identifiers: Sequence[str]) -> list[Part]:
    """Reads ``ec_transfer_params``.

    Args:
        params: what the request has.
        identifiers: of vLLM's multimodal features, in the order of the prompt.

    Raises:
        PromptError: they are missing, malformed, or those of another prompt.
    """
    entries = params.get("parts") if isinstance(params, Mapping) else None
    if not isinstance(entries, list) or len(entries) != len(identifiers):
        raise PromptError(
            f"the prompt has {len(identifiers)} media items, so ec_transfer_params needs as many entries in "
            '"parts", each with its "content_key"'
        )
    parts = [_part(index, entry) for index, entry in enumerate(entries)]
    for index, (part, identifier) in enumerate(zip(parts, identifiers, strict=True)):
        if part.content_key.hex() != identifier:
            raise PromptError(
                f"part {index} has the content key {part.content_key.hex()}, and vLLM knows its item as {identifier}; "
                "give the key in lower-case hexadecimal digits as the item's uuid, and no mm_processor_kwargs"
            )
    return parts


def _part(index: int, entry: object) -> Part:
    if not isinstance(entry, Mapping):
        raise PromptError(f"parts[{index}] is no object")
    content_key = _hexadecimal(index, entry, "content_key")
    if len(content_key) != 32:
        raise PromptError(f"parts[{index}].content_key must have 64 hexadecimal digits")
    encoder = entry.get("encoder", "")
    if not isinstance(encoder, str) or len(encoder) > MOST_ID_CHARACTERS:
        raise PromptError(f"parts[{index}].encoder must be the instance_id of an encoder")
    if (media := entry.get("media")) is None:
        return Part(content_key, encoder=encoder)
    try:
        item = MediaItem.FromString(base64.b64decode(str(media), validate=True))
    except (binascii.Error, DecodeError):
        raise PromptError(f"parts[{index}].media must be a serialised MediaItem in base64") from None
    return Part(content_key, item, _hexadecimal(index, entry, "cache_salt"), encoder)


def _hexadecimal(index: int, entry: Mapping[str, object], name: str) -> bytes:
    try:
        return bytes.fromhex(str(entry.get(name, "")))
    except ValueError:
        raise PromptError(f"parts[{index}].{name} must be hexadecimal digits") from None
