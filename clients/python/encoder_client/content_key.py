"""The content key: 32 bytes that name (media, options, model, preprocessing). Formula: docs/contract.md.

It belongs to the contract, so its code is beside the stubs, where the server finds it too.
"""

from epd.content_key import (
    Options,
    canonical_double,
    canonical_options,
    content_key,
    frames_digest,
    item_content_key,
    media_digest,
)

__all__ = [
    "Options",
    "canonical_double",
    "canonical_options",
    "content_key",
    "frames_digest",
    "item_content_key",
    "media_digest",
]
