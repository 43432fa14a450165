"""Names contents: the published content key (docs/contract.md), in the scope of its caller."""

from __future__ import annotations

from encoder_svc.runtime.slots import ContentName
from epd.content_key import content_key
from epd.encoder.v1.media_pb2 import MediaItem


def name_content(identity: str, cache_namespace: bytes, salt: bytes, item: MediaItem, digest: bytes) -> ContentName:
    """The name of an item's embedding.

    Args:
        identity: whose it is.
        cache_namespace: the engine's, 32 bytes.
        salt: the request's.
        item: modality and options.
        digest: the media digest of the item's files, 32 bytes.
    """
    options = item.WhichOneof("options")
    given = getattr(item, options) if options is not None else None
    return ContentName(identity, content_key(cache_namespace, salt, item.modality, digest, given))
