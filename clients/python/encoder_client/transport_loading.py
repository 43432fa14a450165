"""From names to transports, with those left out that cannot be loaded here."""

from __future__ import annotations

import logging

from encoder_client.client_settings import ClientSettings
from encoder_client.errors import EncoderClientError
from encoder_client.pool.embedding_pool import EmbeddingPool
from encoder_client.transports import Reader
from encoder_client.transports.inline import InlineReader
from encoder_client.transports.shared_memory import SharedMemoryReader
from encoder_client.transports.zeromq import ZeroMqReader

logger = logging.getLogger("encoder_client")


def load_readers(settings: ClientSettings, pool: EmbeddingPool, inline: InlineReader) -> dict[str, Reader]:
    """Makes the transports of a client.

    Args:
        settings: they name the transports, the preferred first, and what Mooncake takes.
        pool: where they read to.
        inline: the one in band.

    Raises:
        EncoderClientError: none of them can be loaded.
    """
    readers: dict[str, Reader] = {}
    for name in settings.transports:
        match name:
            case "shared_memory":
                readers[name] = SharedMemoryReader()
            case "zeromq":
                readers[name] = ZeroMqReader()
            case "inline":
                readers[name] = inline
            case "mooncake":
                from encoder_client.transports.mooncake import MooncakeReader

                try:
                    readers[name] = MooncakeReader(pool, settings.mooncake_host, settings.mooncake_devices)
                except ImportError as error:
                    logger.info("mooncake is left out, it cannot be loaded: %s", error)
    if not readers:
        raise EncoderClientError("none of the transports can be loaded here; add `inline`, which always can")
    return readers
