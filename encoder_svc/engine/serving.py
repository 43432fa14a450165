"""Who may read the arena: the transports that serve it, and why the others do not."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from encoder_svc.engine.slot_places import SlotPlaces
from encoder_svc.shared_memory import SharedMemory
from encoder_svc.transports import TransportServer, TransportUnavailableError
from encoder_svc.transports.mooncake import serve_by_mooncake
from encoder_svc.transports.shared_memory import serve_by_shared_memory
from encoder_svc.transports.zeromq import serve_by_zeromq
from epd.encoder.v1.embedding_pb2 import Locator, Transport
from epd.encoder.v1.encoder_service_pb2 import TransportInfo
from epd.internal.v1.engine_pb2 import ConfigureEngine

log = logging.getLogger(__name__)

_TRANSPORTS = {
    "shared_memory": Transport.TRANSPORT_SHARED_MEMORY,
    "mooncake": Transport.TRANSPORT_MOONCAKE,
    "zeromq": Transport.TRANSPORT_ZEROMQ,
}


@dataclass(frozen=True)
class ArenaService:
    """An arena that is served, for the life of the process."""

    transports: tuple[TransportInfo, ...]
    """All, the fastest first. In band is the front's, and always works."""
    servers: tuple[TransportServer, ...]
    """Those that serve it here, in the same order."""

    @property
    def locators(self) -> list[Locator]:
        """Where a slot is read whose header is the arena's first byte."""
        return [server.locator for server in self.servers]


def serve_arena(arena: SharedMemory, places: SlotPlaces, boot_id: str, asked: ConfigureEngine) -> ArenaService:
    """Starts every transport that is asked for and can serve an arena here; one that cannot is no error.

    Args:
        arena: registered here, once.
        places: where its slots are.
        boot_id: of this life of the engine (32 hex digits).
        asked: how each transport serves.
    """

    def by_shared_memory() -> TransportServer:
        return serve_by_shared_memory(arena, boot_id, Path(asked.shared_memory.socket_path))

    def by_mooncake() -> TransportServer:
        mooncake = asked.mooncake
        return serve_by_mooncake(arena, mooncake.host, mooncake.protocol, mooncake.devices)

    def by_zeromq() -> TransportServer:
        zeromq = asked.zeromq
        curve_key = Path(zeromq.curve_key) if zeromq.curve_key else None
        return serve_by_zeromq(arena, places.nbytes_at, zeromq.listen, zeromq.port, zeromq.host, curve_key)

    serving: dict[Literal["shared_memory", "mooncake", "zeromq"], Callable[[], TransportServer]] = {
        "shared_memory": by_shared_memory,
        "mooncake": by_mooncake,
        "zeromq": by_zeromq,
    }
    transports, servers = [], []
    for name, serve in serving.items():
        info = TransportInfo(transport=_TRANSPORTS[name])
        transports.append(info)
        if not asked.HasField(name):
            info.reason = f"the server is set up without it; see the setting {name}"
            continue
        try:
            server = serve()
        except TransportUnavailableError as error:
            log.warning("serving without %s: %s", name, error)
            info.reason = str(error)
            continue
        servers.append(server)
        info.available = True
    transports.append(TransportInfo(transport=Transport.TRANSPORT_INLINE, available=True))
    return ArenaService(tuple(transports), tuple(servers))
