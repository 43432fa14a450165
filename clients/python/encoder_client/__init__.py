"""The language side of Encode-Prefill-Decode serving: a client of encoder-svc.

It needs neither torch nor transformers nor Mooncake; the extras ``torch``, ``language`` and ``mooncake`` add what uses
them.
"""

from __future__ import annotations

from encoder_client.client import EncoderClient
from encoder_client.content_key import content_key, item_content_key
from encoder_client.embedding import Embedding
from encoder_client.encode_call import EncodeCall
from encoder_client.errors import (
    ChunkError,
    EncoderClientError,
    EncoderError,
    FieldViolation,
    PartError,
    PoolError,
    ReadError,
)
from encoder_client.events import (
    Accepted,
    Complete,
    Event,
    Layout,
    LeaseRevoked,
    PartCancelled,
    PartFailed,
    Ready,
    SubscriptionEvent,
    Synced,
)
from encoder_client.media import audio, image, video
from encoder_client.pool import EmbeddingPool
from encoder_client.pool_ledger import PoolStatistics
from encoder_client.subscription import Subscription

__all__ = [
    "Accepted",
    "ChunkError",
    "Complete",
    "Embedding",
    "EmbeddingPool",
    "EncodeCall",
    "EncoderClient",
    "EncoderClientError",
    "EncoderError",
    "Event",
    "FieldViolation",
    "Layout",
    "LeaseRevoked",
    "PartCancelled",
    "PartError",
    "PartFailed",
    "PoolError",
    "PoolStatistics",
    "ReadError",
    "Ready",
    "Subscription",
    "SubscriptionEvent",
    "Synced",
    "audio",
    "content_key",
    "image",
    "item_content_key",
    "video",
]
