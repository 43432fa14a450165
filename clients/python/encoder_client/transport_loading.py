"""From names to transports, with those left out that cannot be loaded here."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from encoder_client.errors import EncoderClientError
from encoder_client.pool.embedding_pool import EmbeddingPool
from encoder_client.transports import TRANSPORTS, Reader
from encoder_client.transports.inline import InlineReader
from encoder_client.transports.shared_memory import SharedMemoryReader
from encoder_client.transports.zeromq import ZeroMqReader

logger = logging.getLogger("encoder_client")


def load_readers(
    names: Sequence[str], pool: EmbeddingPool, mooncake_host: str, mooncake_devices: str, inline: InlineReader
) -> dict[str, Reader]:
    """Makes the transports of a client.

    Args:
        names: the preferred first.
        pool: where they read to.
        mooncake_host: the address of this host for Mooncake peers. Empty: found from the route to the encoder.
        mooncake_devices: RDMA devices, with commas between them. Empty: all.
        inline: the one in band.

    Raises:
        ValueError: no transport has such a name.
        EncoderClientError: none of them can be loaded.
    """
    readers: dict[str, Reader] = {}
    for name in names:
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
                    readers[name] = MooncakeReader(pool, mooncake_host, mooncake_devices)
                except ImportError as error:
                    logger.info("mooncake is left out, it cannot be loaded: %s", error)
            case _:
                raise ValueError(f"no transport is named {name!r}; there are {', '.join(TRANSPORTS)}")
    if not readers:
        raise EncoderClientError("none of the transports can be loaded here; add `inline`, which always can")
    return readers
