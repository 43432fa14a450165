"""The asynchronous client of one encoder service."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from copy import copy
from functools import partial
from types import TracebackType
from typing import Self

import grpc
from google.protobuf.duration_pb2 import Duration
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse

from encoder_client import chunk_checks
from encoder_client.caller_token import CallerToken
from encoder_client.connections import Connections
from encoder_client.embedding import Embedding
from encoder_client.encode_call import EncodeCall
from encoder_client.errors import EncoderClientError, ReadError, from_rpc_error
from encoder_client.media import add_placed
from encoder_client.part_reads import PartReads, gone
from encoder_client.pool import EmbeddingPool, Slot
from encoder_client.reading import ChunkReader
from encoder_client.stub import EncoderStub
from encoder_client.subscription import Subscription
from encoder_client.transport_choice import TransportChoice, TransportStatistics
from encoder_client.transports import TRANSPORTS, Reader
from encoder_client.transports.inline import InlineReader
from encoder_client.transports.shared_memory import SharedMemoryReader
from encoder_client.transports.zeromq import ZeroMqReader
from epd.encoder.v1 import encoder_service_pb2 as service
from epd.encoder.v1.embedding_pb2 import EmbeddingChunk, EncoderRef
from epd.encoder.v1.encoder_service_pb2 import CachePolicy, Delivery, LeaseState, ReadOutcome
from epd.encoder.v1.media_pb2 import MediaItem

logger = logging.getLogger("encoder_client")

SERVICE = "epd.encoder.v1.EncoderService"


class EncoderClient:
    """Encodes media and reads the embeddings.

    Use it as an async context manager, in one event loop.

    Args:
        target: the gRPC target of one encoder, such as ``127.0.0.1:50051``. Chunks of other encoders, which another
            process received, are read at the target that they name.
        credentials: TLS; None speaks plain text.
        token: proves who calls, to encoders with a file of callers. It goes to every encoder whose chunks are read.
        token_in_plain_text: let the token go to other hosts without TLS.
        receiver: the name under which leases are granted to this process. Empty: the caller of ``Encode``.
        pool: where embeddings are read to. None: a pool of 256 MiB.
        transports: names, the preferred first. One that cannot be loaded here is left out, with a line in the log; one
            that does not reach an encoder is passed over.
        mooncake_host: the address of this host for Mooncake peers. Empty: found from the route to the encoder.
        expected_fingerprint: 32 bytes: only embeddings of exactly these weights, dtype, preprocessing and width are
            taken. Empty: any.
        read_timeout: seconds that a read may take, waiting for space not counted, and for space again as many.
        channels: connections to each encoder. More than one helps if large reads in band share them with calls.

    Example:
        >>> async with EncoderClient("127.0.0.1:50051") as client:
        ...     async with client.encode([image(Path("cat.jpg"))]) as call:
        ...         [embedding] = await call.embeddings()
        ...     print(embedding.numpy().shape, embedding.transport)
    """

    def __init__(
        self,
        target: str,
        *,
        credentials: grpc.ChannelCredentials | None = None,
        token: str = "",
        token_in_plain_text: bool = False,
        receiver: str = "",
        pool: EmbeddingPool | None = None,
        transports: Sequence[str] = TRANSPORTS,
        mooncake_host: str = "",
        expected_fingerprint: bytes = b"",
        read_timeout: float = 30.0,
        channels: int = 1,
    ) -> None:
        self.target = target
        self.receiver = receiver
        self.pool = pool if pool is not None else EmbeddingPool()
        self.expected_fingerprint = expected_fingerprint
        self.read_timeout = read_timeout
        caller = CallerToken(token, credentials, in_plain_text=token_in_plain_text)
        self._connections = Connections(target, credentials, min(5.0, read_timeout), channels, caller)
        inline = InlineReader(self._connections.stub_of)
        self._choice = TransportChoice(_readers(transports, self.pool, mooncake_host, inline))
