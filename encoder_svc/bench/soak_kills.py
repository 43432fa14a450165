"""Kills the engine of a server now and then, and measures how long it takes to be back."""

from __future__ import annotations

import asyncio
from time import monotonic

from encoder_client import EncoderClient, EncoderClientError
from encoder_svc.bench.service import Service
from epd.encoder.v1.encoder_service_pb2 import EngineState

GIVE_UP_SECONDS = 60.0
_POLL_SECONDS = 0.05


class EngineKiller:
    """Kills (SIGKILL) each time that so many more requests have ended.

    Args:
        service: whose engine.
        client: of the same server.
        every: requests between two kills. 0: never.
    """

    def __init__(self, service: Service, client: EncoderClient, every: int) -> None:
        self._service = service
        self._client = client
        self._every = every
        self.kills = 0
        self.recoveries: list[float] = []

    async def maybe_kill(self, ended: int) -> None:
        """Kills if it is time to, and waits until the engine is back.

        Args:
            ended: requests that have ended.
        """
        if not self._every or ended < self._every * (self.kills + 1):
            return
        engines = self._service.processes().get("engine", [])
        if not engines:
            return
        before = await self._boot_ids()
        self.kills += 1
        killed = monotonic()
        engines[0].kill()
        while monotonic() - killed < GIVE_UP_SECONDS:
            await asyncio.sleep(_POLL_SECONDS)
            now = await self._boot_ids()
            if len(now) == len(before) and now != before:
                break
        self.recoveries.append(monotonic() - killed)

    async def _boot_ids(self) -> set[str]:
        """The lives of the engines that take batches."""
        try:
            info = await self._client.server_info()
        except EncoderClientError:
            return set()
        return {engine.boot_id for engine in info.engines if engine.state == EngineState.ENGINE_STATE_READY}
