"""The language side of Encode-Prefill-Decode serving: a client of encoder-svc.

It needs neither torch nor transformers nor Mooncake; the extras ``torch``, ``language`` and ``mooncake`` add what uses
them.
"""

from __future__ import annotations

from encoder_client.client import EncoderClient
from encoder_client.client_settings import ClientSettings
from encoder_client.content_key import content_key, item_content_key
from encoder_client.credentials import Credentials
from encoder_client.embedding import Embedding
from encoder_client.encode_call import EncodeCall
from encoder_client.errors import (
    ChunkError,
    EncoderClientError,
    EncoderError,
    FieldViolation,
    HandleError,
    PartError,
    PoolError,
    PromptError,
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
from encoder_client.fleet.encoder_fleet import EncoderFleet
from encoder_client.fleet.encoder_health import HealthState
from encoder_client.fleet.fleet_call import FleetCall
from encoder_client.media import audio, image, video
from encoder_client.pool.embedding_handle import EmbeddingHandle
from encoder_client.pool.embedding_pool import EmbeddingPool
from encoder_client.pool.pool_ledger import PoolStatistics
from encoder_client.pool.pool_sharing import PoolSharing
from encoder_client.prompts.multimodal_embedding import MultiModalEmbedding
from encoder_client.prompts.prompt_metadata import VideoAudio
from encoder_client.subscriptions.subscription import Subscription
from encoder_client.threads.submission import Submission
from encoder_client.threads.sync_client import SyncEncoderClient
from encoder_client.transport_choice import TransportStatistics

__all__ = [
    "Accepted",
    "ChunkError",
    "ClientSettings",
    "Complete",
    "Credentials",
    "Embedding",
    "EmbeddingHandle",
    "EmbeddingPool",
    "EncodeCall",
    "EncoderClient",
    "EncoderClientError",
    "EncoderError",
    "EncoderFleet",
    "Event",
    "FieldViolation",
    "FleetCall",
    "HandleError",
    "HealthState",
    "Layout",
    "LeaseRevoked",
    "MultiModalEmbedding",
    "PartCancelled",
    "PartError",
    "PartFailed",
    "PoolError",
    "PoolSharing",
    "PoolStatistics",
    "PromptError",
    "ReadError",
    "Ready",
    "Submission",
    "Subscription",
    "SubscriptionEvent",
    "SyncEncoderClient",
    "Synced",
    "TransportStatistics",
    "VideoAudio",
    "audio",
    "content_key",
    "image",
    "item_content_key",
    "video",
]
