"""Who may read the arena: the transports that serve it, and why the others do not."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from encoder_svc.shared_memory import SharedMemory
from encoder_svc.transports.mooncake import MooncakeServer, TransportUnavailableError, serve_by_mooncake
from epd.encoder.v1.embedding_pb2 import Transport
from epd.encoder.v1.encoder_service_pb2 import TransportInfo
from epd.internal.v1.engine_pb2 import MooncakeSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ArenaService:
    """An arena that is served, for the life of the process."""

    transports: tuple[TransportInfo, ...]
    """The encoder's preference first."""
    mooncake: MooncakeServer | None

    @property
    def mooncake_session(self) -> str:
        """What Mooncake readers open. Empty: Mooncake does not serve."""
        return self.mooncake.session if self.mooncake else ""


def serve_arena(arena: SharedMemory, mooncake: MooncakeSettings | None) -> ArenaService:
    """Starts every transport that can serve an arena here; one that cannot is no error.

    Args:
        arena: registered here, once.
        mooncake: how Mooncake serves. None: it does not.
    """
    inline = TransportInfo(transport=Transport.TRANSPORT_INLINE, available=True)
    if mooncake is None:
        reason = "the server is set up without it; see the setting mooncake"
        return ArenaService((inline, TransportInfo(transport=Transport.TRANSPORT_MOONCAKE, reason=reason)), None)
    try:
        server = serve_by_mooncake(arena, mooncake.host, mooncake.protocol, mooncake.devices)
    except TransportUnavailableError as error:
        log.warning("serving without Mooncake: %s", error)
        return ArenaService((inline, TransportInfo(transport=Transport.TRANSPORT_MOONCAKE, reason=str(error))), None)
    log.info("Mooncake serves the arena at %s by %s", server.session, mooncake.protocol)
    return ArenaService((TransportInfo(transport=Transport.TRANSPORT_MOONCAKE, available=True), inline), server)
